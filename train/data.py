"""Distilled records as training batches: which are kept, which are held out, and which stand in which step.

Legend: B rows, L tokens of a row, K heads.

The plan of a run (every step of every epoch, split into micro-batches) is made before the first step from the seed and
the lengths alone. So a resumed run continues with the very next batch, and the records of a step do not depend on the
number of micro-batches or of processes.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from lasd.conversations.split import held_out as is_held_out
from lasd.errors import LasdError
from train.losses import count_targets, shift_targets

logger = logging.getLogger(__name__)

_GROUP_STEPS = 40  # records of this many steps are sorted by length together


class RecordLike(Protocol):
    """What is read of a distilled record."""

    id: str
    input_ids: list[int]
    loss_mask: list[int]


@dataclass(frozen=True)
class Sample:
    """One record ready for training."""

    id: str
    ids_L: Tensor
    """int32; token ids."""
    mask_L: Tensor
    """bool; true where the assistant wrote the token."""

    @property
    def num_tokens(self) -> int:
        """Tokens, the prompt's included."""
        return len(self.ids_L)

    @property
    def num_labelled(self) -> int:
        """Tokens that the assistant wrote."""
        return int(self.mask_L.sum())


@dataclass
class DataReport:
    """What became of the records."""

    read: int = 0
    train: int = 0
    held_out: int = 0
    truncated: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    train_labelled_tokens: int = 0
    held_out_labelled_tokens: int = 0

    def __str__(self) -> str:
        dropped = ", ".join(f"{count} {reason}" for reason, count in self.dropped.items()) or "none"
        return (
            f"{self.read} records read: {self.train} to train on ({self.train_labelled_tokens} labelled tokens), "
            f"{self.held_out} held out ({self.held_out_labelled_tokens}), {self.truncated} truncated, "
            f"dropped: {dropped}"
        )


def prepare_samples(
    records: Iterable[RecordLike], *, num_heads: int, vocab_size: int, max_length: int, held_out_share: float
) -> tuple[list[Sample], list[Sample], DataReport]:
    """Keeps the records that give head 1 a target, and holds a share of them out by a hash of their id.

    Args:
        records: distilled records, in any order.
        num_heads: K.
        vocab_size: rows of the output embedding.
        max_length: longer records lose their end, tokens.
        held_out_share: share held out, in [0, 1).

    Returns:
        Samples to train on and held-out samples, both sorted by id, and the report.

    Raises:
        LasdError: ids outside the vocabulary, no record at all, or none with a target.
    """
    report = DataReport()
    train: list[Sample] = []
    held_out: list[Sample] = []
    seen: set[str] = set()
    for record in records:
        report.read += 1
        ids_L = torch.tensor(record.input_ids[:max_length], dtype=torch.int32)
        mask_L = torch.tensor(record.loss_mask[:max_length], dtype=torch.bool)
        if len(ids_L) and not 0 <= int(ids_L.min()) <= int(ids_L.max()) < vocab_size:
            bad = int(ids_L.max()) if int(ids_L.max()) >= vocab_size else int(ids_L.min())
            raise LasdError(
                f"record {record.id} holds token id {bad}; expected ids from 0 to {vocab_size - 1}: distil again with "
                "this model"
            )
        reason = _why_dropped(record, ids_L, mask_L, seen)
        if reason:
            report.dropped[reason] = report.dropped.get(reason, 0) + 1
            continue
        seen.add(record.id)
        report.truncated += len(record.input_ids) > max_length
        sample = Sample(record.id, ids_L, mask_L)
        if is_held_out(record.id, held_out_share):
            held_out.append(sample)
            report.held_out_labelled_tokens += sample.num_labelled
        else:
            train.append(sample)
            report.train_labelled_tokens += sample.num_labelled
    for samples in (train, held_out):
        samples.sort(key=lambda sample: sample.id)
    report.train, report.held_out = len(train), len(held_out)
    if not train:
        raise LasdError(
            f"no record is left to train on ({report}); expected answers of at least 2 labelled tokens within "
            f"{max_length} tokens: distil more prompts, or raise max_length"
        )
    return train, held_out, report


def _why_dropped(record: RecordLike, ids_L: Tensor, mask_L: Tensor, seen: set[str]) -> str:
    if record.id in seen:
        return "with the id of another"
    if not any(record.loss_mask):
        return "without a labelled token"
    if not int(count_targets(shift_targets(ids_L[None], mask_L[None], 1)).sum()):
        return "without two labelled tokens in a row"
    return ""


def frequent_tokens(samples: Sequence[Sample], count: int) -> Tensor:
    """The `count` most frequent labelled tokens, int64, in the order of their ids; all where there are fewer."""
    counts = torch.bincount(torch.cat([sample.ids_L[sample.mask_L] for sample in samples]).long())
    return counts.argsort(descending=True, stable=True)[: min(count, int((counts > 0).sum()))].sort().values


def plan_steps(
    samples: Sequence[Sample],
    *,
    positions_per_batch: int,
    epochs: float,
    micro_batches: int,
    seed: int,
    group_by_length: bool = True,
) -> list[list[list[int]]]:
    """Puts every record into a step.

    Args:
        samples: the records.
        positions_per_batch: labelled tokens of one optimizer step, over all micro-batches and processes; records stay
            whole, so a step holds about as many.
        epochs: passes over the data; a fraction cuts the last one short.
        micro_batches: parts of each step (accumulation steps times processes); some may be empty.
        seed: order of the records.
        group_by_length: put records of similar lengths into one step, so that there is little padding.

    Returns:
        plan[step][micro_batch] = indices into `samples`. The order of the steps is random.
    """
    labelled = [sample.num_labelled for sample in samples]
    lengths = [sample.num_tokens for sample in samples]
    steps: list[list[int]] = []
    rest = epochs
    epoch = 0
    while rest > 0:
        rng = random.Random(f"{seed}-{epoch}")
        this_epoch = _epoch_steps(labelled, lengths, positions_per_batch, rng, group_by_length)
        steps += this_epoch if rest >= 1 else this_epoch[: max(1, round(rest * len(this_epoch)))]
        rest, epoch = rest - 1, epoch + 1
    return [_split(step, lengths, micro_batches) for step in steps]


def _epoch_steps(
    labelled: Sequence[int], lengths: Sequence[int], positions_per_batch: int, rng: random.Random, grouped: bool
) -> list[list[int]]:
    order = list(range(len(labelled)))
    rng.shuffle(order)
    mean = sum(labelled) / len(labelled)
    group = max(1, round(_GROUP_STEPS * max(1.0, positions_per_batch / mean))) if grouped else len(order)
    steps = []
    for start in range(0, len(order), group):
        step: list[int] = []
        total = 0
        window = order[start : start + group]
        for index in sorted(window, key=lambda i: lengths[i]) if grouped else window:
            # Close the step where its size comes nearest to what was asked for.
            if step and total + labelled[index] - positions_per_batch > positions_per_batch - total:
                steps.append(step)
                step, total = [], 0
            step.append(index)
            total += labelled[index]
        steps.append(step)
    rng.shuffle(steps)
    return steps


def _split(step: Sequence[int], lengths: Sequence[int], parts: int) -> list[list[int]]:
    """Splits the records of a step into parts of similar numbers of tokens."""
    split: list[list[int]] = [[] for _ in range(parts)]
    sizes = [0] * parts
    for index in sorted(step, key=lambda i: -lengths[i]):
        smallest = sizes.index(min(sizes))
        split[smallest].append(index)
        sizes[smallest] += lengths[index]
    return split


class PlannedBatches(torch.utils.data.Dataset[list[Sample]]):
    """The whole run as a sequence of micro-batches: step by step, and within a step in the order of the plan."""

    def __init__(self, samples: Sequence[Sample], plan: Sequence[Sequence[Sequence[int]]]):
        self.samples = samples
        self.batches = [list(batch) for step in plan for batch in step]

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, index: int) -> list[Sample]:
        return [self.samples[i] for i in self.batches[index]]


def collate(samples: Sequence[Sample], num_heads: int) -> dict[str, Any]:
    """Pads records on the right and builds the heads' targets. No samples give tensors without rows.

    Returns:
        ids_BL (int64), lengths_B (int64), targets_KBL (int64), counts_K (int64), sample_ids (list of B strings).
    """
    longest = max((sample.num_tokens for sample in samples), default=0)
    ids_BL = torch.zeros(len(samples), longest, dtype=torch.long)
    mask_BL = torch.zeros(len(samples), longest, dtype=torch.bool)
    for row, sample in enumerate(samples):
        ids_BL[row, : sample.num_tokens] = sample.ids_L
        mask_BL[row, : sample.num_tokens] = sample.mask_L
    targets_KBL = shift_targets(ids_BL, mask_BL, num_heads)
    return {
        "ids_BL": ids_BL,
        "lengths_B": torch.tensor([sample.num_tokens for sample in samples], dtype=torch.long),
        "targets_KBL": targets_KBL,
        "counts_K": count_targets(targets_KBL),
        "sample_ids": [sample.id for sample in samples],
    }


def coloured(sample: Sample, tokenizer: Any) -> str:
    """The text of a sample with what is trained on in green and the rest dim, for a look at the labels before a run."""
    parts = []
    start = 0
    for end in range(1, sample.num_tokens + 1):
        if end == sample.num_tokens or sample.mask_L[end] != sample.mask_L[start]:
            text = tokenizer.decode(sample.ids_L[start:end].tolist())
            parts.append(f"\x1b[{32 if sample.mask_L[start] else 2}m{text}\x1b[0m")
            start = end
    return "".join(parts)
