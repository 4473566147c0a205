"""One training run, from its configuration to the artifact."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import TrainingArguments

from lasd.artifacts import BaseModelInfo, Manifest, load_artifact, provenance, save_artifact
from lasd.conversations import load_distilled
from lasd.decoding.loading import DTYPES, load_target
from lasd.decoding.target import TargetModel
from lasd.drafters.medusa import MedusaHeads
from lasd.errors import LasdError
from train import checkpoints
from train.config import FREE_FIELDS, MedusaConfig, resolved
from train.data import DataReport, PlannedBatches, Sample, coloured, frequent_tokens, plan_steps, prepare_samples
from train.evaluator import HeldOutEvaluator, MetricsLog, curve
from train.held_out import default_tree
from train.hidden_cache import HiddenCache
from train.losses import head_weights
from train.reporting import ProgressReport
from train.trainer import MedusaTrainer, assert_only_heads_train

logger = logging.getLogger(__name__)


def train_heads(config: MedusaConfig, command: Sequence[str]) -> None:
    """Trains heads as configured and writes the artifact; resumes where an earlier call was stopped."""
    data = load_distilled(config.data)
    if config.device == "cuda" and not torch.cuda.is_available():
        raise LasdError("device is 'cuda', but torch sees no CUDA GPU here; expected one: use --device cpu")
    place = TrainingArguments(output_dir=config.output, use_cpu=config.device == "cpu", report_to=[])
    target = load_target(
        config.model,
        dtype=config.dtype,
        device=str(place.device),
        revision=config.revision or None,
        quantization=None if config.quantization == "none" else config.quantization,
        trust_remote_code=config.trust_remote_code,
    )
    data.check_against(target)
    train, held_out, report = prepare_samples(
        data,
        num_heads=config.num_heads,
        vocab_size=target.vocab_size,
        max_length=min(config.max_length, target.max_positions),
        held_out_share=config.held_out_share,
    )
    logger.info("%s", report)
    dropped = sum(report.dropped.values()) / report.read
    if dropped > config.max_dropped_share:
        raise LasdError(
            f"{dropped:.0%} of the records in {config.data} were dropped ({report}); expected at most "
            f"{config.max_dropped_share:.0%}: look at the data, or raise max_dropped_share"
        )
    heads = new_heads(config, target)
    if config.draft_vocab:
        heads.token_map = frequent_tokens(train, config.draft_vocab)
    if config.overfit_one_batch:
        from train.overfit import overfit

        overfit(config, target, heads, train[0])
        return
    output = Path(config.output)
    fingerprint = data.fingerprint()
    with place.main_process_first(local=False):
        if place.process_index == 0:
            checkpoints.claim_output(
                output, resolved(config) | {"data_fingerprint": fingerprint}, FREE_FIELDS, resolved(MedusaConfig())
            )
    if (output / "lasd.json").is_file():
        logger.info("%s is trained already: %s", output, load_artifact(output).manifest.measured.get("summary", ""))
        return
    cache = None
    if config.cache_hidden_states:
        cache = HiddenCache(
            output / checkpoints.HIDDEN_NAME, train, target, {"data": fingerprint, "model": target.source}
        )
        cache.fill(place.process_index, place.world_size)
    trainer = build_trainer(config, target, heads, train, held_out, cache)
    checkpoint = checkpoints.newest_complete(output / checkpoints.CHECKPOINTS_NAME)
    if place.process_index == 0:
        _announce(config, target, heads, train, trainer, checkpoint)
        checkpoints.discard_after(output / checkpoints.CHECKPOINTS_NAME, checkpoints.step_of(checkpoint))
        checkpoints.cut_metrics(output, checkpoints.step_of(checkpoint))
    trainer.accelerator.wait_for_everyone()
    result = trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    if trainer.is_world_process_zero():
        save(config, target, heads, fingerprint, report, command, result.metrics, trainer.skipped_batches)
        if cache is not None:
            cache.delete()


def new_heads(config: MedusaConfig, target: TargetModel) -> MedusaHeads:
    """Untrained heads in float32; own projections start as the model's output embedding."""
    vocab_size = target.vocab_size if config.projection == "own" else None
    heads = MedusaHeads(
        target.hidden_size,
        config.num_heads,
        config.num_layers,
        "own" if config.projection == "own" else "shared",
        vocab_size,
    )
    if config.projection == "own":
        heads.init_own_from(target.lm_head.weight.detach().float())
    return heads


def build_trainer(
    config: MedusaConfig,
    target: TargetModel,
    heads: MedusaHeads,
    train: Sequence[Sample],
    held_out: Sequence[Sample],
    cache: HiddenCache | None = None,
) -> MedusaTrainer:
    """The trainer of a run: plan, training arguments, evaluator."""
    output = Path(config.output)
    args = TrainingArguments(output_dir=str(output / checkpoints.CHECKPOINTS_NAME), use_cpu=config.device == "cpu")
    parts = config.gradient_accumulation_steps * args.world_size
    plan = plan_steps(
        train,
        positions_per_batch=config.positions_per_batch,
        epochs=config.epochs,
        micro_batches=parts,
        seed=config.seed,
        group_by_length=cache is None,
    )
    if config.max_steps:
        plan = plan[: config.max_steps]
    tenth = max(1, math.ceil(len(plan) / 10))
    evaluator = HeldOutEvaluator(
        target,
        held_out[: config.eval_records],
        tree=default_tree(config.num_heads),
        num_heads=config.num_heads,
        num_prompts=config.eval_prompts,
        new_tokens=config.eval_new_tokens,
        gap_warning=config.gap_warning,
    )
    return MedusaTrainer(
        heads,
        target,
        training_arguments(
            config, steps=len(plan), eval_steps=config.eval_steps or tenth, save_steps=config.save_steps or tenth
        ),
        PlannedBatches(train, plan),
        head_weights(config.num_heads, config.head_decay),
        evaluator,
        cache,
        callbacks=[MetricsLog(output, config.epochs), ProgressReport()],
    )


def training_arguments(
    config: MedusaConfig, *, steps: int, eval_steps: int, save_steps: int, **changes: Any
) -> TrainingArguments:
    """What transformers' Trainer is told: the whole plan is one epoch of `steps` steps, an item is a micro-batch."""
    warmup = config.warmup if config.warmup < 1 else min(int(config.warmup), steps)
    settings: dict[str, Any] = {
        "output_dir": str(Path(config.output) / checkpoints.CHECKPOINTS_NAME),
        "use_cpu": config.device == "cpu",
        "max_steps": steps,
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": config.gradient_accumulation_steps,
        "learning_rate": config.learning_rate,
        "lr_scheduler_type": "constant_with_warmup" if config.lr_scheduler == "constant" else config.lr_scheduler,
        "warmup_steps": warmup,
        "weight_decay": config.weight_decay,
        "max_grad_norm": config.max_grad_norm,
        "optim": "adamw_torch",
        "seed": config.seed,
        "eval_strategy": "steps",
        "eval_steps": eval_steps,
        "save_strategy": "steps",
        "save_steps": save_steps,
        "save_total_limit": config.save_total_limit,
        "logging_steps": config.logging_steps,
        "logging_nan_inf_filter": False,
        "remove_unused_columns": False,
        "dataloader_num_workers": 0,
        "dataloader_pin_memory": False,
        "report_to": [],
        "disable_tqdm": True,
        "ddp_find_unused_parameters": False,
    }
    return TrainingArguments(**settings | changes)


def _announce(
    config: MedusaConfig,
    target: TargetModel,
    heads: MedusaHeads,
    train: Sequence[Sample],
    trainer: MedusaTrainer,
    checkpoint: Path | None,
) -> None:
    logger.info("%s", assert_only_heads_train(heads, target))
    logger.info(
        "one training sample (%s), trained tokens in green:\n%s", train[0].id, coloured(train[0], target.tokenizer)
    )
    logger.info(
        "%d optimizer steps of about %d labelled tokens, %s on %s, start: %s",
        trainer.args.max_steps,
        config.positions_per_batch,
        target.dtype,
        trainer.args.device,
        f"resumed from {checkpoint}" if checkpoint else "new",
    )


def save(
    config: MedusaConfig,
    target: TargetModel,
    heads: MedusaHeads,
    data_fingerprint: str,
    report: DataReport,
    command: Sequence[str],
    train_metrics: dict[str, float],
    skipped_batches: int,
) -> None:
    """Writes the artifact into the run's folder, beside its checkpoints and logs."""
    output = Path(config.output)
    points = curve(output)
    final = points[-1] if points else {}
    manifest = Manifest(
        kind="medusa",
        base_model=BaseModelInfo.of(target),
        settings={
            "num_heads": heads.num_heads,
            "num_layers": heads.num_layers,
            "projection": heads.projection,
            "tree": default_tree(heads.num_heads),
            "training": resolved(config) | {"backbone_dtype": str(target.dtype).removeprefix("torch.")},
        },
        measured={"held_out": final, "curve": points} if points else {},
        provenance=provenance(
            command,
            config.seed,
            data_fingerprint,
            records=report.train,
            held_out_records=report.held_out,
            labelled_tokens=report.train_labelled_tokens,
            dropped=report.dropped,
            truncated=report.truncated,
            train_seconds=round(train_metrics.get("train_runtime", 0.0), 1),
            skipped_batches=skipped_batches,
        ),
    )
    dtype = DTYPES[config.heads_dtype]
    tensors = {
        name: value.detach().to(dtype) if value.is_floating_point() else value.detach()
        for name, value in heads.state_dict().items()
    }
    save_artifact(output, manifest, tensors)
    logger.info("saved %s", output)
