"""Counts where the host would wait for a GPU, on any device: reads of a tensor's values, and copies that block.

Reads from Python (`tolist`, `numpy`, `cpu`) are seen as function calls; reads inside torch (`item`, `bool(tensor)`,
boolean masks, `nonzero`) as dispatched operations. A blocking copy is a list that becomes a tensor on a device:
`torch.tensor(values, device=...)`, or a list as an index.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

PYTHON_READS = {"tolist", "numpy", "cpu"}
TORCH_READS = {
    "_local_scalar_dense",
    "nonzero",
    "masked_select",
    "equal",
    "_unique2",
    "unique_dim",
    "unique_consecutive",
    "bincount",
}
FACTORIES = (torch.tensor, torch.as_tensor)


@dataclass
class Waits:
    """Names of what the host waited for, in order."""

    reads: list[str] = field(default_factory=list)
    copies: list[str] = field(default_factory=list)


@contextmanager
def host_waits() -> Iterator[Waits]:
    """Counts in the block."""
    waits = Waits()
    with _Functions(waits), _Operations(waits):
        yield waits


class _Functions(TorchFunctionMode):
    def __init__(self, waits: Waits):
        self.waits = waits

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(function, "__name__", "")
        if name in PYTHON_READS:
            self.waits.reads.append(name)
        if function in FACTORIES and kwargs.get("device") is not None:
            self.waits.copies.append(name)
        if name in ("__getitem__", "__setitem__") and _has_list(args[1]):
            self.waits.copies.append(f"{name} with a list")
        return function(*args, **kwargs)


class _Operations(TorchDispatchMode):
    def __init__(self, waits: Waits):
        super().__init__()
        self.waits = waits

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__
        masks = name in ("index", "index_put", "index_put_", "_index_put_impl_") and any(
            index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]
        )
        if name in TORCH_READS or masks:
            self.waits.reads.append(f"{name} with a mask" if masks else name)
        return function(*args, **(kwargs or {}))


def _has_list(index: Any) -> bool:
    return any(isinstance(part, list) for part in (index if isinstance(index, tuple) else (index,)))
