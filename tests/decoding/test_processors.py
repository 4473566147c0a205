"""Logits processors along paths, and the decoder behind transformers' own generate."""

import pytest
import torch
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    MaxTimeCriteria,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteria,
    StoppingCriteriaList,
)

from lasd.decoding.decoder import Decoder
from lasd.decoding.sampling import SamplingParams
from lasd.errors import LasdError
from tests.drafters_under_test import TREE, Scripted


def after_odd_only_even(batch_id, ids):
    """A grammar-like constraint: an odd token must be followed by an even one."""
    return list(range(4, 60, 2)) if ids[-1] % 2 else list(range(3, 60))


PROCESSORS = {
    "repetition": lambda: RepetitionPenaltyLogitsProcessor(1.8),
    "no_repeat": lambda: NoRepeatNGramLogitsProcessor(2),
    "bad_words": lambda: NoBadWordsLogitsProcessor([[32], [28, 13], [20, 30, 4]], eos_token_id=[2]),
    "grammar": lambda: PrefixConstrainedLogitsProcessor(after_odd_only_even, 1),
}


def own_generate(target, prompt, processor, count=30):
    ids = torch.tensor([prompt])
    out = target.model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=count,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        logits_processor=LogitsProcessorList([processor]),
    )
    return out[0, len(prompt) :].tolist()


@pytest.mark.parametrize("right", [True, False])
@pytest.mark.parametrize("name", PROCESSORS)
def test_processors_see_each_paths_own_prefix(llama, prompt, answer, name, right):
    expected = own_generate(llama, prompt, PROCESSORS[name]())
    assert expected != answer[:30], "this processor changes nothing here"
    drafter = Scripted({tuple(prompt): expected}, llama.vocab_size, TREE, right=right)
    params = SamplingParams(max_new_tokens=30, eos_token_ids=(), processors=(PROCESSORS[name](),))
    result = Decoder(llama, drafter).generate([prompt], params)[0]
    assert result.tokens == expected
    assert (result.stats.tokens_per_step > 1.5) == right


def test_a_processor_that_needs_the_whole_batch_is_refused(llama, prompt):
    class HammingDiversityLogitsProcessor(LogitsProcessor):
        pass

    with pytest.raises(LasdError, match=r"HammingDiversityLogitsProcessor .* it compares beams"):
        Decoder(llama).generate([prompt], SamplingParams(processors=(HammingDiversityLogitsProcessor(),)))


def test_forbidding_every_token_gives_one_line(llama, prompt):
    params = SamplingParams(processors=(lambda ids, scores: scores - torch.inf,))
    with pytest.raises(LasdError, match="every token forbidden"):
        Decoder(llama).generate([prompt], params)


def batch_of(prompts, pad=0):
    longest = max(map(len, prompts))
    ids = torch.tensor([[pad] * (longest - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    return ids, mask


PROMPTS = [[5, 9, 33, 4, 17, 8, 21], [40, 6], [12, 50, 3, 3, 29, 7, 31, 45, 10, 22]]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"repetition_penalty": 1.5},
        {"no_repeat_ngram_size": 2, "min_new_tokens": 10},
        {"num_return_sequences": 2, "max_new_tokens": 5},
    ],
)
def test_custom_generate_equals_generate_on_a_left_padded_batch(llama, settings):
    if settings.get("num_return_sequences"):
        settings = settings | {"do_sample": True, "top_k": 1}  # greedy in effect, several answers allowed
    ids, mask = batch_of(PROMPTS)
    arguments = {"attention_mask": mask, "max_new_tokens": 25, "do_sample": False, "pad_token_id": 0} | settings
    expected = llama.model.generate(ids, **arguments)
    torch.manual_seed(0)
    got = llama.model.generate(ids, **arguments, custom_generate=Decoder(llama, max_slots=4))
    assert got.tolist() == expected.tolist()


def test_custom_generate_with_a_drafter_equals_generate(llama, prompt, answer):
    ids = torch.tensor([prompt])
    drafter = Scripted({tuple(prompt): answer}, llama.vocab_size, TREE, right=True)
    got = llama.model.generate(
        ids,
        max_new_tokens=30,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        custom_generate=Decoder(llama, drafter),
    )
    assert got[0, len(prompt) :].tolist() == answer[:30]
    assert max(len(outcome.tokens) for outcome in drafter.outcomes) > 2


def test_custom_generate_samples_repeatably(llama):
    ids, mask = batch_of(PROMPTS)

    def sample(seed):
        torch.manual_seed(seed)
        decoder = Decoder(llama, max_slots=3)
        return llama.model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=20,
            do_sample=True,
            temperature=0.9,
            pad_token_id=0,
            custom_generate=decoder,
        ).tolist()

    assert sample(1) == sample(1) != sample(2)


def test_custom_generate_honours_stopping_criteria(llama, prompt, answer):
    class HasToken(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            return (input_ids == answer[6]).any(1)

    arguments = {
        "max_new_tokens": 30,
        "do_sample": False,
        "eos_token_id": None,
        "pad_token_id": 0,
        "stopping_criteria": StoppingCriteriaList([HasToken(), MaxTimeCriteria(100)]),
    }
    ids = torch.tensor([prompt])
    drafter = Scripted({tuple(prompt): answer}, llama.vocab_size, TREE, right=True)
    got = llama.model.generate(ids, **arguments, custom_generate=Decoder(llama, drafter))
    assert got.tolist() == llama.model.generate(ids, **arguments).tolist()


def test_custom_generate_streams_the_committed_tokens(llama, prompt, answer):
    class Collector:
        def __init__(self):
            self.parts, self.ended = [], False

        def put(self, tokens):
            self.parts += tokens.flatten().tolist()

        def end(self):
            self.ended = True

    streamer = Collector()
    drafter = Scripted({tuple(prompt): answer}, llama.vocab_size, TREE, right=True)
    llama.model.generate(
        torch.tensor([prompt]),
        max_new_tokens=12,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        token_streamer=streamer,
        custom_generate=Decoder(llama, drafter),
    )
    assert streamer.parts == answer[:12]
    assert streamer.ended


def test_custom_generate_refuses_beams_and_another_model(llama, prompt):
    from tests.families import tiny_model

    ids = torch.tensor([prompt])
    with pytest.raises(LasdError, match="num_beams is 2"):
        llama.model.generate(
            ids,
            generation_config=GenerationConfig(num_beams=2, max_new_tokens=4, pad_token_id=0),
            custom_generate=Decoder(llama),
        )
    with pytest.raises(LasdError, match="call generate on that very model"):
        tiny_model("qwen2").generate(ids, max_new_tokens=4, pad_token_id=0, custom_generate=Decoder(llama))
