"""How often a step makes the host wait: by the profiler on a GPU, by watching operations on a CPU."""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from tests.host_reads import host_waits

WAITS = {"cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy"}
STEP = "lasd step"


def waits_of_steps(step: Callable[[], object], count: int, device: torch.device) -> dict[str, Any]:
    """Runs `count` steps; `waits_per_step` is the most that any one of them waited."""
    return _profiled(step, count) if device.type == "cuda" else _watched(step, count)


def _watched(step: Callable[[], object], count: int) -> dict[str, Any]:
    found = []
    for _ in range(count):
        with host_waits() as waits:
            step()
        found.append([*waits.reads, *waits.copies])
    return {"waits_per_step": max(map(len, found)), "what": sorted({w for one in found for w in one}), "how": "watched"}


def _profiled(step: Callable[[], object], count: int) -> dict[str, Any]:
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        for _ in range(count):
            with record_function(STEP):
                step()
    events = list(profiler.events())
    return {
        **count_waits(events),
        "where": _lines_that_wait(step),
        "how": "torch.profiler",
    }


def count_waits(events: list[Any]) -> dict[str, Any]:
    """Waits and copies of profiled steps. The profiler's own synchronisation stands outside the steps."""
    spans = [event.time_range for event in events if event.name == STEP and event.device_type.name == "CPU"]
    waits = [0] * len(spans)
    for event in events:
        if event.name in WAITS:
            for i, span in enumerate(spans):
                waits[i] += span.start <= event.time_range.start <= span.end
    names = [event.name for event in events]
    return {
        "waits_per_step": max(waits),
        "reads_per_step": sum(name.startswith("Memcpy DtoH") for name in names) / len(spans),
        "pageable_uploads_per_step": sum(name.startswith("Memcpy HtoD (Pageable") for name in names) / len(spans),
        "launches_per_step": sum(name.startswith("cudaLaunchKernel") for name in names) / len(spans),
    }


def _lines_that_wait(step: Callable[[], object]) -> list[str]:
    """The Python lines at which torch waits for the device in one more step."""
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return [f"{one.filename}:{one.lineno}" for one in caught if "synchroniz" in str(one.message)]
