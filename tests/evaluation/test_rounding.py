"""Rounding is told from a bug: near ties in low precision are explained, leaks and wrong tokens are not."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import lasd.evaluation.rounding as rounding
from lasd.decoding.attention import StepRows
from lasd.decoding.cache import KVCache
from lasd.decoding.decoder import Decoder
from lasd.decoding.loading import load_target
from lasd.decoding.sampling import SamplingParams
from lasd.decoding.target import TargetModel
from lasd.evaluation.rounding import PassShape, WatchedDrafter, diagnose, stock_logits
from tests.drafters_under_test import TREE, Scripted

PROMPT = [5, 6, 7, 8, 9]
WIDE = PassShape(1, 12)


@pytest.fixture(scope="module")
def low(model_folder: Path) -> TargetModel:
    return load_target(str(model_folder), dtype="bf16", device="cpu")


@pytest.fixture(scope="module")
def answer(low: TargetModel) -> list[int]:
    return Decoder(low).generate([PROMPT], SamplingParams(max_new_tokens=20, eos_token_ids=()))[0].tokens


def near_and_far(target: TargetModel, before: list[int]) -> tuple[int, int, int]:
    """The likeliest token after a text, the second, and the least likely."""
    ranked = stock_logits(target, [*PROMPT, *before], 1)[0].argsort(descending=True).tolist()
    return ranked[0], ranked[1], ranked[-1]


@pytest.fixture
def tied(low: TargetModel, answer: list[int]) -> Iterator[tuple[list[int], list[int]]]:
    """Two answers that part at a place where the model has a tie: the runner-up's output row is made the winner's
    own."""
    before = answer[:6]
    first, second, _ = near_and_far(low, before)
    embedding = low.model.get_output_embeddings()
    assert isinstance(embedding, nn.Linear)
    kept = embedding.weight.data.clone()
    embedding.weight.data[second] = kept[first] * (1 + 2**-7)  # one unit in the last place
    yield [*before, first], [*before, second]
    embedding.weight.data.copy_(kept)


def test_a_tie_in_bf16_is_rounding(low: TargetModel, tied: tuple[list[int], list[int]]) -> None:
    expected, got = tied
    found = diagnose(low, PROMPT, expected, got, 6, WIDE, len(PROMPT))
    assert found.verdict == "rounding"
    assert found.token_gap is not None
    assert found.bound is not None
    assert found.token_gap <= found.bound
    assert found.leak == 0


def test_a_token_that_is_far_from_the_best_is_unexplained(low: TargetModel, answer: list[int]) -> None:
    _, _, worst = near_and_far(low, answer[:6])
    found = diagnose(low, PROMPT, answer, [*answer[:6], worst, *answer[7:]], 6, WIDE, len(PROMPT))
    assert found.verdict == "unexplained"
    assert not found.same_shape_differs


def test_the_first_token_is_looked_at_in_the_padded_prefill(low: TargetModel, answer: list[int]) -> None:
    _, _, worst = near_and_far(low, [])
    found = diagnose(low, PROMPT, answer, [worst], 0, PassShape(3, 9), 9)
    assert found.verdict == "unexplained"
    assert found.leak == 0
    assert found.same_shape_token == answer[0]


@pytest.mark.parametrize(("expected", "got"), [([1, 2, 3], [1, 2]), ([1, 2], [1, 2, 3])])
def test_an_answer_that_just_ends_is_unexplained(low: TargetModel, expected: list[int], got: list[int]) -> None:
    found = diagnose(low, PROMPT, expected, got, 2, WIDE, len(PROMPT))
    assert (found.verdict, found.token_gap) == ("unexplained", None)


def test_plain_decoding_in_the_shape_of_verification_is_plain_decoding(target: TargetModel) -> None:
    """In fp32 the shaped pass gives the stock model's logits at every place, whatever the drafted rows hold."""
    before = [11, 12, 13]
    shaped_PV, leak = rounding._plain_in_shape(target, PROMPT, before, PassShape(3, 7), 8)
    torch.testing.assert_close(shaped_PV, stock_logits(target, [*PROMPT, *before], 4), atol=1e-4, rtol=1e-4)
    assert leak == 0


def test_a_draft_that_leaks_into_the_root_is_not_taken_for_rounding(
    low: TargetModel, tied: tuple[list[int], list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mask that shows the root its own drafted children: plain decoding in that shape differs too, and yet it is a
    bug."""
    forward = TargetModel.forward

    def leaking(self: TargetModel, rows: StepRows, cache: KVCache, *args: object, **kwargs: object) -> object:
        if rows.block_mask_BNN is not None:
            rows.block_mask_BNN = torch.ones_like(rows.block_mask_BNN)
        return forward(self, rows, cache, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(TargetModel, "forward", leaking)
    found = diagnose(low, PROMPT, *tied, 6, WIDE, len(PROMPT))
    assert found.leak is not None
    assert found.leak > 0
    assert found.verdict == "unexplained"


def test_a_shape_that_moves_logits_more_than_rounding_can_is_no_excuse(
    low: TargetModel, tied: tuple[list[int], list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows at wrong positions: what drafted rows hold changes nothing, the two tokens are tied, and yet it is a bug."""
    forward = TargetModel.forward

    def misplaced(self: TargetModel, rows: StepRows, cache: KVCache, *args: object, **kwargs: object) -> object:
        if rows.block_mask_BNN is not None:
            rows.positions_BN = rows.positions_BN + 40
        return forward(self, rows, cache, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(TargetModel, "forward", misplaced)
    found = diagnose(low, PROMPT, *tied, 6, WIDE, len(PROMPT))
    assert (found.verdict, found.leak) == ("unexplained", 0)


def test_the_watched_drafter_knows_the_pass_of_each_token(target: TargetModel) -> None:
    params = SamplingParams(max_new_tokens=12, eos_token_ids=())
    plain = Decoder(target).generate([PROMPT], params)[0].tokens
    scripted = Scripted({tuple(PROMPT): plain}, target.vocab_size, TREE, right=True)
    watched = WatchedDrafter(scripted)
    assert Decoder(target, watched).generate([PROMPT], params)[0].tokens == plain
    assert watched.shape_at(PROMPT, 0) is None
    assert watched.shape_at(PROMPT, 1) == PassShape(1, 10)
    last = watched.shape_at(PROMPT, 11)
    assert last is not None
    assert last.rows == 1  # nothing may follow, so nothing is drafted
    assert watched.outcomes is scripted.outcomes
