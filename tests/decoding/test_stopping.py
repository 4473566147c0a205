"""Where answers end, above all inside a span of accepted drafts."""

import pytest
import torch

from lasd.decoding.decoder import Decoder
from lasd.decoding.sampling import SamplingParams
from lasd.errors import LasdError
from tests.drafters_under_test import CHAIN, Scripted


def decode(target, prompt, answer, params, paths=CHAIN):
    drafter = Scripted({tuple(prompt): answer}, target.vocab_size, paths, right=True)
    return Decoder(target, drafter).generate([prompt], params)[0]


@pytest.mark.parametrize("place", range(1, 12))
def test_an_end_token_inside_an_accepted_span_ends_the_answer_at_once(llama, prompt, answer, place):
    eos = answer[place]
    first = answer.index(eos)
    result = decode(llama, prompt, answer, SamplingParams(max_new_tokens=40, eos_token_ids=(eos,)))
    assert result.tokens == answer[: first + 1]
    assert result.finish_reason == "eos"


@pytest.mark.parametrize("length", range(1, 14))
def test_max_new_tokens_cuts_inside_an_accepted_span(llama, prompt, answer, length):
    result = decode(llama, prompt, answer, SamplingParams(max_new_tokens=length, eos_token_ids=()))
    assert result.tokens == answer[:length]
    assert result.finish_reason == "length"


def test_several_end_tokens_are_all_honoured(llama, prompt, answer):
    eos = (answer[9], answer[6])
    result = decode(llama, prompt, answer, SamplingParams(max_new_tokens=40, eos_token_ids=eos))
    assert result.tokens[-1] in eos
    assert len(result.tokens) <= 7


def test_the_models_own_end_tokens_are_the_default(llama, prompt):
    assert llama.eos_token_ids == (2,)
    model = llama.model
    ids = torch.tensor([prompt])
    expected = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=150, do_sample=False)[
        0, len(prompt) :
    ].tolist()
    assert Decoder(llama).generate([prompt], SamplingParams(max_new_tokens=150))[0].tokens == expected


@pytest.mark.parametrize("place", range(2, 9))
def test_a_stop_string_across_tokens_ends_where_it_is_complete(llama, prompt, answer, place):
    text = llama.tokenizer.decode(answer)
    stop = text[place : place + 2]
    end = text.find(stop) + 2
    result = decode(llama, prompt, answer, SamplingParams(max_new_tokens=40, eos_token_ids=(), stop=(stop,)))
    assert result.tokens == answer[:end]
    assert result.text == text[: end - 2]
    assert result.finish_reason == "stop"


def test_a_stop_string_longer_than_the_answer_never_stops(llama, prompt, answer):
    result = decode(llama, prompt, answer, SamplingParams(max_new_tokens=10, eos_token_ids=(), stop=("x" * 50,)))
    assert result.tokens == answer[:10]


def test_min_new_tokens_forbids_an_early_end(llama, prompt, answer):
    eos = answer[4]
    params = SamplingParams(max_new_tokens=24, eos_token_ids=(eos,), min_new_tokens=12)
    result = decode(llama, prompt, answer, params)
    ids = torch.tensor([prompt])
    expected = llama.model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=24,
        min_new_tokens=12,
        do_sample=False,
        eos_token_id=eos,
        pad_token_id=0,
    )[0, len(prompt) :].tolist()
    assert result.tokens == expected
    assert eos not in result.tokens[:12]


def test_the_models_last_position_ends_the_answer(llama, prompt):
    long = (prompt * 40)[: llama.max_positions - 6]
    plain = Decoder(llama).generate([long], SamplingParams(max_new_tokens=40, eos_token_ids=()))[0]
    assert (len(plain.tokens), plain.finish_reason) == (6, "context")
    result = decode(llama, long, plain.tokens, SamplingParams(max_new_tokens=40, eos_token_ids=()))
    assert result.tokens == plain.tokens


def test_streaming_gives_exactly_the_committed_tokens(llama, prompt, answer):
    seen = []
    drafter = Scripted({tuple(prompt): answer}, llama.vocab_size, CHAIN, right=True)
    params = SamplingParams(max_new_tokens=17, eos_token_ids=())
    result = Decoder(llama, drafter).generate(
        [prompt], params, on_tokens=lambda index, tokens: seen.append((index, tokens))
    )[0]
    assert [token for _, tokens in seen for token in tokens] == result.tokens == answer[:17]
    assert {index for index, _ in seen} == {0}
    assert max(len(tokens) for _, tokens in seen) > 1


def test_statistics_add_up(llama, prompt, answer):
    stats = decode(llama, prompt, answer, SamplingParams(max_new_tokens=30, eos_token_ids=())).stats
    assert stats.tokens == 30
    assert stats.tokens_per_step == pytest.approx(29 / stats.steps)
    assert stats.tokens_per_step == pytest.approx(1 + sum(stats.accept_at_pos))
    assert stats.steps == len(stats.accepted_per_step)
    assert min(stats.prefill_s, stats.draft_s, stats.verify_s, stats.overhead_s) > 0


@pytest.mark.parametrize(
    ("prompts", "message"),
    [([[]], "a prompt has no tokens"), ([[5] * 192], "the model has 192 positions")],
)
def test_unusable_prompts_are_refused_with_one_line(llama, prompts, message):
    with pytest.raises(LasdError, match=message):
        Decoder(llama).generate(prompts, SamplingParams())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens is 0; it must be at least 1"),
        ({"temperature": -1.0}, "temperature is -1.0"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"stop": "END"}, "must be a tuple of non-empty strings"),
    ],
)
def test_unusable_parameters_are_refused_with_one_line(change, message):
    with pytest.raises(LasdError, match=message):
        SamplingParams(**change)
