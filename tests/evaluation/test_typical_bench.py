"""A bench with typical acceptance: lossy by name wherever it shows, beside exact sampling, with task quality."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lasd.artifacts import load_artifact
from lasd.decoding.sampling import SamplingParams
from lasd.decoding.target import TargetModel
from lasd.errors import LasdError
from lasd.evaluation.bench import BenchConfig, record_in_artifact, run_bench
from lasd.evaluation.report import console, print_bench
from lasd.evaluation.runners import DecoderRunner, GenerateRunner, prompt_seed
from lasd.evaluation.setup import ModelChoice, method_label, parse_typical
from tests.evaluation.tiny import save_heads

LOSSY = "medusa (typical 0.3/0.5, LOSSY)"
Finished = tuple[BenchConfig, dict[str, Any]]


@pytest.fixture(scope="module")
def finished(model_folder: Path, target: TargetModel, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """A bench that samples, with typical acceptance and maths answers."""
    folder = tmp_path_factory.mktemp("typical")
    rows = [{"id": i, "category": "maths", "turns": [f"what is {i}?"], "reference": [f"#### {i}"]} for i in range(3)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    choice = ModelChoice(str(model_folder), save_heads(folder / "heads", target), "fp32", "cpu")
    config = BenchConfig(choice, folder / "rows.jsonl", folder / "out.json", max_new_tokens=32)
    config = replace(config, temperature=0.7, typical=(0.3, 0.5), quality="math")
    return config, run_bench(config)


def test_exact_and_lossy_stand_side_by_side(finished: Finished) -> None:
    methods = finished[1]["methods"]
    assert list(methods) == ["generate", "plain", "medusa", LOSSY]
    assert [values["lossy"] for values in methods.values()] == [False, False, False, True]


def test_typical_accepts_more_than_exact_sampling(finished: Finished) -> None:
    methods = finished[1]["methods"]
    assert methods[LOSSY]["tokens_per_step"] > methods["medusa"]["tokens_per_step"]


def test_exact_sampling_gives_plains_tokens_and_generate_is_not_compared(finished: Finished) -> None:
    methods = finished[1]["methods"]
    assert methods["medusa"]["share_identical"] == methods["plain"]["share_identical"] == 1
    assert methods["generate"]["share_identical"] is None


def test_quality_stands_beside_speed_for_every_method(finished: Finished) -> None:
    for values in finished[1]["methods"].values():
        assert 0 <= values["quality"]["correct"]["mean"] <= 1
        assert values["speedup_vs_generate"] > 0


def test_every_table_names_the_lossy_method_so(finished: Finished, capsys: pytest.CaptureFixture[str]) -> None:
    print_bench(finished[1], console())
    text = capsys.readouterr().out
    assert "sampled at temperature 0.7" in text
    assert text.count("LOSSY") >= 3
    assert "quality: math" in text
    lossy_rows = [line for line in text.splitlines() if "medusa" in line and ("x" in line or "%" in line)]
    assert lossy_rows


def test_speed_of_a_lossy_method_is_printed_in_fp32_though_its_answers_differ(
    finished: Finished, capsys: pytest.CaptureFixture[str]
) -> None:
    result = json.loads(json.dumps(finished[1]))
    result["methods"][LOSSY]["share_identical"] = 0.0
    print_bench(result, console())
    assert "not exact" not in capsys.readouterr().out


def test_the_card_names_it_lossy_and_keeps_the_quality(finished: Finished) -> None:
    config, result = finished
    record_in_artifact(config, result)
    assert config.choice.artifact is not None
    measured = load_artifact(config.choice.artifact).manifest.measured["bench rows float32 batch 1 temperature 0.7"]
    assert measured["methods"][LOSSY]["correct"] == result["methods"][LOSSY]["quality"]["correct"]["mean"]
    assert LOSSY in (config.choice.artifact / "README.md").read_text()


def test_typical_without_a_drafter_is_refused(finished: Finished) -> None:
    config = replace(finished[0], choice=replace(finished[0].choice, artifact=None))
    with pytest.raises(LasdError, match="plain decoding, which drafts nothing"):
        run_bench(config)


def test_typical_at_temperature_zero_is_refused(finished: Finished) -> None:
    with pytest.raises(LasdError, match="a temperature above 0"):
        run_bench(replace(finished[0], temperature=0.0))


@pytest.mark.parametrize(("text", "pair"), [("0.09,0.3", (0.09, 0.3)), (None, None)])
def test_typical_is_read_from_two_numbers(text: str | None, pair: tuple[float, float] | None) -> None:
    assert parse_typical(text) == pair


@pytest.mark.parametrize("text", ["0.09", "a,b", "1,2,3", ""])
def test_another_text_is_refused(text: str) -> None:
    with pytest.raises(LasdError, match="expected EPSILON,DELTA"):
        parse_typical(text)


def test_an_exact_method_keeps_its_name() -> None:
    assert method_label("medusa", SamplingParams(temperature=1.0)) == "medusa"


def test_sampled_answers_depend_on_prompt_and_seed_alone(target: TargetModel) -> None:
    params = SamplingParams(max_new_tokens=12, temperature=1.5, seed=1)
    one = DecoderRunner("plain", target, None, params)
    three = DecoderRunner("plain", target, None, params, max_slots=3)
    prompts = [[5, 6, 7], [8, 9], [5, 6, 8]]
    assert three.run(prompts).tokens == [one.run([prompt]).tokens[0] for prompt in prompts]
    other = DecoderRunner("plain", target, None, replace(params, seed=2), max_slots=3)
    assert other.run(prompts).tokens != three.run(prompts).tokens


def test_each_prompt_has_a_seed_of_its_own() -> None:
    seeds = {prompt_seed(seed, ids) for seed in range(20) for ids in ([1], [1, 2], [2, 1])}
    assert len(seeds) == 60


def test_generate_samples_where_the_bench_does(target: TargetModel) -> None:
    greedy = GenerateRunner(target, 12).run([[5, 6, 7]]).tokens
    sampled = GenerateRunner(target, 12, temperature=2.0, seed=1)
    assert sampled.run([[5, 6, 7]]).tokens == sampled.run([[5, 6, 7]]).tokens != greedy
