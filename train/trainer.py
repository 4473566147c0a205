"""The transformers Trainer that trains Medusa heads on a frozen backbone held beside them.

Legend: B rows, L tokens of a row, K heads, M supervised positions, D hidden size.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Sampler, SequentialSampler
from transformers import PrinterCallback, Trainer, TrainingArguments

from lasd.decoding.target import TargetModel
from lasd.drafters.medusa import MedusaHeads
from lasd.errors import LasdError
from train.checkpoints import mark_complete
from train.data import PlannedBatches, collate
from train.hidden_cache import HiddenCache
from train.losses import IGNORE, Projection, head_loss

logger = logging.getLogger(__name__)

Evaluator = Callable[[MedusaHeads], dict[str, float]]


def projections_of(heads: MedusaHeads, target: TargetModel) -> list[Projection]:
    """How each head's features become logits: one shared object for shared heads, one a head for own projections."""
    if heads.projection_weight is not None:
        return [Projection.of_weight(weight_VD) for weight_VD in heads.projection_weight]
    weight_VD = getattr(target.lm_head, "weight", None)
    plain = (
        type(target.lm_head) is nn.Linear
        and target.lm_head.bias is None
        and not target.has_logit_tail
        and weight_VD is not None
        and weight_VD.is_floating_point()
        and weight_VD.device.type != "meta"
    )
    project = partial(_project, target)
    shared = Projection(project, weight_VD.detach() if plain and weight_VD is not None else None)
    return [shared] * heads.num_heads


def _project(target: TargetModel, features: Tensor) -> Tensor:
    return target.project(features.to(target.dtype))


def head_features(model: nn.Module, hidden_MD: Tensor) -> Tensor:
    """The residual blocks on hidden states of any type: in bfloat16 for bfloat16, else in float32.

    In float16 the gradients of one position among thousands would vanish; the vocabulary's products stay in float16.
    """
    if hidden_MD.dtype == torch.bfloat16:
        with torch.autocast(hidden_MD.device.type, torch.bfloat16):
            return model(hidden_MD)
    return model(hidden_MD.float())


def assert_only_heads_train(heads: MedusaHeads, target: TargetModel) -> str:
    """Freezes the target, checks that exactly the heads' parameters are trainable, and says so.

    Raises:
        LasdError: a parameter of the heads is frozen, or shared with the target.
    """
    target.model.requires_grad_(False)
    trainable = [name for name, parameter in heads.named_parameters() if parameter.requires_grad]
    frozen = [name for name, parameter in heads.named_parameters() if not parameter.requires_grad]
    leaking = [name for name, parameter in target.model.named_parameters() if parameter.requires_grad]
    if frozen or leaking:
        raise LasdError(
            f"parameters {frozen} of the heads are frozen and {leaking} of the model are trainable; expected exactly "
            "the heads to train: use heads that share no parameter with the model"
        )
    count = sum(parameter.numel() for parameter in heads.parameters())
    total = sum(parameter.numel() for parameter in target.model.parameters())
    return f"trainable: {count:,} parameters of the heads ({', '.join(trainable)}); frozen: {total:,} of {target.name}"


class MedusaTrainer(Trainer):
    """Trains `MedusaHeads`; the target model gives hidden states and is neither trained nor saved.

    The loss of an optimizer step is, for each head, the summed cross-entropy over all micro-batches and processes,
    divided by the number of that head's targets in all of them, times the head's weight.

    Args:
        heads: float32 master weights.
        target: the frozen model.
        args: transformers' training arguments.
        batches: the planned micro-batches of the whole run.
        weights_K: weight of each head.
        evaluator: called every eval step on the first process with the heads; its numbers are logged.
        hidden_cache: a filled cache of the records' hidden states; without one each step runs the model.
    """

    loss_is_scaled_for_ga = True

    def __init__(
        self,
        heads: MedusaHeads,
        target: TargetModel,
        args: TrainingArguments,
        batches: PlannedBatches,
        weights_K: Tensor,
        evaluator: Evaluator | None = None,
        hidden_cache: HiddenCache | None = None,
        callbacks: Sequence[Any] = (),
    ):
        super().__init__(
            model=heads,
            args=args,
            train_dataset=batches,
            eval_dataset=PlannedBatches([], []),  # the evaluator has its own; transformers only asks that there is one
            data_collator=partial(_collate_one, num_heads=heads.num_heads),
            callbacks=list(callbacks),
        )
        self.remove_callback(PrinterCallback)
        self.target = target
        self.evaluator = evaluator
        self.hidden_cache = hidden_cache
        self.weights_K = weights_K.to(self.args.device)
        self.skipped_batches = 0
        self._entropy_K = torch.zeros(heads.num_heads, device=self.args.device)
        self._positions = 0
        self._since = time.perf_counter()

    def _get_train_sampler(self, train_dataset: Any = None) -> Sampler[int]:
        batches = train_dataset if train_dataset is not None else self.train_dataset
        assert isinstance(batches, PlannedBatches)
        return SequentialSampler(batches)

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Tensor]:
        """The micro-batches of one optimizer step, and counts_K: each head's targets in all of them, all processes."""
        batches: list[Any] = []
        for _ in range(num_batches):
            with contextlib.suppress(StopIteration):
                batches.append(next(epoch_iterator))
        num_heads = len(self.weights_K)
        counts_K = torch.zeros(num_heads, dtype=torch.long, device=device)
        for batch in batches:
            counts_K += batch["counts_K"].to(device)
        if self.args.world_size > 1:
            counts_K = self.accelerator.gather(counts_K).view(-1, num_heads).sum(0)
        return batches, counts_K

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        """One micro-batch. Where the whole step has no target no gradient is made, so the optimizer changes nothing."""
        counts_K: Tensor = num_items_in_batch
        if int(inputs["counts_K"][0]) == 0:
            self.skipped_batches += 1
            logger.info("skipped a micro-batch without a target (%d so far)", self.skipped_batches)
        if int(counts_K[0]) == 0:
            return torch.zeros((), device=self.args.device)
        return super().training_step(model, inputs, num_items_in_batch=counts_K)

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Loss of one micro-batch; see the class for how it is normalised."""
        counts_K: Tensor = num_items_in_batch
        if int(inputs["counts_K"][0]) == 0:  # other micro-batches of the step have targets: keep the processes in step
            hidden_MD = torch.zeros(0, self.target.hidden_size, device=self.args.device)
            return model(hidden_MD).sum() + sum(parameter.sum() * 0.0 for parameter in model.parameters())
        targets_KBL: Tensor = inputs["targets_KBL"]
        valid_BL = targets_KBL[0] != IGNORE  # the positions of head 1 include those of every later head
        hidden_MD = self._hidden(inputs, valid_BL).to(targets_KBL.device)
        features_KMD = head_features(model, hidden_MD)
        scale_K = self.weights_K / counts_K.clamp(min=1)
        projections = projections_of(self.heads, self.target)
        loss, sums_K = head_loss(features_KMD, targets_KBL[:, valid_BL], projections, scale_K)
        if not math.isfinite(loss.item()):
            raise LasdError(
                f"the loss is {loss.item()} at step {self.state.global_step + 1} (micro-batch of samples "
                f"{', '.join(inputs['sample_ids'])}); expected a finite number: look at these samples, lower "
                "learning_rate, or train in bf16 or fp32 instead of fp16"
            )
        self._entropy_K += sums_K / counts_K.clamp(min=1)
        self._positions += int(inputs["counts_K"][0])
        # Gradients are averaged over processes, and the loss is summed over them.
        return loss * self.accelerator.num_processes

    def _hidden(self, inputs: dict[str, Any], valid_BL: Tensor) -> Tensor:
        if self.hidden_cache is not None:
            return self.hidden_cache.read(inputs["sample_ids"])
        hidden_BLD = self.target.hidden_states(inputs["ids_BL"], inputs["lengths_B"])
        return hidden_BLD[valid_BL.to(hidden_BLD.device)]

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Adds each head's own loss and the speed to the training log."""
        if "loss" in logs:
            steps = max(1, round(self.state.global_step - getattr(self, "_logged_step", self._initial_global_step)))
            entropy_K = self.accelerator.reduce(self._entropy_K, "sum") / steps
            for k, value in enumerate(entropy_K.tolist(), start=1):
                logs[f"loss_head{k}"] = value
            now = time.perf_counter()
            logs["positions_per_s"] = self._positions * self.accelerator.num_processes / (now - self._since)
            logs["skipped_batches"] = self.skipped_batches
            self._entropy_K = torch.zeros_like(self._entropy_K)
            self._positions, self._since, self._logged_step = 0, now, self.state.global_step
        super().log(logs, start_time)

    def evaluate(self, *_args: Any, **_kwargs: Any) -> dict[str, float]:
        """Calls the evaluator on the first process and logs what it returns, as `eval_...`."""
        started = time.perf_counter()
        metrics: dict[str, float] = {}
        if self.evaluator is not None and self.is_world_process_zero():
            metrics = {f"eval_{name}": value for name, value in self.evaluator(self.heads).items()}
            metrics["eval_seconds"] = time.perf_counter() - started
        self.accelerator.wait_for_everyone()
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        self._since += time.perf_counter() - started
        return metrics

    @property
    def heads(self) -> MedusaHeads:
        """The heads themselves, without a wrapper."""
        heads = self.accelerator.unwrap_model(self.model)
        assert isinstance(heads, MedusaHeads)
        return heads

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        self.accelerator.wait_for_everyone()
        if self.is_world_process_zero():
            mark_complete(self._get_output_dir(trial), self.state.global_step)


def _collate_one(items: list[Any], num_heads: int) -> dict[str, Any]:
    (samples,) = items  # an item is a whole micro-batch already
    return collate(samples, num_heads)
