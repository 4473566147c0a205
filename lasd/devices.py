"""What a device is called, and how numbers get there without waiting for it."""

import platform
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


def cpu_name() -> str:
    """The processor's model name as the system tells it, or its architecture where it tells none."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        match = re.search(r"^model name\s*:\s*(.+)$", cpuinfo.read_text(errors="replace"), re.MULTILINE)
        if match:
            return match[1].strip()
    return platform.processor() or platform.machine()


def device_name(device: torch.device) -> str:
    """The device as a person would name it: the GPU's or the processor's model name, else its type."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return cpu_name() if device.type == "cpu" else device.type


def on_device(values: Sequence[Any], device: torch.device) -> Tensor:
    """Numbers as a tensor on a device, without waiting for it.

    `torch.tensor(values, device=...)` makes the host wait until a GPU has done all it was given; a copy that starts
    from pinned memory does not.
    """
    return upload(torch.tensor(values), device)


def upload(tensor: Tensor, device: torch.device) -> Tensor:
    """A CPU tensor's values on a device, without waiting for it."""
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
