"""The preallocated key-value cache. The only code that moves cache rows.

Legend: L layers, R sequences (rows of the cache), H key-value heads, S slots of a sequence, D head size, B sequences
in one forward pass, N rows of one forward pass, M moved slots.

A worked example, one sequence, prompt of 5 tokens, then a tree of 4 nodes of which nodes 0 and 2 are accepted:

    prefill       slots 0-4 hold the prompt                                       lengths == [5]
    verify        slots 5-8 hold nodes 0 1 2 3 (written behind the length)        lengths == [5]
    commit [0,2]  slots 5-6 hold nodes 0 2; 7-8 are stale and invisible           lengths == [7]
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import Cache

from lasd.devices import on_device, upload
from lasd.errors import LasdError


class CacheFull(LasdError):
    """There is no room for a request or for the rows of a step."""


@dataclass(frozen=True)
class LayerLayout:
    """What one attention layer keeps for a token."""

    heads: int
    key_size: int
    value_size: int
    dtype: torch.dtype
    device: torch.device

    @property
    def bytes_per_token(self) -> int:
        """Bytes that this layer keeps for one token of one sequence."""
        return self.heads * (self.key_size + self.value_size) * self.dtype.itemsize


class KVCache(Cache):
    """Keys and values of R sequences, written in place.

    A forward pass writes its rows behind each sequence's length (`begin` says for which sequences); `commit` makes the
    accepted ones part of the sequence. Memory is zero-initialised: a NaN in a masked slot would still reach the output.

    Args:
        layout: one entry a layer.
        rows: sequences.
        capacity: slots of a sequence: its longest text plus the rows of one step.
    """

    def __init__(self, layout: Sequence[LayerLayout], rows: int, capacity: int):
        super().__init__(layers=[])
        self.rows, self.capacity = rows, capacity
        self.lengths = [0] * rows
        self._stores, places = _allocate(layout, rows, capacity)
        self._keys = [self._stores[group][layer, 0] for group, layer in places]
        self._values = [self._stores[group][layer, 1] for group, layer in places]
        self._sizes = [(entry.key_size, entry.value_size) for entry in layout]
        self.begin(0, 1, 1)

    @staticmethod
    def bytes_needed(layout: Sequence[LayerLayout], rows: int, capacity: int) -> int:
        """Bytes that such a cache takes."""
        return rows * capacity * sum(entry.bytes_per_token for entry in layout)

    def begin(self, first: int, count: int, num_rows: int, visible: int | None = None) -> None:
        """Says where the next forward pass writes: `num_rows` slots behind the length of sequences first ...
        first+count-1.

        Args:
            visible: slots that the pass reads; by default those in use after the write.
        """
        starts = self.lengths[first : first + count]
        if max(starts) + num_rows > self.capacity:
            raise CacheFull(
                f"{num_rows} rows behind {max(starts)} cached tokens need {max(starts) + num_rows} slots, the cache "
                f"has {self.capacity}; "
                "use a larger max_context or a smaller draft"
            )
        self._span = slice(first, first + count)
        self._visible = visible or max(starts) + num_rows
        self._start = starts[0] if len(set(starts)) == 1 else None
        self._end = starts[0] + num_rows
        if self._start is None:
            self._slots_BN = torch.tensor(starts)[:, None] + torch.arange(num_rows)
            self._rows_B1 = torch.arange(first, first + count)[:, None]
            self._on_device: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Writes one layer's new rows and returns all that the pass reads. Called by the model's attention modules.

        Args:
            key_states: [B, H, N, D] like value_states.

        Returns:
            Views [B, H, visible, D] of the cache: no copy.
        """
        keys, values = self._keys[layer_idx], self._values[layer_idx]
        key_size, value_size = self._sizes[layer_idx]
        if self._start is not None:
            keys[self._span, :, self._start : self._end, :key_size] = key_states
            values[self._span, :, self._start : self._end, :value_size] = value_states
        else:
            rows_B1, slots_BN = self._ragged_index(keys.device)
            keys[rows_B1, :, slots_BN, :key_size] = key_states.transpose(1, 2)
            values[rows_B1, :, slots_BN, :value_size] = value_states.transpose(1, 2)
        return (
            keys[self._span, :, : self._visible, :key_size],
            values[self._span, :, : self._visible, :value_size],
        )

    def advance(self, first: int, counts: Sequence[int]) -> None:
        """Commits the first `counts[i]` rows of the last pass for sequence first + i (prefill)."""
        for row, count in enumerate(counts, start=first):
            self.lengths[row] += count

    def commit(self, first: int, paths: Sequence[Sequence[int]]) -> None:
        """Keeps the accepted nodes of the last pass, in path order, and forgets the others.

        Args:
            first: the sequence of `paths[0]`.
            paths: for each sequence, places of the kept rows within the pass (ascending).
        """
        moved = [
            (row, self.lengths[row] + place, self.lengths[row] + node)
            for row, path in enumerate(paths, start=first)
            for place, node in enumerate(path)
            if place != node
        ]
        if moved:
            self._move(moved)
        self.advance(first, [len(path) for path in paths])

    def truncate(self, row: int, length: int) -> None:
        """Forgets what sequence `row` holds behind `length`."""
        self.lengths[row] = min(self.lengths[row], length)

    def move_row(self, source: int, target: int) -> None:
        """Copies sequence `source` over sequence `target`."""
        length = self.lengths[source]
        for store in self._stores:
            store[:, :, target, :, :length] = store[:, :, source, :, :length]
        self.lengths[target] = length

    def _move(self, moved: Sequence[tuple[int, int, int]]) -> None:
        for store in self._stores:
            rows_M, into_M, from_M = on_device(moved, store.device).unbind(1)
            flat = store.flatten(0, 1)
            flat[:, rows_M, :, into_M] = flat[:, rows_M, :, from_M]

    def _ragged_index(self, device: torch.device) -> tuple[Tensor, Tensor]:
        if device not in self._on_device:
            self._on_device[device] = upload(self._rows_B1, device), upload(self._slots_BN, device)
        return self._on_device[device]

    # What transformers asks of a cache besides `update`:

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens before the rows of the pass under way, for models that ask (positions are always passed to them)."""
        return self._end - 1 if self._start is None else self._start

    def __len__(self) -> int:
        return len(self._keys)


def _allocate(layout: Sequence[LayerLayout], rows: int, capacity: int) -> tuple[list[Tensor], list[tuple[int, int]]]:
    """One tensor [L, 2, R, H, S, D] for all layers of one kind, and each layer's (tensor, index) in them."""
    groups: dict[tuple, list[int]] = {}
    for layer, entry in enumerate(layout):
        kind = (entry.heads, max(entry.key_size, entry.value_size), entry.dtype, entry.device)
        groups.setdefault(kind, []).append(layer)
    stores, places = [], [(0, 0)] * len(layout)
    for group, ((heads, size, dtype, device), layers) in enumerate(groups.items()):
        try:
            stores.append(torch.zeros(len(layers), 2, rows, heads, capacity, size, dtype=dtype, device=device))
        except (torch.OutOfMemoryError, RuntimeError) as error:
            needed = KVCache.bytes_needed(layout, rows, capacity) / 2**30
            raise CacheFull(
                f"the cache for {rows} sequences of {capacity} tokens needs {needed:.2f} GiB, more than {device} "
                "has free; "
                "lower max_context or the number of slots"
            ) from error
        for place, layer in enumerate(layers):
            places[layer] = (group, place)
    return stores, places
