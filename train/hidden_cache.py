"""The backbone's hidden states at all supervised positions, computed once and kept in a file for all epochs.

The backbone is frozen, so its hidden states never change. Computing them once, in large batches of equal lengths,
spares the padding of small batches and every later epoch's forward passes.

Legend: M supervised positions of a record, T of all records, D hidden size.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lasd.decoding.target import TargetModel
from lasd.errors import LasdError
from train.checkpoints import write_atomic
from train.data import Sample, collate
from train.losses import IGNORE
from train.reporting import progress_bar

logger = logging.getLogger(__name__)

_GROUP_TOKENS = 4096
_GROUPS_PER_FLUSH = 32


class HiddenCache:
    """Hidden states of a list of records in one file, filled by `fill` and read by `read`.

    The groups that are computed together depend on the records alone, so a cache filled again has the same bits.

    Args:
        folder: where the file is; the run's own.
        samples: the records; their ids differ.
        target: the frozen model.
        owner: what the states depend on besides the records; a file of another owner is made anew.
    """

    def __init__(self, folder: Path, samples: Sequence[Sample], target: TargetModel, owner: dict[str, Any]):
        self.folder, self.samples, self.target = folder, samples, target
        counts = [_num_supervised(sample) for sample in samples]
        starts = np.cumsum([0, *counts]).tolist()
        self._slices = {sample.id: slice(starts[i], starts[i + 1]) for i, sample in enumerate(samples)}
        self.num_positions: int = starts[-1]
        # Groups of one model in different orders would differ in the last bits: the key holds all that decides them.
        key = json.dumps([owner, [s.id for s in samples], counts, str(target.dtype)], sort_keys=True)
        self.key = hashlib.sha256(key.encode()).hexdigest()
        self._groups = _groups(samples)
        self._states: np.memmap[Any, Any] | None = None

    @property
    def num_bytes(self) -> int:
        """Size of the file."""
        return self.num_positions * self.target.hidden_size * self.target.dtype.itemsize

    def fill(self, rank: int = 0, world_size: int = 1) -> None:
        """Computes what is missing of this process's share of the groups; the file is shared by all processes.

        Raises:
            LasdError: the file would not fit on the disk.
        """
        self._open()
        assert self._states is not None
        progress_path = self.folder / f"filled-{rank}-of-{world_size}.json"
        done = self._done(progress_path)
        groups = self._groups[rank::world_size]
        logger.info(
            "hidden states: %.2f GB in %s, %d of %d groups done", self.num_bytes / 1e9, self.folder, done, len(groups)
        )
        with progress_bar("hidden states", shown=rank == 0) as progress:
            task = progress.add_task("", total=len(groups), completed=done)
            for number, group in enumerate(groups[done:], start=done + 1):
                self._compute([self.samples[i] for i in group])
                progress.advance(task)
                if number % _GROUPS_PER_FLUSH == 0 or number == len(groups):
                    self._states.flush()
                    write_atomic(progress_path, json.dumps({"key": self.key, "done": number}))
                    logger.info("hidden states: %d of %d groups", number, len(groups))

    def read(self, sample_ids: Sequence[str]) -> Tensor:
        """Hidden states [M, D] of the supervised positions of these records, one record behind the other."""
        assert self._states is not None, "fill() comes first"
        parts = [torch.from_numpy(np.asarray(self._states[self._slices[name]])) for name in sample_ids]
        return torch.cat(parts).view(self.target.dtype)

    def delete(self) -> None:
        """Removes the file."""
        self._states = None
        shutil.rmtree(self.folder, ignore_errors=True)

    def _open(self) -> None:
        path = self.folder / "hidden.bin"
        if not path.is_file() or path.stat().st_size != self.num_bytes:
            self.folder.mkdir(parents=True, exist_ok=True)
            free = shutil.disk_usage(self.folder).free
            if self.num_bytes > free * 0.9:
                raise LasdError(
                    f"the cache of hidden states needs {self.num_bytes / 1e9:.1f} GB in {self.folder}, where "
                    f"{free / 1e9:.1f} GB are free: free some space, or pass --cache_hidden_states false"
                )
            with path.open("ab") as file:
                file.truncate(self.num_bytes)
        width = {1: np.uint8, 2: np.uint16, 4: np.uint32}[self.target.dtype.itemsize]
        self._states = np.memmap(path, dtype=width, mode="r+", shape=(self.num_positions, self.target.hidden_size))

    def _done(self, progress_path: Path) -> int:
        if not progress_path.is_file():
            return 0
        record = json.loads(progress_path.read_text(encoding="utf-8"))
        return int(record["done"]) if record["key"] == self.key else 0

    def _compute(self, group: Sequence[Sample]) -> None:
        assert self._states is not None
        inputs = collate(group, 1)
        valid_BL = inputs["targets_KBL"][0] != IGNORE
        device = self.target.device
        hidden_BLD = self.target.hidden_states(inputs["ids_BL"].to(device), inputs["lengths_B"].to(device))
        for row, sample in enumerate(group):
            hidden_MD = hidden_BLD[row][valid_BL[row].to(hidden_BLD.device)].cpu().contiguous()
            self._states[self._slices[sample.id]] = _bits(hidden_MD)


def _bits(hidden_MD: Tensor) -> Any:
    kind = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32}[hidden_MD.dtype.itemsize]
    return hidden_MD.view(kind).numpy()


def _num_supervised(sample: Sample) -> int:
    return int(collate([sample], 1)["counts_K"][0])


def _groups(samples: Sequence[Sample]) -> list[list[int]]:
    """Records of similar lengths, about `_GROUP_TOKENS` tokens with their padding, long ones last."""

    def generate() -> Iterator[list[int]]:
        group: list[int] = []
        for index in sorted(range(len(samples)), key=lambda i: (samples[i].num_tokens, samples[i].id)):
            if group and (len(group) + 1) * samples[index].num_tokens > _GROUP_TOKENS:
                yield group
                group = []
            group.append(index)
        yield group

    return list(generate())
