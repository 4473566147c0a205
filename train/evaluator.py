"""What a training run measures every eval step, and its log of JSON lines."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from lasd.decoding.stats import DecodeStats
from lasd.decoding.target import TargetModel
from lasd.decoding.tree import TreeShape
from lasd.drafters.medusa import MedusaHeads
from train import held_out
from train.checkpoints import METRICS_NAME
from train.data import Sample

logger = logging.getLogger(__name__)


class HeldOutEvaluator:
    """Accuracy of each head on held-out answers, and tokens a step predicted from it and measured by the decoder.

    Args:
        target: the frozen model.
        samples: held-out records.
        tree: path list of the tree that is measured beside the chain.
        num_heads: K, length of the chain.
        num_prompts: prompts that the decoder answers; 0 measures nothing.
        new_tokens: tokens of each answer.
        gap_warning: a measured value lower than the prediction by more than this share is reported.
    """

    def __init__(
        self,
        target: TargetModel,
        samples: Sequence[Sample],
        *,
        tree: Sequence[Sequence[int]],
        num_heads: int,
        num_prompts: int,
        new_tokens: int,
        gap_warning: float,
    ):
        self.target, self.samples = target, list(samples)
        self.shapes = {"chain": TreeShape.chain(num_heads), "tree": TreeShape.from_paths(tree)}
        self.new_tokens, self.gap_warning = new_tokens, gap_warning
        turns = [held_out.first_turn(sample) for sample in samples]
        room = target.max_positions - new_tokens - num_heads - 1
        fitting = [turn for turn in turns if len(turn.prompt) <= room]
        fitting.sort(key=lambda turn: len(turn.answer) < new_tokens)  # stable: long enough answers first
        self.turns = fitting[:num_prompts]

    def __call__(self, heads: MedusaHeads) -> dict[str, float]:
        """The numbers of one evaluation: head accuracies, `predicted_tokens_per_step_...` and `tokens_per_step_...`."""
        frozen = held_out.copy_for_decoding(heads, self.target)
        metrics: dict[str, float] = {}
        if self.samples:
            metrics |= held_out.accuracy(held_out.token_ranks(frozen, self.target, self.samples))
        if not self.turns:
            return metrics
        ranks = held_out.token_ranks(frozen, self.target, [turn.sample for turn in self.turns])
        prompts = [turn.prompt for turn in self.turns]
        for name, shape in self.shapes.items():
            predicted = held_out.predicted_tokens_per_step(ranks, shape, self.new_tokens)
            stats = held_out.measured_stats(frozen, self.target, shape, prompts, self.new_tokens)
            measured = DecodeStats.merge(stats).tokens_per_step
            metrics[f"predicted_tokens_per_step_{name}"] = predicted
            metrics[f"tokens_per_step_{name}"] = measured
            if measured < predicted * (1 - self.gap_warning):
                logger.warning(
                    "%s: %.2f tokens a step measured, %.2f predicted from the held-out answers; if the answers were "
                    "made greedily by this very model, something between training and decoding differs",
                    name,
                    measured,
                    predicted,
                )
        return metrics


class MetricsLog(TrainerCallback):
    """Appends every log line of the trainer to `metrics.jsonl`."""

    def __init__(self, output: Path, epochs: float):
        self.path, self.epochs = output / METRICS_NAME, epochs

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_kwargs: Any) -> None:
        """Writes one line and flushes it."""
        if not state.is_world_process_zero or not logs:
            return
        finite = {
            name: value if not isinstance(value, float) or math.isfinite(value) else None
            for name, value in logs.items()
        }
        record = {"step": state.global_step, **finite}
        if "epoch" in record:  # the trainer sees the whole plan as one epoch
            record["epoch"] = round(record["epoch"] * self.epochs, 4)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")


def curve(output: Path) -> list[dict[str, Any]]:
    """The evaluations of a run so far, one record each, from `metrics.jsonl`."""
    path = output / METRICS_NAME
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.is_file() else []
    points: dict[int, dict[str, Any]] = {}
    for record in records:
        kept = {
            name.removeprefix("eval_"): round(value, 4) if isinstance(value, float) else value
            for name, value in record.items()
            if name.startswith(("eval_", "loss")) and name != "eval_seconds"
        }
        if kept:
            points.setdefault(record["step"], {"step": record["step"]}).update(kept)
    return [point for point in points.values() if any("top" in name or "tokens" in name for name in point)]
