"""What a device is called."""

import platform
import re
from pathlib import Path

import torch


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
