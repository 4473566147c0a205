"""The proof: equal answers count only if drafts were made, accepted and rejected; one difference in fp32 is enough to
fail."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lasd.artifacts import load_artifact
from lasd.decoding.target import TargetModel
from lasd.errors import LasdError
from lasd.evaluation.metrics import Run
from lasd.evaluation.prompts import Prompt
from lasd.evaluation.proof_report import print_proof
from lasd.evaluation.prove import Proof, ProveConfig, compare, proof_record, record_in_artifact, run_prove
from lasd.evaluation.report import console
from lasd.evaluation.rounding import Diagnosis
from lasd.evaluation.sampling_proof import SamplingSettings
from lasd.evaluation.setup import ModelChoice
from tests.evaluation.tiny import save_heads, write_prompts

PROMPT = Prompt("q", None, (4, 5))


class Fixed:
    """Gives one answer to everything."""

    def __init__(self, name: str, answer: list[int], accepted: list[int], nodes: int) -> None:
        self.name = name
        self.result = Run([answer], 1.0, len(accepted), accepted, nodes)

    def run(self, prompts: Sequence[Sequence[int]], at_most: int | None = None) -> Run:
        return self.result


def proof_of(target: TargetModel, answer: list[int], accepted: list[int], nodes: int, name: str = "medusa") -> Proof:
    return compare(target, [[PROMPT]], Fixed(name, answer, accepted, nodes), {PROMPT.ids: [1, 2, 3]})


def test_equal_answers_with_accepted_and_rejected_drafts_are_a_proof(target: TargetModel) -> None:
    assert proof_of(target, [1, 2, 3], [1], 3).verdict == "equal"


def test_another_token_is_a_difference(target: TargetModel) -> None:
    proof = proof_of(target, [1, 2, 9], [1], 3)
    assert proof.verdict == "different"
    assert (proof.divergences[0]["position"], proof.divergences[0]["token"]) == (2, 9)


def test_a_missing_token_is_a_difference(target: TargetModel) -> None:
    assert proof_of(target, [1, 2], [0], 3).verdict == "different"


def test_equal_answers_without_a_draft_prove_nothing(target: TargetModel) -> None:
    assert proof_of(target, [1, 2, 3], [0, 0], 2).verdict == "nothing proven"


def test_equal_answers_without_an_accepted_draft_prove_nothing(target: TargetModel) -> None:
    assert proof_of(target, [1, 2, 3], [0, 0], 6).verdict == "nothing proven"


def test_equal_answers_without_a_rejected_draft_prove_nothing(target: TargetModel) -> None:
    assert proof_of(target, [1, 2, 3], [1], 2).verdict == "nothing proven"


def test_plain_decoding_needs_no_draft(target: TargetModel) -> None:
    assert proof_of(target, [1, 2, 3], [0, 0], 2, name="plain").verdict == "equal"


def explained(verdict: str) -> dict[str, Any]:
    return vars(Diagnosis(1, 8, 0.1, 0.2, 0.4, 0.0, 9, True, verdict))


@pytest.mark.parametrize(
    ("exact", "found", "verdict", "passed"),
    [
        (True, "rounding", "different", False),  # fp32 has no excuse
        (False, "rounding", "rounding", True),
        (False, "unexplained", "unexplained", False),
    ],
)
def test_rounding_excuses_a_difference_below_fp32_only(exact: bool, found: str, verdict: str, passed: bool) -> None:
    proof = Proof("medusa", exact_expected=exact, prompts=2, equal=1, drafted=9, accepted=4)
    proof.divergences = [explained(found)]
    assert (proof.verdict, proof.passed) == (verdict, passed)


@pytest.fixture(scope="module")
def proven(
    model_folder: Path, heads_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[ProveConfig, dict[str, Any]]:
    """A proof of the engine on a tiny model at two batch sizes, with sampling."""
    prompts = write_prompts(tmp_path_factory.mktemp("proof") / "prompts.jsonl")
    choice = ModelChoice(str(model_folder), heads_folder, "fp32", "cpu")
    sampling = SamplingSettings(samples=160, temperature=0.5)
    config = ProveConfig(choice, prompts, max_new_tokens=24, batch_sizes=(1, 3), sampling=sampling)
    return config, run_prove(config)


def test_the_engine_is_proven_on_a_tiny_model(proven: tuple[ProveConfig, dict[str, Any]]) -> None:
    result = proven[1]
    assert result["proven"]
    assert result["passed"]
    assert [(row["method"], row["batch_size"]) for row in result["greedy"]] == [
        ("plain", 1),
        ("medusa", 1),
        ("plain", 3),
        ("medusa", 3),
    ]
    for row in result["greedy"]:
        assert row["equal"] == row["prompts"] == 3
        assert row["method"] == "plain" or min(row["accepted"], row["rejected"]) > 0


def test_the_samples_of_the_engine_follow_the_law(proven: tuple[ProveConfig, dict[str, Any]]) -> None:
    plain, medusa = proven[1]["sampling"]
    assert plain["verdict"] == medusa["verdict"] == "same law"
    assert medusa["accepted"] > 0
    assert medusa["identical_to_plain"] == 1


def test_a_report_in_bf16_passes_but_proves_nothing(proven: tuple[ProveConfig, dict[str, Any]]) -> None:
    config = replace(proven[0], choice=replace(proven[0].choice, dtype="bf16"), sampling=None)
    result = run_prove(config)
    assert result["mode"] == "report"
    assert result["passed"]
    assert not result["proven"]


def test_a_proof_stands_on_the_card_beside_those_of_other_dtypes(
    proven: tuple[ProveConfig, dict[str, Any]], target: TargetModel, tmp_path: Path
) -> None:
    folder = save_heads(tmp_path / "heads", target)
    config = replace(proven[0], choice=replace(proven[0].choice, artifact=folder))
    record_in_artifact(config, proven[1])
    other = {**proven[1], "settings": {**proven[1]["settings"]}}
    other["settings"]["environment"] = {**other["settings"]["environment"], "dtype": "bfloat16"}
    record_in_artifact(config, other)
    measured = load_artifact(folder).manifest.measured["proof"]
    assert set(measured) == {"float32", "bfloat16"}
    assert measured["float32"] == proof_record(proven[1])
    card = (folder / "README.md").read_text()
    assert "medusa, batch 3" in card
    assert "same law" in card


def test_recording_needs_an_artifact(proven: tuple[ProveConfig, dict[str, Any]]) -> None:
    config = replace(proven[0], choice=replace(proven[0].choice, artifact=None))
    with pytest.raises(LasdError, match="--record without --artifact"):
        record_in_artifact(config, proven[1])


def printed(proof: Proof, capsys: pytest.CaptureFixture[str], dtype: str = "float32") -> str:
    settings = {"model": "m", "prompts": "p", "num_prompts": 1, "max_new_tokens": 3, "environment": {"dtype": dtype}}
    mode = "proof" if dtype == "float32" else "report"
    result = {"greedy": [proof.to_dict()], "sampling": [], "settings": settings, "mode": mode, "passed": proof.passed}
    print_proof(result, console())
    return capsys.readouterr().out


def test_a_difference_is_printed_with_position_and_gap(target: TargetModel, capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(proof_of(target, [1, 2, 9], [1], 3), capsys)
    assert "prompt q differs at token 2: generate has 3, medusa has 9; top-two gap" in text
    assert "unexplained: the two tokens are" in text


def test_an_answer_that_just_ends_is_printed_as_unexplained(
    target: TargetModel, capsys: pytest.CaptureFixture[str]
) -> None:
    text = printed(proof_of(target, [1, 2], [1], 3), capsys)
    assert "generate has 3, medusa has no token" in text
    assert "unexplained: one answer ends there" in text


def test_nothing_proven_is_said_in_a_line(target: TargetModel, capsys: pytest.CaptureFixture[str]) -> None:
    assert "0 tokens were drafted, 0 accepted and 0 rejected" in printed(proof_of(target, [1, 2, 3], [0, 0], 2), capsys)


def test_a_bf16_report_says_that_only_fp32_proves(capsys: pytest.CaptureFixture[str]) -> None:
    proof = Proof("plain", exact_expected=False, prompts=1, equal=1)
    assert "only fp32 proves" in printed(proof, capsys, dtype="bfloat16")


@pytest.mark.parametrize("sizes", [(), (0,)])
def test_a_batch_size_below_one_is_refused(proven: tuple[ProveConfig, dict[str, Any]], sizes: tuple[int, ...]) -> None:
    with pytest.raises(LasdError, match="expected numbers of at least 1"):
        run_prove(replace(proven[0], batch_sizes=sizes))


def test_the_dtype_of_the_proof_is_that_of_the_model(target: TargetModel) -> None:
    assert target.dtype == torch.float32
    assert proof_of(target, [1, 2, 9], [1], 3).exact_expected
