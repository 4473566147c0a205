"""The proof: equal answers count only if something was drafted and accepted; one difference is enough to fail."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from lasd.decoding.target import TargetModel
from lasd.evaluation.exactness import Referee
from lasd.evaluation.metrics import Run
from lasd.evaluation.prompts import Prompt
from lasd.evaluation.prove import Proof, ProveConfig, compare, run_prove
from lasd.evaluation.report import console, print_proof
from lasd.evaluation.setup import ModelChoice


class Fixed:
    """Gives one answer to everything."""

    def __init__(self, name: str, answer: list[int], accepted: list[int], nodes: int) -> None:
        self.name = name
        self.result = Run([answer], 1.0, len(accepted), accepted, nodes)

    def run(self, prompts: Sequence[Sequence[int]], at_most: int | None = None) -> Run:
        return self.result


def proof_of(target: TargetModel, answer: list[int], accepted: list[int], nodes: int, name: str = "medusa") -> Proof:
    runners = [Fixed("generate", [1, 2, 3], [0, 0], 2), Fixed(name, answer, accepted, nodes)]
    return compare([[Prompt("q", None, (4, 5))]], runners, Referee(target))[0]


def test_equal_answers_with_accepted_drafts_are_a_proof(target: TargetModel) -> None:
    assert proof_of(target, [1, 2, 3], [1], 3).verdict == "equal"


def test_another_token_is_a_difference(target: TargetModel) -> None:
    proof = proof_of(target, [1, 2, 9], [1], 3)
    assert proof.verdict == "different"
    assert proof.divergences is not None
    assert (proof.divergences[0].position, proof.divergences[0].token) == (2, 9)


def test_a_missing_token_is_a_difference(target: TargetModel) -> None:
    assert proof_of(target, [1, 2], [0], 3).verdict == "different"


def test_equal_answers_without_a_draft_prove_nothing(target: TargetModel) -> None:
    assert proof_of(target, [1, 2, 3], [0, 0], 2).verdict == "nothing proven"


def test_equal_answers_without_an_accepted_draft_prove_nothing(target: TargetModel) -> None:
    assert proof_of(target, [1, 2, 3], [0, 0], 6).verdict == "nothing proven"


def test_plain_decoding_needs_no_draft(target: TargetModel) -> None:
    assert proof_of(target, [1, 2, 3], [0, 0], 2, name="plain").verdict == "equal"


@pytest.mark.parametrize("batch_size", [1, 3])
def test_the_engine_is_proven_on_a_tiny_model(
    batch_size: int, model_folder: Path, heads_folder: Path, prompts_file: Path
) -> None:
    choice = ModelChoice(str(model_folder), heads_folder, "fp32", "cpu")
    result = run_prove(ProveConfig(choice, prompts_file, max_new_tokens=24, batch_size=batch_size))
    assert result["proven"]
    medusa = result["methods"]["medusa"]
    assert medusa["equal"] == medusa["prompts"] == 3
    assert medusa["accepted"] > 0
    assert medusa["rejected"] > 0


def test_a_difference_is_printed_with_position_and_gap(target: TargetModel, capsys: pytest.CaptureFixture[str]) -> None:
    proof = proof_of(target, [1, 2, 9], [1], 3)
    settings = {"model": "m", "prompts": "p", "max_new_tokens": 3, "batch_size": 1, "environment": {"dtype": "float32"}}
    print_proof({"methods": {"medusa": proof.to_dict()}, "settings": settings}, console())
    text = capsys.readouterr().out
    assert "prompt q differs at token 2: generate has 3, medusa has 9; top-two gap" in text
