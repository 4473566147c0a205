"""Measures head training against its plainest form: speed and peak memory, interleaved in one process.

    python train/bench_loss.py --model demo --data runs/smollm2-135m/distilled --output runs/bench-loss --max_steps 6

Takes the settings of train/medusa.py; `max_steps` is the number of batches. Three ways to make one optimizer step of
the same records, all with the same frozen model and heads:

- plain: the model, then every logit of every head at every position (prompts and padding too) in float32, by autograd;
- lasd: the model, then only positions with a target, the gradient chunk by chunk (what train/medusa.py does);
- lasd_cached: the same with hidden states that were computed before (`cache_hidden_states`).

Writes <output>/bench_loss.json. Peak memory is what a step adds to the process (CPU: resident memory; GPU: allocated);
the process's whole peak, with model and libraries, stands beside it.
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # see train/medusa.py

import ctypes
import gc
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lasd.errors import entry

if TYPE_CHECKING:
    import torch

WAYS = ("plain", "lasd", "lasd_cached")


@dataclass
class Timing:
    """Seconds and peak bytes of each step of one way."""

    seconds: list[float] = field(default_factory=list)
    added_bytes: list[int] = field(default_factory=list)
    total_bytes: list[int] = field(default_factory=list)
    tokens: int = 0

    def summary(self) -> dict[str, float]:
        """Labelled tokens a second over all steps, and the largest peak."""
        return {
            "tokens_per_s": self.tokens / sum(self.seconds),
            "step_ms_median": statistics.median(self.seconds) * 1e3,
            "peak_mb": max(self.added_bytes) / 1e6,
            "peak_with_model_mb": max(self.total_bytes) / 1e6,
        }


def main() -> None:
    """Reads the command line, measures, prints a table and writes the JSON file."""
    from train.config import read_config
    from train.reporting import set_up_logging

    config = read_config(sys.argv[1:])
    set_up_logging(0)
    result = measure(config)
    output = Path(config.output)
    output.mkdir(parents=True, exist_ok=True)
    (output / "bench_loss.json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    for name in WAYS:
        row = result[name]
        peak = f"{row['peak_mb']:6.0f} MB added at the peak of a step, {row['peak_with_model_mb']:6.0f} MB in all"
        print(f"{name:12} {row['tokens_per_s']:8.0f} tokens/s {peak}")
    print(f"lasd against plain: {result['speedup']:.2f}x tokens/s, {result['memory_share']:.2f} of the peak memory")
    print(f"with cached hidden states: {result['speedup_cached']:.2f}x tokens/s")


def measure(config: Any) -> dict[str, Any]:
    """Times the three ways on the same batches, one batch after the other.

    Args:
        config: a `MedusaConfig`.

    Returns:
        For each way its summary; speed-ups and share of memory against the plain way; where it was measured.
    """
    import torch

    from lasd.artifacts import device_description
    from lasd.conversations import load_distilled
    from lasd.decoding.loading import load_target
    from train.data import collate, plan_steps, prepare_samples
    from train.losses import head_weights
    from train.run import new_heads

    target = load_target(config.model, dtype=config.dtype, device=config.device)
    data = load_distilled(config.data, allow_partial=True)
    data.check_against(target)
    limits = {"vocab_size": target.vocab_size, "max_length": min(config.max_length, target.max_positions)}
    samples, _, _ = prepare_samples(data, num_heads=config.num_heads, held_out_share=0.0, **limits)
    settings = {"positions_per_batch": config.positions_per_batch, "seed": config.seed}
    plan = plan_steps(samples, epochs=1, micro_batches=1, **settings)[: config.max_steps or 6]
    heads = new_heads(config, target).to(target.device)
    optimizer = torch.optim.AdamW(heads.parameters(), lr=1e-5, weight_decay=0.0)
    timings = {name: Timing() for name in WAYS}
    weights_K = head_weights(config.num_heads, config.head_decay).to(target.device)
    for number, step in enumerate([plan[0], *plan]):  # the first is a warm-up
        inputs = {
            name: value.to(target.device) if isinstance(value, torch.Tensor) else value
            for name, value in collate([samples[i] for i in step[0]], config.num_heads).items()
        }
        hidden_BLD = target.hidden_states(inputs["ids_BL"])
        scale_K = weights_K / inputs["counts_K"].clamp(min=1)
        ways = _ways(heads, target, inputs, hidden_BLD, scale_K)
        for shift in range(len(WAYS)):
            name = WAYS[(shift + number) % len(WAYS)]
            seconds, added, total = _timed(ways[name], optimizer, target.device)
            if number:
                timings[name].seconds.append(seconds)
                timings[name].added_bytes.append(added)
                timings[name].total_bytes.append(total)
                timings[name].tokens += int(inputs["counts_K"][0])
    rows: dict[str, Any] = {name: timing.summary() for name, timing in timings.items()}
    plain, ours = rows["plain"], rows["lasd"]
    return rows | {
        "speedup": ours["tokens_per_s"] / plain["tokens_per_s"],
        "speedup_cached": rows["lasd_cached"]["tokens_per_s"] / plain["tokens_per_s"],
        "memory_share": ours["peak_mb"] / plain["peak_mb"],
        "batches": len(plan),
        "dtype": str(target.dtype).removeprefix("torch."),
        "device": device_description(target.device),
        "threads": torch.get_num_threads(),
        "num_heads": config.num_heads,
        "positions_per_batch": config.positions_per_batch,
    }


def _ways(
    heads: Any, target: Any, inputs: dict[str, Any], hidden_BLD: torch.Tensor, scale_K: torch.Tensor
) -> dict[str, Callable[[], torch.Tensor]]:
    from train.losses import IGNORE, head_loss, plain_head_loss
    from train.trainer import head_features, projections_of

    targets_KBL = inputs["targets_KBL"]
    valid_BL = targets_KBL[0] != IGNORE

    def plain() -> torch.Tensor:
        everywhere_MD = target.hidden_states(inputs["ids_BL"]).flatten(0, 1)
        projections = projections_of(heads, target)
        return plain_head_loss(head_features(heads, everywhere_MD), targets_KBL.flatten(1), projections, scale_K)[0]

    def ours(hidden: Callable[[], torch.Tensor]) -> torch.Tensor:
        hidden_MD = hidden()[valid_BL]
        return head_loss(
            head_features(heads, hidden_MD), targets_KBL[:, valid_BL], projections_of(heads, target), scale_K
        )[0]

    return {
        "plain": plain,
        "lasd": lambda: ours(lambda: target.hidden_states(inputs["ids_BL"])),
        "lasd_cached": lambda: ours(lambda: hidden_BLD),
    }


def _timed(loss: Callable[[], torch.Tensor], optimizer: Any, device: torch.device) -> tuple[float, int, int]:
    before = _start_peak(device)
    started = time.perf_counter()
    loss().backward()
    optimizer.step()
    optimizer.zero_grad()
    if device.type == "cuda":
        import torch

        torch.cuda.synchronize(device)
    seconds, peak = time.perf_counter() - started, _peak(device)
    return seconds, peak - before, peak


def _start_peak(device: torch.device) -> int:
    """Starts a new peak; returns the bytes in use now."""
    gc.collect()
    if device.type == "cuda":
        import torch

        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device)
    ctypes.CDLL(None).malloc_trim(0)  # memory that an earlier step freed must not hide what this one needs
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _peak(device: torch.device) -> int:
    if device.type == "cuda":
        import torch

        return torch.cuda.max_memory_allocated(device)
    return _status("VmHWM")


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return 0


if __name__ == "__main__":
    entry(main)
