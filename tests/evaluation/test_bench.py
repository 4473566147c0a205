"""The bench: interleaved, resumable, and its JSON holds the names that others read."""

import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from lasd.artifacts import load_artifact
from lasd.decoding.target import TargetModel
from lasd.errors import LasdError
from lasd.evaluation.bench import BenchConfig, measure, record_in_artifact, rotated, run_bench, summarise_rows
from lasd.evaluation.exactness import Referee
from lasd.evaluation.journal import Journal
from lasd.evaluation.metrics import Divergence, Run
from lasd.evaluation.prompts import Prompt
from lasd.evaluation.report import print_bench
from lasd.evaluation.runners import DecoderRunner
from lasd.evaluation.setup import ModelChoice, group_prompts
from tests.evaluation.tiny import save_heads, write_prompts

REQUIRED = [
    "tokens_per_s",
    "tokens_per_step",
    "accept_at_pos",
    "cond_accept_at_pos",
    "draft_acceptance",
    "speedup_vs_generate",
    "speedup_e2e",
    "speedup_decode",
    "speedup_specbench",
    "share_identical",
    "first_divergences",
    "nodes_per_step",
    "interval95",
    "time",
]


class FakeRunner:
    """Answers at once and writes down what it was asked."""

    def __init__(self, name: str, log: list[tuple[str, int]], fails_at: int | None = None) -> None:
        self.name, self.log, self.fails_at = name, log, fails_at

    def run(self, prompts: Sequence[Sequence[int]], at_most: int | None = None) -> Run:
        if at_most is None:  # not a warm-up
            if prompts[0][0] == self.fails_at:
                raise KeyboardInterrupt
            self.log.append((self.name, prompts[0][0]))
        return Run([[1, 2]] * len(prompts), 0.1, 1, [0], 1, verify_s=0.1)


def units(count: int) -> list[list[Prompt]]:
    return [[Prompt(str(index), None, (index,))] for index in range(count)]


def fakes(log: list[tuple[str, int]], fails_at: int | None = None) -> list[FakeRunner]:
    return [FakeRunner("generate", log), FakeRunner("plain", log), FakeRunner("medusa", log, fails_at)]


@pytest.fixture
def config(model_folder: Path, heads_folder: Path, prompts_file: Path, tmp_path: Path) -> BenchConfig:
    choice = ModelChoice(str(model_folder), heads_folder, "fp32", "cpu")
    return BenchConfig(choice, prompts_file, tmp_path / "out.json", max_new_tokens=16)


@pytest.fixture(scope="module")
def finished(
    model_folder: Path, heads_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, Any]]:
    """The output file and the result of one bench in batches of two."""
    folder = tmp_path_factory.mktemp("bench")
    prompts = write_prompts(folder / "prompts.jsonl")
    choice = ModelChoice(str(model_folder), heads_folder, "fp32", "cpu")
    output = folder / "out.json"
    return output, run_bench(BenchConfig(choice, prompts, output, max_new_tokens=16, batch_size=2))


def test_every_contestant_answers_a_prompt_before_the_next_prompt(target: TargetModel, tmp_path: Path) -> None:
    log: list[tuple[str, int]] = []
    measure(units(3), fakes(log), Referee(target), Journal(tmp_path / "j", {}))
    assert [index for _, index in log] == [0, 0, 0, 1, 1, 1, 2, 2, 2]


def test_each_contestant_comes_first_equally_often_and_follows_each_other_one() -> None:
    log: list[tuple[str, int]] = []
    orders = [[runner.name for runner in rotated(fakes(log), index)] for index in range(6)]
    assert [order[0] for order in orders[:3]] == ["generate", "plain", "medusa"]
    assert sorted(order[0] for order in orders) == sorted(["generate", "plain", "medusa"] * 2)
    assert len({pair for order in orders for pair in itertools.pairwise(order)}) == 6


def test_a_killed_bench_takes_up_where_it_was(target: TargetModel, tmp_path: Path) -> None:
    log: list[tuple[str, int]] = []
    with pytest.raises(KeyboardInterrupt):
        measure(units(4), fakes(log, fails_at=2), Referee(target), Journal(tmp_path / "j", {}))
    log.clear()
    journal = Journal(tmp_path / "j", {})
    measure(units(4), fakes(log), Referee(target), journal)
    assert {index for _, index in log} == {2, 3}
    assert len(journal.rows) == 4


def test_batches_are_of_one_category() -> None:
    prompts = [Prompt(str(i), "xy"[i % 2], (1,)) for i in range(5)]
    assert [[prompt.id for prompt in unit] for unit in group_prompts(prompts, 2)] == [["0", "2"], ["4"], ["1", "3"]]


def test_a_bench_writes_the_names_that_others_read(finished: tuple[Path, dict[str, Any]]) -> None:
    result = json.loads(finished[0].read_text())
    assert list(result["methods"]) == ["generate", "plain", "medusa"]
    for values in result["methods"].values():
        assert set(REQUIRED) <= set(values)
        assert set(values["categories"]) == {"ab", "cd"}
        assert set(REQUIRED) <= set(values["categories"]["ab"])


def test_in_fp32_all_answers_are_generates(finished: tuple[Path, dict[str, Any]]) -> None:
    assert {values["share_identical"] for values in finished[1]["methods"].values()} == {1.0}


def test_tokens_per_step_can_be_counted_again_from_the_rows(finished: tuple[Path, dict[str, Any]]) -> None:
    output, result = finished
    lines = output.with_suffix(".rows.jsonl").read_text().splitlines()
    runs = [json.loads(line)["row"]["runs"]["medusa"] for line in lines[1:-1]]
    kept = sum(len(answer) - 1 for run in runs for answer in run["tokens"])
    steps = sum(run["steps"] for run in runs)
    assert result["methods"]["medusa"]["tokens_per_step"] == kept / steps > 1


def test_the_result_says_what_it_was_measured_on(finished: tuple[Path, dict[str, Any]]) -> None:
    result = finished[1]
    assert result["settings"]["environment"]["dtype"] == "float32"
    assert result["settings"]["environment"]["threads"] >= 1
    assert len(result["settings"]["prompts_sha256"]) == 64
    assert "transformers" in result["provenance"]["versions"]


def test_a_killed_bench_resumes_with_the_same_command_and_others_are_refused(
    config: BenchConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = 0
    answer = DecoderRunner.run

    def killed(self: DecoderRunner, prompts: Sequence[Sequence[int]], at_most: int | None = None) -> Run:
        nonlocal calls
        calls += at_most is None
        if calls == 4:
            raise KeyboardInterrupt
        return answer(self, prompts, at_most)

    monkeypatch.setattr(DecoderRunner, "run", killed)
    with pytest.raises(KeyboardInterrupt):
        run_bench(config)
    monkeypatch.setattr(DecoderRunner, "run", answer)
    assert not config.output.exists()
    other = BenchConfig(config.choice, config.prompts, config.output, max_new_tokens=17)
    with pytest.raises(LasdError, match=r"other settings .max_new_tokens 16 there, 17 now"):
        run_bench(other)
    finished = config.output.with_suffix(".rows.jsonl").read_text().splitlines()[1]
    assert run_bench(config)["num_prompts"] == 3
    assert config.output.with_suffix(".rows.jsonl").read_text().splitlines()[1] == finished


def test_a_finished_bench_measures_anew(config: BenchConfig) -> None:
    first, second = run_bench(config), run_bench(config)
    assert first["methods"]["plain"]["seconds"] != second["methods"]["plain"]["seconds"]


def test_plain_is_measured_without_an_artifact(config: BenchConfig, model_folder: Path) -> None:
    choice = ModelChoice(str(model_folder), None, "fp32", "cpu")
    result = run_bench(BenchConfig(choice, config.prompts, config.output, limit=1, max_new_tokens=4))
    assert list(result["methods"]) == ["generate", "plain"]


def test_results_are_recorded_in_the_artifact(config: BenchConfig, target: TargetModel, tmp_path: Path) -> None:
    folder = save_heads(tmp_path / "heads", target)
    choice = ModelChoice(config.choice.model, folder, "fp32", "cpu")
    config = BenchConfig(choice, config.prompts, config.output, max_new_tokens=8)
    result = run_bench(config)
    record_in_artifact(config, result)
    measured = load_artifact(folder).manifest.measured["bench prompts float32 batch 1"]
    assert measured["methods"]["medusa"]["tokens_per_step"] == result["methods"]["medusa"]["tokens_per_step"]


def test_the_output_must_be_json(config: BenchConfig, tmp_path: Path) -> None:
    with pytest.raises(LasdError, match=r"expected a file name that ends in \.json"):
        run_bench(BenchConfig(config.choice, config.prompts, tmp_path / "out.txt"))


def printed(result: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> str:
    from lasd.evaluation.report import console

    print_bench(result, console())
    return capsys.readouterr().out


def test_the_table_has_a_row_for_each_method_and_category(
    finished: tuple[Path, dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    text = printed(finished[1], capsys)
    assert all(word in text for word in ("generate", "plain", "medusa", "100.0%", "by category", "ab", "cd"))


def diverged(exact_expected: bool) -> dict[str, Any]:
    run = Run([[1, 2]], 0.1, 1, [0], 1, verify_s=0.1, identical=[True])
    other = Run([[1, 3]], 0.1, 1, [0], 1, verify_s=0.1, identical=[False])
    other.divergences = [Divergence("q7", 1, 2, 3, 0.0156)]
    row = {"category": None, "runs": {"generate": run.to_dict(), "plain": other.to_dict()}}
    environment = {"dtype": "float32" if exact_expected else "bfloat16", "device": "d"}
    settings = {"model": "m", "prompts": "p", "max_new_tokens": 2, "batch_size": 1, "environment": environment}
    settings["temperature"] = 0.0
    return {"exact_expected": exact_expected, "num_prompts": 1, "methods": summarise_rows([row]), "settings": settings}


def test_in_low_precision_the_share_and_each_gap_stand_beside_the_speed_up(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(diverged(exact_expected=False), capsys)
    assert "plain: 1 of 1 answers differ" in text
    assert "q7 at 1: 0.0156" in text
    assert "1.00x" in text


def test_in_fp32_no_speed_up_is_printed_for_a_method_that_differs(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(diverged(exact_expected=True), capsys)
    assert "not exact" in text
    assert "plain: 1 of 1 answers differ" in text


@pytest.mark.slow
def test_a_bench_that_is_killed_with_signal_9_ends_with_the_same_answers(
    model_folder: Path, heads_folder: Path, tmp_path: Path
) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("".join(f"prompt number {index}\n" for index in range(12)))
    command = [sys.executable, "-m", "lasd.cli", "bench", "--model", str(model_folder), "--artifact", str(heads_folder)]
    command += ["--prompts", str(prompts), "--max-new-tokens", "120", "--output"]
    rows = tmp_path / "killed.rows.jsonl"
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([*command, str(tmp_path / "killed.json")], env=environment)
    while not rows.exists() or rows.read_text().count("\n") < 4:
        assert process.poll() is None, "the bench ended before it could be killed"
        time.sleep(0.005)
    process.kill()
    process.wait()
    finished = rows.read_text().splitlines()[1:4]
    for name in ("killed", "whole"):
        subprocess.run([*command, str(tmp_path / f"{name}.json")], check=True, env=environment)
    assert rows.read_text().splitlines()[1:4] == finished
    assert answers(rows) == answers(tmp_path / "whole.rows.jsonl")


def answers(rows: Path) -> list[list[list[int]]]:
    lines = [json.loads(line) for line in rows.read_text().splitlines()]
    return [line["row"]["runs"]["medusa"]["tokens"] for line in lines[1:-1]]
