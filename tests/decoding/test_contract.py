"""What every drafter owes every family: plain decoding's own tokens, and a cache that holds the committed text and
nothing else."""

import pytest
import torch

from lasd.decoding.attention import StepRows
from lasd.decoding.decoder import Decoder
from lasd.decoding.sampling import SamplingParams
from lasd.decoding.target import TargetModel
from tests.drafters_under_test import ALWAYS_RIGHT, ALWAYS_WRONG, DRAFTERS, Answers
from tests.families import ALL_FAMILIES, tiny_model

NEW_TOKENS = 24
PROMPTS = [[5, 9, 33, 4, 17, 8, 21], [40], [12, 50, 3, 3, 29, 7, 31, 45, 10, 22, 19, 58, 6, 14, 27, 11]]
GREEDY = SamplingParams(max_new_tokens=NEW_TOKENS, eos_token_ids=())
SAMPLED = SamplingParams(max_new_tokens=NEW_TOKENS, eos_token_ids=(), temperature=0.9, top_k=20, top_p=0.95, seed=11)


@pytest.fixture(scope="module")
def targets():
    return {}


def prepared(targets, family: str) -> tuple[TargetModel, Answers]:
    """The family's target, and what transformers' own generate answers."""
    if family not in targets:
        model = tiny_model(family)
        target = TargetModel(model)
        targets[family] = target, {tuple(prompt): reference_answer(model, prompt) for prompt in PROMPTS}
    return targets[family]


def reference_answer(model, prompt: list[int]) -> list[int]:
    ids = torch.tensor([prompt])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return out[0, len(prompt) :].tolist()


@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_greedy_equals_generate(targets, family, name, slots):
    target, answers = prepared(targets, family)
    decoder = Decoder(target, DRAFTERS[name](target, answers), max_slots=slots)
    results = decoder.generate(PROMPTS, GREEDY)
    assert [result.tokens for result in results] == list(answers.values())
    for result in results:
        if name in ALWAYS_RIGHT:
            assert result.stats.tokens_per_step > 1.5
        if name in ALWAYS_WRONG:
            assert result.stats.nodes > result.stats.steps
            assert sum(result.stats.accepted_per_step) == 0


@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_plain_equals_generate(targets, family):
    target, answers = prepared(targets, family)
    results = Decoder(target, max_slots=3).generate(PROMPTS, GREEDY)
    assert [result.tokens for result in results] == list(answers.values())
    assert all(len(set(answer)) >= 3 for answer in answers.values()), "an answer of few tokens tests little"


@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_sampling_equals_plain_sampling_with_the_same_seed(targets, family, name, slots):
    """Draws depend on the seed and the place in the answer alone, so an exact drafter changes no sampled token
    either."""
    target, _ = prepared(targets, family)
    plain = Decoder(target).generate(PROMPTS, SAMPLED)
    answers = {tuple(prompt): result.tokens for prompt, result in zip(PROMPTS, plain, strict=True)}
    results = Decoder(target, DRAFTERS[name](target, answers), max_slots=slots).generate(PROMPTS, SAMPLED)
    assert [result.tokens for result in results] == list(answers.values())
    if name in ALWAYS_RIGHT:
        assert all(result.stats.tokens_per_step > 1.5 for result in results)


@pytest.mark.parametrize("name", ["right_tree", "right_scratch", "wrong_tree", "medusa"])
@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_cache_after_each_step_equals_a_fresh_prefill(targets, family, name):
    target, answers = prepared(targets, family)
    decoder = Decoder(target, DRAFTERS[name](target, answers), max_slots=3)
    decoder.admit(PROMPTS, GREEDY)
    steps = 0
    while decoder.live_slots and steps < 6:
        decoder.step()
        steps += 1
        for request in decoder._live:
            assert_cache_holds(target, decoder._cache, request.context.row, request.context.tokens[:-1])
    assert steps >= 3


def assert_cache_holds(target: TargetModel, cache, row: int, tokens: list[int]) -> None:
    assert cache.lengths[row] == len(tokens)
    fresh = target.new_cache(1, len(tokens))
    ids = torch.tensor([tokens])
    target.forward(StepRows(ids, torch.arange(len(tokens))[None]), fresh, "none")
    for layer in range(target.num_layers):
        for have, want in ((cache._keys, fresh._keys), (cache._values, fresh._values)):
            torch.testing.assert_close(
                have[layer][row, :, : len(tokens)], want[layer][0, :, : len(tokens)], atol=2e-4, rtol=1e-3
            )


@pytest.mark.parametrize("name", DRAFTERS)
def test_two_calls_in_a_row_agree(targets, name):
    target, answers = prepared(targets, "llama")
    decoder = Decoder(target, DRAFTERS[name](target, answers), max_slots=2)
    first = [result.tokens for result in decoder.generate(PROMPTS, GREEDY)]
    decoder.generate([PROMPTS[2]], GREEDY)
    assert [result.tokens for result in decoder.generate(PROMPTS, GREEDY)] == first


def test_a_batch_makes_as_many_target_calls_as_its_slowest_row(targets, monkeypatch):
    target, answers = prepared(targets, "llama")
    calls = []
    forward = TargetModel.forward
    monkeypatch.setattr(
        TargetModel, "forward", lambda self, *args, **kwargs: calls.append(1) or forward(self, *args, **kwargs)
    )
    results = Decoder(target, DRAFTERS["right_tree"](target, answers), max_slots=3).generate(PROMPTS, GREEDY)
    assert len(calls) == 1 + max(result.stats.steps for result in results)
