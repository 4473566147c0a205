"""What decoding cost and kept: statistics that come with every result."""

import time
from dataclasses import dataclass, field, fields
from typing import Any

import torch


@dataclass
class DecodeStats:
    """Statistics of one answer, or of several merged.

    `tokens_per_step` counts what verify steps kept, over verify steps; the token that prefill yields is not counted.
    """

    steps: int = 0
    """Verify steps."""
    tokens: int = 0
    """Tokens of the answer, the one that prefill yields included."""
    answers: int = 0
    nodes: int = 0
    """Tree nodes verified, roots included."""
    scratch_rows: int = 0
    prefill_s: float = 0.0
    draft_s: float = 0.0
    verify_s: float = 0.0
    overhead_s: float = 0.0
    """Decoding time outside drafting and verification."""
    accepted_per_step: list[int] = field(default_factory=list)
    """Tokens that each step kept, less one: drafted tokens kept, except where an answer ends within them."""

    @property
    def tokens_per_step(self) -> float:
        """Tokens kept by verify steps, over verify steps; 0 without a step."""
        return (self.tokens - self.answers) / self.steps if self.steps else 0.0

    @property
    def accept_at_pos(self) -> list[float]:
        """For i = 1, 2, ...: the share of steps that kept at least i drafted tokens."""
        longest = max(self.accepted_per_step, default=0)
        return [sum(n >= i for n in self.accepted_per_step) / self.steps for i in range(1, longest + 1)]

    @property
    def draft_acceptance(self) -> float:
        """Drafted tokens kept, over drafted nodes verified; 0 when nothing was drafted."""
        drafted = self.nodes - self.steps
        return sum(self.accepted_per_step) / drafted if drafted else 0.0

    @property
    def decode_s(self) -> float:
        """Seconds without prefill."""
        return self.draft_s + self.verify_s + self.overhead_s

    @property
    def total_s(self) -> float:
        """Seconds with prefill."""
        return self.prefill_s + self.decode_s

    @classmethod
    def merge(cls, parts: "list[DecodeStats]") -> "DecodeStats":
        """The sum of several answers' statistics."""
        total = cls()
        for part in parts:
            for entry in fields(cls):
                setattr(total, entry.name, getattr(total, entry.name) + getattr(part, entry.name))
        return total

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers for JSON, derived ones included; the list of steps as a histogram."""
        record = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "accepted_per_step"}
        histogram: dict[str, int] = {}
        for accepted in sorted(self.accepted_per_step):
            histogram[str(accepted)] = histogram.get(str(accepted), 0) + 1
        return record | {
            "tokens_per_step": self.tokens_per_step,
            "accept_at_pos": self.accept_at_pos,
            "draft_acceptance": self.draft_acceptance,
            "accepted_histogram": histogram,
        }


class StepClock:
    """Times the parts of a step without a synchronisation of its own: CUDA events on a GPU, the wall clock on a CPU.

    `mark` is called at each boundary, before the step's results are read; `spans` afterwards: a GPU has then passed all
    marks. (One that is set after the read may still be ahead of it, and CUDA refuses to give its time.)
    """

    def __init__(self, device: torch.device):
        self._device, self._cuda = device, device.type == "cuda"
        self._marks: list[Any] = []
        self._start = 0.0

    def restart(self) -> None:
        """Forgets the marks and sets the first."""
        self._marks.clear()
        self._start = time.perf_counter()
        self.mark()

    def mark(self) -> None:
        """A boundary between two parts."""
        if self._cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record(torch.cuda.current_stream(self._device))
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())

    def spans(self) -> list[float]:
        """Seconds between the marks, then the rest of the wall-clock time from `restart` to now."""
        pairs = zip(self._marks, self._marks[1:], strict=False)
        if self._cuda:
            parts = [first.elapsed_time(second) / 1000 for first, second in pairs]
        else:
            parts = [second - first for first, second in pairs]
        return [*parts, max(0.0, time.perf_counter() - self._start - sum(parts))]
