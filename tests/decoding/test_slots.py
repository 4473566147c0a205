"""Requests come and go while others decode."""

import random

import pytest
import torch

from lasd.decoding.cache import CacheFull
from lasd.decoding.decoder import Decoder
from lasd.decoding.sampling import SamplingParams
from lasd.errors import LasdError
from tests.drafters_under_test import TREE, Scripted
from tests.families import tiny_model


def test_random_interleaving_of_admissions_changes_no_answer(llama):
    rng = random.Random(3)
    prompts = [[rng.randrange(3, 60) for _ in range(rng.randrange(1, 20))] for _ in range(14)]
    params = [
        SamplingParams(
            max_new_tokens=rng.randrange(1, 25), eos_token_ids=(), temperature=rng.choice([0.0, 0.8]), seed=i
        )
        for i in range(len(prompts))
    ]
    alone = [Decoder(llama).generate([prompt], one)[0].tokens for prompt, one in zip(prompts, params, strict=True)]
    answers = {tuple(prompt): tokens for prompt, tokens in zip(prompts, alone, strict=True)}
    decoder = Decoder(llama, Scripted(answers, llama.vocab_size, TREE, right=True), max_slots=4, max_context=64)
    waiting, place_of, got = list(range(len(prompts))), {}, {}
    while len(got) < len(prompts):
        count = min(rng.randrange(0, 3), decoder.free_slots, len(waiting))
        if count:
            chosen = [waiting.pop(rng.randrange(len(waiting))) for _ in range(count)]
            place_of |= dict(
                zip(decoder.admit([prompts[i] for i in chosen], [params[i] for i in chosen]), chosen, strict=True)
            )
        for slot in decoder.step():
            got[place_of[slot]] = decoder.release(slot).tokens
    assert [got[i] for i in range(len(prompts))] == alone


def test_a_full_decoder_refuses_admission_with_a_reason(llama, prompt):
    decoder = Decoder(llama, max_slots=1)
    decoder.admit([prompt], SamplingParams(max_new_tokens=8, eos_token_ids=()))
    with pytest.raises(CacheFull, match="1 prompts came, 0 of 1 slots are free"):
        decoder.admit([prompt], SamplingParams())


def test_a_request_longer_than_max_context_is_refused(llama, prompt):
    with pytest.raises(CacheFull, match=r"needs 107 tokens .* max_context is 64"):
        Decoder(llama, max_context=64).admit([prompt], SamplingParams(max_new_tokens=100))


def test_a_longer_request_while_others_decode_is_refused_and_harms_nobody(llama, prompt, answer):
    decoder = Decoder(llama, max_slots=2)
    (slot,) = decoder.admit([prompt], SamplingParams(max_new_tokens=20, eos_token_ids=()))
    with pytest.raises(CacheFull, match="set max_context"):
        decoder.admit([prompt], SamplingParams(max_new_tokens=150))
    while not decoder.step():
        pass
    assert decoder.release(slot).tokens == answer[:20]


def test_a_released_live_slot_gives_what_it_has(llama, prompt, answer):
    decoder = Decoder(llama, max_slots=2)
    slots = decoder.admit([prompt, [7]], SamplingParams(max_new_tokens=20, eos_token_ids=()))
    decoder.step()
    result = decoder.release(slots[0])
    assert (result.tokens, result.finish_reason) == (answer[:2], "released")
    assert decoder.live_slots == [slots[1]]
    with pytest.raises(LasdError, match="is not in use"):
        decoder.release(slots[0])


def test_long_prompts_are_prefilled_in_chunks(llama, monkeypatch):
    prompts = [[(7 * i + j) % 50 + 3 for i in range(length)] for j, length in enumerate((70, 3, 41))]
    whole = [
        result.tokens for result in Decoder(llama, max_slots=3).generate(prompts, SamplingParams(max_new_tokens=12))
    ]
    monkeypatch.setattr("lasd.decoding.prefill.PREFILL_TOKENS", 30)
    assert [
        result.tokens for result in Decoder(llama, max_slots=3).generate(prompts, SamplingParams(max_new_tokens=12))
    ] == whole


def test_nan_weights_give_one_line_and_no_token(prompt):
    from lasd.decoding.target import TargetModel

    model = tiny_model("llama", seed=5)
    target = TargetModel(model)
    target.layout  # noqa: B018  (read before the weights are spoilt)
    with torch.no_grad():
        model.model.norm.weight.fill_(float("nan"))
    decoder = Decoder(target)
    with pytest.raises(LasdError, match="logits are not finite"):
        decoder.generate([prompt], SamplingParams())
    assert decoder.live_slots == []
