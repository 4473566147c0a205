"""Acceptance rules on trees whose right answer can be worked out by hand."""

import pytest
import torch

from lasd.decoding.acceptance import accept_picked, accept_typical
from lasd.decoding.decoder import Decoder
from lasd.decoding.sampling import SamplingParams
from lasd.decoding.tree import DraftTree, TreeShape, batch_trees
from lasd.errors import LasdError
from tests.drafters_under_test import TREE, Scripted

SHAPE = TreeShape.from_paths([(0,), (1,), (0, 0), (1, 0), (1, 0, 0)])
TOKENS = torch.tensor([9, 1, 2, 3, 4, 5])
CPU = torch.device("cpu")


def batch(*trees):
    return batch_trees([DraftTree(shape, tokens) for shape, tokens in trees], CPU)


@pytest.mark.parametrize(
    ("picks", "best"),
    [
        ([7, 0, 0, 0, 0, 0], 0),
        ([1, 0, 0, 0, 0, 0], 1),
        ([1, 3, 0, 0, 0, 0], 3),
        ([2, 3, 4, 0, 5, 0], 5),
        ([7, 3, 4, 0, 5, 0], 0),
    ],
)
def test_the_walk_goes_to_the_child_that_holds_the_pick(picks, best):
    assert accept_picked(batch((SHAPE, TOKENS)), torch.tensor([picks])).item() == best


def test_padding_nodes_are_never_accepted():
    trees = batch((TreeShape.root(), torch.tensor([9])), (SHAPE, TOKENS))
    assert accept_picked(trees, torch.zeros(2, 6, dtype=torch.int64))[0].item() == 0


def peaked(*rows):
    return torch.tensor(
        [
            [p if v in favoured else (1 - p * len(favoured)) / (10 - len(favoured)) for v in range(10)]
            for favoured, p in rows
        ]
    )


def test_typical_keeps_what_is_not_unlikely_and_prefers_the_longest_path():
    probs = peaked(((1, 2), 0.45), ((3,), 0.01), ((4,), 0.9), ((0,), 0.5), ((5,), 0.9), ((0,), 0.5))
    assert accept_typical(batch((SHAPE, TOKENS)), 0, probs, 0.09, 0.3).item() == 5
    assert accept_typical(batch((SHAPE, TOKENS)), 0, peaked(*[((0,), 0.99)] * 6), 0.09, 0.3).item() == 0


def test_typical_threshold_falls_with_entropy():
    """At the flat distribution over 10 tokens, exp(-H) is 0.1: a token of p = 0.1 passes delta 0.3, not delta 1 with
    epsilon 1."""
    flat = torch.full((2, 10), 0.1)
    one = batch((TreeShape.chain(1), torch.tensor([9, 1])))
    assert accept_typical(one, 0, flat, 1.0, 0.3).item() == 1
    assert accept_typical(one, 0, flat, 1.0, 1.0).item() == 0


def test_typical_decoding_accepts_more_than_exact_and_differs(llama, prompt):
    params = {"max_new_tokens": 40, "temperature": 1.0, "eos_token_ids": ()}
    greedy = Decoder(llama).generate([prompt], SamplingParams(max_new_tokens=40, eos_token_ids=()))[0].tokens
    decoder = Decoder(llama, Scripted({tuple(prompt): greedy + [3] * 40}, llama.vocab_size, TREE, right=True))
    lossy = decoder.generate([prompt], SamplingParams(**params, typical=(0.09, 0.3)))[0]
    exact = decoder.generate([prompt], SamplingParams(**params))[0]
    assert lossy.stats.tokens_per_step > exact.stats.tokens_per_step
    assert lossy.tokens != exact.tokens


def test_typical_at_temperature_zero_is_refused():
    with pytest.raises(LasdError, match=r"needs .* a temperature above 0"):
        SamplingParams(typical=(0.09, 0.3))
