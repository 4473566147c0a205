"""Sampling follows the target's distribution."""

import pytest
import torch
from scipy.stats import chisquare
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from lasd.decoding.decoder import Decoder
from lasd.decoding.sampling import SamplingParams, draw, probabilities
from tests.drafters_under_test import Scripted

TREE_OF_ALL = [(rank,) for rank in range(6)] + [(rank, 0) for rank in range(6)]


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.7),
        SamplingParams(temperature=1.3, top_k=5),
        SamplingParams(temperature=1.0, top_p=0.6),
        SamplingParams(temperature=0.9, top_k=8, top_p=0.8),
    ],
)
def test_probabilities_are_those_of_transformers_warpers(params):
    logits = torch.randn(7, 40, generator=torch.Generator().manual_seed(1))
    expected = TemperatureLogitsWarper(params.temperature)(None, logits.clone())
    if params.top_k:
        expected = TopKLogitsWarper(params.top_k)(None, expected)
    if params.top_p < 1:
        expected = TopPLogitsWarper(params.top_p)(None, expected)
    torch.testing.assert_close(probabilities(logits, params), expected.softmax(-1))


def test_a_draw_is_never_a_token_of_probability_zero():
    probs = torch.tensor([[0.0, 0.5, 0.0, 0.5, 0.0]]).expand(4, -1)
    assert draw(probs, torch.tensor([0.0, 0.4999999, 0.5, 1 - 1e-12], dtype=torch.float64)).tolist() == [1, 1, 3, 3]


def law_of_two_tokens(target, prompt, params):
    """Exact probabilities of the answer's second token pair given its first: p(x1) and p(x2 | x1), by stock forward
    passes."""
    with torch.no_grad():
        first = probabilities(target.model(torch.tensor([prompt])).logits[:, -1], params)[0]
        rows = torch.tensor([prompt + [x] for x in range(target.vocab_size)])
        second = probabilities(target.model(rows).logits[:, -1], params)
    return first[:, None] * second


def test_sampled_pairs_have_the_targets_law_with_a_drafter_that_is_often_accepted(llama):
    """The second and third token of 6,000 answers; drafts come from another stream, so acceptance is real but
    partial."""
    prompt, count = [5, 9, 33], 6000
    params = SamplingParams(max_new_tokens=3, temperature=1.0, top_k=6, eos_token_ids=())
    likely = probabilities(llama.model(torch.tensor([prompt])).logits[:, -1], params)[0].argmax().item()
    law = law_of_two_tokens(llama, prompt, params)

    class MostLikely(Scripted):
        """Proposes a fixed guess at each place, whatever was drawn."""

        def _tree(self, context, budget):
            self.answers[tuple(context.tokens[: context.num_prompt])] = guesses
            return super()._tree(context, budget)

    guesses = Decoder(llama).generate([prompt], SamplingParams(max_new_tokens=3, eos_token_ids=()))[0].tokens
    drafter = MostLikely({}, llama.vocab_size, [(0,), (1,), (2,), (0, 0)], right=True)
    decoder = Decoder(llama, drafter, max_slots=500)
    each = [SamplingParams(**{**params.__dict__, "seed": seed}) for seed in range(count)]
    results = decoder.generate([prompt] * count, each)
    assert any(sum(result.stats.accepted_per_step) for result in results), "nothing was accepted"
    assert any(not sum(result.stats.accepted_per_step) for result in results), "nothing was rejected"
    counts = torch.zeros_like(law)
    for result in results:
        counts[result.tokens[0], result.tokens[1]] += 1
    frequent = law * count >= 5
    observed = torch.cat([counts[frequent], counts[~frequent].sum()[None]])
    expected = torch.cat([law[frequent], law[~frequent].sum()[None]]) * count
    keep = expected > 0
    assert counts[law == 0].sum() == 0
    assert (
        chisquare(observed[keep].numpy(), (expected[keep] / expected[keep].sum() * observed[keep].sum()).numpy()).pvalue
        > 1e-3
    )
    assert counts[likely].sum() > 0


def test_the_same_seed_gives_the_same_answer_and_another_gives_another(llama, prompt):
    def sample(seed):
        return (
            Decoder(llama)
            .generate([prompt], SamplingParams(max_new_tokens=30, temperature=1.0, seed=seed, eos_token_ids=()))[0]
            .tokens
        )

    assert sample(4) == sample(4) != sample(5)
