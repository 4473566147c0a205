"""Ranks, accuracy, and tokens a step: predicted from held-out answers and measured by the decoder."""

import pytest
import torch

from lasd.conversations import load_distilled
from lasd.decoding.stats import DecodeStats
from lasd.decoding.tree import TreeShape
from lasd.drafters.medusa import MedusaHeads
from tests.train.tiny_runs import HIDDEN
from train import held_out
from train.data import collate, prepare_samples
from train.held_out import NO_TARGET

NUM_HEADS = 3


@pytest.fixture(scope="module")
def samples(target, distilled_dir):
    records = load_distilled(distilled_dir).load()
    return prepare_samples(
        records, num_heads=NUM_HEADS, vocab_size=target.vocab_size, max_length=100, held_out_share=0.0
    )[0]


@pytest.fixture(scope="module")
def heads():
    torch.manual_seed(3)
    heads = MedusaHeads(HIDDEN, NUM_HEADS)
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    return heads


def test_ranks_are_the_places_of_the_true_tokens(heads, target, samples):
    sample = samples[0]
    (ranks_KP,) = held_out.token_ranks(heads, target, [sample])
    inputs = collate([sample], NUM_HEADS)
    with torch.no_grad():
        logits = heads.logits(target.hidden_states(inputs["ids_BL"])[0], target)
    start = int(sample.mask_L.nonzero()[0]) - 1
    for k in range(NUM_HEADS):
        for p in range(ranks_KP.shape[1] - k):
            order = logits[k, start + p].argsort(descending=True, stable=True).tolist()
            assert order[ranks_KP[k, p]] == sample.ids_L[start + p + 2 + k]


def test_ranks_do_not_depend_on_the_batch(heads, target, samples):
    alone = [held_out.token_ranks(heads, target, [sample])[0] for sample in samples[:5]]
    together = held_out.token_ranks(heads, target, samples[:5])
    assert all(torch.equal(a, b) for a, b in zip(alone, together, strict=True))


def test_positions_past_the_end_have_no_target(heads, target, samples):
    (ranks_KP,) = held_out.token_ranks(heads, target, samples[:1])
    assert (ranks_KP == NO_TARGET).sum(1).tolist() == [0, 1, 2]


def test_accuracy_counts_only_targets():
    ranks = [torch.tensor([[0, 3, 9], [0, 0, NO_TARGET]]), torch.tensor([[0], [7]])]
    expected = {"head1_top1": 0.5, "head1_top5": 0.75, "head2_top1": 2 / 3, "head2_top5": 2 / 3}
    assert held_out.accuracy(ranks) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("ranks", "shape", "expected"),
    [
        ([[0, 0, 0, 0], [0, 0, 0, NO_TARGET]], TreeShape.chain(2), 2.0),  # 3 of 4 tokens, then 1
        ([[1, 1, 1, 1], [0, 0, 0, NO_TARGET]], TreeShape.chain(2), 1.0),  # the first head always misses
        ([[1, 1, 1, 1], [0, 0, 0, NO_TARGET]], TreeShape.from_paths([[1]]), 2.0),
        ([[0, 5, 0, 5], [5, 5, 5, NO_TARGET]], TreeShape.chain(2), 2.0),  # one accepted, then the miss is skipped
    ],
)
def test_predicted_tokens_per_step_walks_along_the_answer(ranks, shape, expected):
    assert held_out.predicted_tokens_per_step([torch.tensor(ranks)], shape, 100) == pytest.approx(expected)


@pytest.mark.parametrize("paths", [[[0], [0, 0], [0, 0, 0]], held_out.default_tree(NUM_HEADS)])
def test_prediction_is_what_the_decoder_measures_on_its_own_greedy_answers(heads, target, samples, paths):
    shape = TreeShape.from_paths(paths)
    turns = [held_out.first_turn(sample) for sample in samples[:12]]
    ranks = held_out.token_ranks(heads, target, [turn.sample for turn in turns])
    new_tokens = min(len(turn.answer) for turn in turns)
    prompts = [turn.prompt for turn in turns]
    frozen = held_out.copy_for_decoding(heads, target)
    stats = held_out.measured_stats(frozen, target, shape, prompts, new_tokens)
    measured = DecodeStats.merge(stats).tokens_per_step
    assert measured > 1.0
    assert held_out.predicted_tokens_per_step(ranks, shape, new_tokens) == pytest.approx(measured)


def test_the_copy_for_decoding_leaves_the_heads_trainable(heads, target):
    held_out.copy_for_decoding(heads, target)
    assert all(parameter.requires_grad for parameter in heads.parameters())


def test_the_first_turn_is_cut_behind_the_first_answer():
    sample = held_out.Sample("a", torch.arange(8, dtype=torch.int32), torch.tensor([0, 1, 1, 0, 0, 1, 1, 0]).bool())
    turn = held_out.first_turn(sample)
    assert (turn.prompt, turn.answer) == ([0], [1, 2])


@pytest.mark.parametrize("num_heads", [1, 2, 4])
def test_the_default_tree_fits_the_heads(num_heads):
    TreeShape.from_paths(held_out.default_tree(num_heads)).validate(num_heads, 5)
