"""Targets stand where they are predicted from, and the fast loss is the plain one."""

import itertools

import pytest
import torch
from torch import nn

from train.losses import (
    IGNORE,
    Projection,
    count_targets,
    head_loss,
    head_weights,
    plain_head_loss,
    shift_targets,
)

NUM_HEADS = 3


def slow_targets(ids, mask, num_heads):
    """The definition, token by token."""
    targets = torch.full((num_heads, *ids.shape), IGNORE)
    for k, b, t in itertools.product(range(1, num_heads + 1), range(ids.shape[0]), range(ids.shape[1])):
        last = t + 1 + k
        if last < ids.shape[1] and all(mask[b, j] for j in range(t + 1, last + 1)):
            targets[k - 1, b, t] = ids[b, last]
    return targets


def counting(length):
    """A language whose token is its position."""
    return torch.arange(length)[None]


class TestShiftTargets:
    @pytest.mark.parametrize("length", range(0, 9))
    def test_agrees_with_the_definition_for_every_mask(self, length):
        ids = counting(length).expand(2**length, length) * 10
        mask = torch.tensor(list(itertools.product([0, 1], repeat=length))).reshape(2**length, length)
        assert torch.equal(shift_targets(ids, mask, NUM_HEADS), slow_targets(ids, mask, NUM_HEADS))

    def test_head_k_is_trained_on_the_token_k_plus_one_ahead(self):
        targets = shift_targets(counting(12), torch.ones(1, 12), NUM_HEADS)
        for k in range(1, NUM_HEADS + 1):
            assert targets[k - 1, 0, : 12 - 1 - k].tolist() == [t + 1 + k for t in range(12 - 1 - k)]

    def test_first_supervised_position_is_the_last_prompt_token(self):
        mask = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1]])
        targets = shift_targets(counting(8), mask, 1)
        assert (targets[0, 0] != IGNORE).nonzero()[0].item() == 2

    def test_a_span_of_n_tokens_gives_n_minus_k_targets(self):
        mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 0, 0]])
        assert count_targets(shift_targets(counting(9), mask, NUM_HEADS)).tolist() == [4, 3, 2]

    def test_no_target_crosses_a_turn(self):
        mask = torch.tensor([[0, 1, 1, 1, 0, 0, 1, 1, 1, 0]])
        targets = shift_targets(counting(10), mask, NUM_HEADS)
        for k, t in (targets[:, 0] != IGNORE).nonzero().tolist():
            assert mask[0, t + 1 : t + k + 3].all()

    def test_an_answer_that_starts_the_record_has_no_position_before_it(self):
        targets = shift_targets(counting(4), torch.ones(1, 4), 1)
        assert targets[0, 0].tolist() == [2, 3, IGNORE, IGNORE]

    def test_positions_of_a_head_are_among_those_of_the_head_before(self):
        mask = torch.rand(50, 30, generator=torch.Generator().manual_seed(0)) < 0.8
        valid = shift_targets(counting(30).expand(50, 30), mask, NUM_HEADS) != IGNORE
        assert bool((valid[1:] <= valid[:-1]).all())


def test_head_weights_decay_from_the_first_head():
    assert head_weights(3, 0.8).tolist() == pytest.approx([0.8, 0.64, 0.512])


def problem(dtype=torch.float32, positions=37, vocab=50, hidden=16, heads=NUM_HEADS, own=False):
    torch.manual_seed(0)
    features = (torch.randn(heads, positions, hidden) * 2).to(dtype)
    targets = torch.randint(vocab, (heads, positions))
    targets[torch.rand(targets.shape) < 0.3] = IGNORE
    scale = head_weights(heads, 0.8) / (targets != IGNORE).sum(1)
    weights = (torch.randn(heads if own else 1, vocab, hidden) * 0.5).to(dtype)
    return features, targets, scale, weights


def gradients(loss_function, features, targets, scale, projections, leaves=(), **settings):
    features = features.clone().requires_grad_(True)
    loss, sums = loss_function(features, targets, projections, scale, **settings)
    return loss.detach(), sums, torch.autograd.grad(loss * 3.0, [features, *leaves])


@pytest.mark.parametrize("chunk_rows", [None, 1, 7, 1000])
def test_fast_loss_and_gradient_are_the_plain_ones(chunk_rows):
    features, targets, scale, (weight,) = problem()
    shared = [Projection.of_weight(weight)] * NUM_HEADS
    plain = gradients(plain_head_loss, features, targets, scale, shared)
    fast = gradients(head_loss, features, targets, scale, shared, chunk_rows=chunk_rows)
    torch.testing.assert_close(fast, plain, rtol=1e-5, atol=1e-6)


def test_generic_projection_gives_the_same_loss_and_gradient():
    features, targets, scale, (weight,) = problem()
    capped = [Projection(lambda x: torch.tanh(x @ weight.T / 5) * 5)] * NUM_HEADS
    plain = gradients(plain_head_loss, features, targets, scale, capped)
    fast = gradients(head_loss, features, targets, scale, capped, chunk_rows=7)
    torch.testing.assert_close(fast, plain, rtol=1e-5, atol=1e-6)


def test_own_projections_get_the_plain_gradient():
    features, targets, scale, weights = problem(own=True)
    results = []
    for function, settings in ((plain_head_loss, {}), (head_loss, {"chunk_rows": 7})):
        parameter = nn.Parameter(weights.clone())
        projections = [Projection.of_weight(weight) for weight in parameter]
        results.append(gradients(function, features, targets, scale, projections, [parameter], **settings))
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-6)


def test_bf16_gradient_points_where_the_float32_one_does():
    features, targets, scale, (weight,) = problem(torch.bfloat16, positions=64, vocab=500, hidden=64)
    exact = gradients(
        plain_head_loss, features.float(), targets, scale, [Projection.of_weight(weight.float())] * NUM_HEADS
    )
    fast = gradients(head_loss, features, targets, scale, [Projection.of_weight(weight)] * NUM_HEADS)
    assert fast[0].item() == pytest.approx(exact[0].item(), rel=5e-3)
    similarity = nn.functional.cosine_similarity(fast[2][0].float().flatten(), exact[2][0].flatten(), 0)
    assert similarity > 0.999


@pytest.mark.parametrize("linear", [True, False])
def test_small_gradients_do_not_vanish_behind_a_float16_model(linear):
    features, targets, scale, (weight,) = problem(positions=64, vocab=200, hidden=32)
    half = weight.half()
    scale = scale * 1e-6  # as among a million positions

    def project(rows):
        return rows.half() @ half.T

    exact = gradients(plain_head_loss, features, targets, scale, [Projection.of_weight(half.float())] * NUM_HEADS)
    projection = Projection(project, half if linear else None)
    fast = gradients(head_loss, features, targets, scale, [projection] * NUM_HEADS)
    similarity = nn.functional.cosine_similarity(fast[2][0].flatten(), exact[2][0].flatten(), 0)
    assert similarity > 0.999


def test_every_head_gets_a_gradient():
    features, targets, scale, (weight,) = problem()
    *_, (gradient,) = gradients(head_loss, features, targets, scale, [Projection.of_weight(weight)] * NUM_HEADS)
    assert bool((gradient.abs().amax((1, 2)) > 0).all())


def test_positions_without_a_target_get_no_gradient():
    features, targets, scale, (weight,) = problem()
    *_, (gradient,) = gradients(head_loss, features, targets, scale, [Projection.of_weight(weight)] * NUM_HEADS)
    assert gradient[targets == IGNORE].abs().max() == 0


def test_only_rows_with_a_target_reach_the_vocabulary():
    features, targets, scale, (weight,) = problem()
    seen = []

    def project(rows):
        seen.append(rows.shape[0])
        return rows @ weight.T

    head_loss(features, targets, [Projection(project)] * NUM_HEADS, scale)
    assert sum(seen) == (targets != IGNORE).sum()


def test_no_target_at_all_gives_zero_loss_and_zero_gradient():
    features, targets, _, (weight,) = problem()
    targets = torch.full_like(targets, IGNORE)
    loss, sums, (gradient,) = gradients(
        head_loss, features, targets, torch.ones(NUM_HEADS), [Projection.of_weight(weight)] * NUM_HEADS
    )
    assert loss == 0
    assert sums.tolist() == [0] * NUM_HEADS
    assert gradient.abs().max() == 0


def test_large_logits_stay_finite():
    features, targets, scale, (weight,) = problem()
    loss, *_ = gradients(head_loss, features * 1e3, targets, scale, [Projection.of_weight(weight)] * NUM_HEADS)
    assert torch.isfinite(loss)
