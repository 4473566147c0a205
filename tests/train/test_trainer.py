"""The optimizer sees the gradient of the loss as it is defined, whatever the micro-batches."""

import pytest
import torch
from safetensors.torch import load_file
from transformers import TrainerCallback

from lasd.conversations import load_distilled
from lasd.drafters.medusa import MedusaHeads
from lasd.errors import LasdError
from tests.train.tiny_runs import HIDDEN, VOCAB, config_of
from train.data import PlannedBatches, Sample, collate, plan_steps, prepare_samples
from train.hidden_cache import HiddenCache
from train.losses import IGNORE, Projection, head_weights, plain_head_loss
from train.run import training_arguments
from train.trainer import MedusaTrainer, assert_only_heads_train, projections_of

NUM_HEADS = 3
POSITIONS = 96


@pytest.fixture
def samples(target, distilled_dir):
    records = load_distilled(distilled_dir).load()
    return prepare_samples(
        records, num_heads=NUM_HEADS, vocab_size=target.vocab_size, max_length=100, held_out_share=0.0
    )[0]


def new_heads(projection="shared"):
    torch.manual_seed(7)
    heads = MedusaHeads(HIDDEN, NUM_HEADS, 1, projection, VOCAB if projection == "own" else None)
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    return heads


class Gradients(TrainerCallback):
    """Keeps the gradients that each optimizer step gets."""

    def __init__(self):
        self.steps = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.steps.append([None if p.grad is None else p.grad.clone() for p in model.parameters()])


def run(target, heads, samples, plan, output, cache=None, evaluator=None, **changes):
    gradients = Gradients()
    config = config_of("model", "data", output, max_grad_norm=0.0, **changes)
    args = training_arguments(config, steps=len(plan), eval_steps=1000, save_steps=1000)
    batches = PlannedBatches(samples, plan)
    weights = head_weights(NUM_HEADS, config.head_decay)
    trainer = MedusaTrainer(heads, target, args, batches, weights, evaluator, cache, callbacks=[gradients])
    trainer.train()
    return trainer, gradients.steps


def one_step(samples, parts):
    return plan_steps(samples, positions_per_batch=POSITIONS, epochs=1, micro_batches=parts, seed=0)[:1]


@pytest.mark.parametrize("projection", ["shared", "own"])
def test_the_gradient_is_that_of_the_definition(target, samples, tmp_path, projection):
    plan = one_step(samples, 1)
    heads = new_heads(projection)
    before = {name: value.clone() for name, value in heads.state_dict().items()}
    _, (found,) = run(target, heads, samples, plan, tmp_path)
    heads.load_state_dict(before)
    inputs = collate([samples[i] for i in plan[0][0]], NUM_HEADS)
    targets = inputs["targets_KBL"].flatten(1)
    features = heads(target.hidden_states(inputs["ids_BL"]).flatten(0, 1))
    scale = head_weights(NUM_HEADS, 0.8) / (targets != IGNORE).sum(1)
    loss, _ = plain_head_loss(features, targets, projections_of(heads, target), scale)
    expected = torch.autograd.grad(loss, list(heads.parameters()))
    torch.testing.assert_close(found, list(expected), rtol=1e-4, atol=1e-6)


def test_four_micro_batches_are_one_batch(target, samples, tmp_path):
    _, (whole,) = run(target, new_heads(), samples, one_step(samples, 1), tmp_path)
    _, (split,) = run(target, new_heads(), samples, one_step(samples, 4), tmp_path, gradient_accumulation_steps=4)
    torch.testing.assert_close(split, whole, rtol=1e-5, atol=1e-7)


def test_the_logged_loss_is_the_loss_of_the_whole_step(target, samples, tmp_path):
    losses = []
    for parts in (1, 4):
        plan = one_step(samples, parts)
        trainer, _ = run(target, new_heads(), samples, plan, tmp_path, gradient_accumulation_steps=parts)
        losses.append({k: v for k, v in trainer.state.log_history[0].items() if k.startswith("loss")})
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    weights = head_weights(NUM_HEADS, 0.8).tolist()
    by_head = sum(weight * losses[0][f"loss_head{k}"] for k, weight in enumerate(weights, start=1))
    assert losses[0]["loss"] == pytest.approx(by_head, rel=1e-4)


def test_the_hidden_cache_changes_nothing(target, samples, tmp_path):
    plan = one_step(samples, 2)
    cache = HiddenCache(tmp_path / "hidden", samples, target, {})
    cache.fill()
    settings = {"gradient_accumulation_steps": 2}
    _, (cached,) = run(target, new_heads(), samples, plan, tmp_path, cache, **settings)
    _, (computed,) = run(target, new_heads(), samples, plan, tmp_path, **settings)
    torch.testing.assert_close(cached, computed, rtol=1e-4, atol=1e-6)


def unlabelled(name):
    return Sample(name, torch.arange(6, dtype=torch.int32), torch.zeros(6, dtype=torch.bool))


def test_a_step_without_a_target_is_skipped_and_counted(target, samples, tmp_path):
    heads = new_heads()
    before = [parameter.clone() for parameter in heads.parameters()]
    trainer, (gradient,) = run(target, heads, [unlabelled("x")], [[[0]]], tmp_path)
    assert trainer.skipped_batches == 1
    assert gradient == [None] * len(before)
    assert all(torch.equal(a, b) for a, b in zip(before, heads.parameters(), strict=True))


def test_a_micro_batch_without_a_target_does_not_change_the_step(target, samples, tmp_path):
    padded = [*samples, unlabelled("x")]
    plan = one_step(samples, 1)
    trainer, (found,) = run(
        target, new_heads(), padded, [[plan[0][0], [len(samples)]]], tmp_path, gradient_accumulation_steps=2
    )
    _, (expected,) = run(target, new_heads(), samples, plan, tmp_path)
    assert trainer.skipped_batches == 1
    torch.testing.assert_close(found, expected)


def test_a_loss_that_is_not_finite_names_the_samples(target, samples, tmp_path):
    heads = new_heads()
    with torch.no_grad():
        heads.blocks[0].bias[1, 0] = float("nan")
    plan = one_step(samples, 1)
    with pytest.raises(LasdError, match="the loss is nan at step 1") as caught:
        run(target, heads, samples, plan, tmp_path)
    assert all(samples[i].id in str(caught.value) for i in plan[0][0])
    assert "\n" not in str(caught.value)


def test_exactly_the_heads_are_trainable(target):
    line = assert_only_heads_train(new_heads(), target)
    assert line.startswith("trainable: 3,168 parameters of the heads (blocks.0.weight, blocks.0.bias); frozen: ")


def test_a_frozen_head_is_refused(target):
    heads = new_heads()
    heads.blocks[0].bias.requires_grad_(False)
    with pytest.raises(LasdError, match=r"blocks\.0\.bias"):
        assert_only_heads_train(heads, target)


def test_training_leaves_the_model_as_it_was(target, samples, tmp_path):
    before = [parameter.clone() for parameter in target.model.parameters()]
    run(target, new_heads(), samples, one_step(samples, 1), tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(before, target.model.parameters(), strict=True))
    assert all(parameter.grad is None for parameter in target.model.parameters())


def test_a_checkpoint_holds_the_heads_and_nothing_of_the_model(target, samples, tmp_path):
    run(target, new_heads(), samples, one_step(samples, 1), tmp_path)
    (folder,) = (tmp_path / "checkpoints").glob("checkpoint-1")
    assert set(load_file(folder / "model.safetensors")) == {"blocks.0.weight", "blocks.0.bias"}
    states = torch.load(folder / "optimizer.pt", weights_only=True)["state"]
    assert len(states) == 2


def test_shared_heads_use_the_plain_product_and_others_do_not(target, monkeypatch):
    heads = new_heads()
    assert len({id(projection) for projection in projections_of(heads, target)}) == 1
    assert projections_of(heads, target)[0].weight_VD is not None
    monkeypatch.setattr(target.config, "logits_scaling", 2.0, raising=False)
    assert projections_of(heads, target)[0].weight_VD is None


def test_scaled_logits_train_through_the_generic_projection(target, samples, tmp_path, monkeypatch):
    monkeypatch.setattr(target.config, "logits_scaling", 2.0, raising=False)
    plan = one_step(samples, 1)
    _, (found,) = run(target, new_heads(), samples, plan, tmp_path)
    monkeypatch.setattr(
        "train.trainer.projections_of",
        lambda heads, target: [Projection.of_weight(target.lm_head.weight.detach() / 2.0)] * NUM_HEADS,
    )
    _, (expected,) = run(target, new_heads(), samples, plan, tmp_path)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
