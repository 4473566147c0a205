"""The metrics, one name and one formula each, from the raw runs of every method on every group of prompts.

A *unit* is what was timed at once: one prompt, or one batch of prompts. Ratios are ratios of totals over units, and
their 95% intervals come from a paired bootstrap: units are drawn with replacement, the same draw for both sides.

    tokens_per_s         tokens / seconds, prefill included, tokenisation excluded
    tokens_per_step      tokens kept by verify steps / verify steps (the token that prefill yields is not counted)
    accept_at_pos[i-1]   share of verify steps that accepted at least i draft tokens
    cond_accept_at_pos   the same among the steps that accepted at least i - 1
    draft_acceptance     accepted draft tokens / drafted nodes verified (nodes without the roots)
    nodes_per_step       rows of the target's forward pass a step, the root included
    speedup_vs_generate  tokens_per_s / tokens_per_s of transformers' generate
    speedup_e2e          tokens_per_s / tokens_per_s of plain decoding in our own loop
    speedup_decode       the same without prefill: tokens kept by steps / seconds of the steps, against plain
    speedup_specbench    Spec-Bench's: mean over units of tokens_per_s / the same mean of generate

Legend: R resamples (row 0 is the sample itself), U units.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
REFERENCE = "generate"
PLAIN = "plain"
RESAMPLES = 2000


@dataclass(frozen=True)
class Divergence:
    """Where an answer first leaves the reference; `top_two_gap` is the gap of the two largest logits there."""

    prompt: str
    position: int
    reference_token: int | None
    token: int | None
    top_two_gap: float


@dataclass
class Run:
    """What one method did on one unit; times in seconds, token ids cut behind the first end-of-text token."""

    tokens: list[list[int]]
    seconds: float
    steps: int
    accepted_per_step: list[int] = field(default_factory=list)
    nodes: int = 0
    prefill_s: float = 0.0
    draft_s: float = 0.0
    verify_s: float = 0.0
    overhead_s: float = 0.0
    identical: list[bool] = field(default_factory=list)
    divergences: list[Divergence] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """All new tokens of the unit."""
        return sum(map(len, self.tokens))

    @property
    def kept(self) -> int:
        """Tokens that verify steps yielded: all but the first of each answer, which prefill yields."""
        return sum(max(len(answer) - 1, 0) for answer in self.tokens)

    @property
    def decode_s(self) -> float:
        """Seconds of the steps, prefill left out."""
        return self.draft_s + self.verify_s + self.overhead_s

    def to_dict(self) -> dict[str, Any]:
        """A JSON-able dict."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Run":
        """The inverse of `to_dict`."""
        return cls(**{**data, "divergences": [Divergence(**item) for item in data["divergences"]]})


class Series:
    """The per-unit columns of one method, resampled: each property is [R], row 0 the sample itself."""

    def __init__(self, runs: Sequence[Run], weights_RU: Floats) -> None:
        self.runs = runs
        self.weights_RU = weights_RU

    def total(self, value: Callable[[Run], float]) -> Floats:
        """Resampled totals [R] of `value` over the units."""
        return self.weights_RU @ np.array([value(run) for run in self.runs], dtype=np.float64)

    @cached_property
    def tokens_per_s(self) -> Floats:
        """New tokens over seconds, prefill included."""
        return _divide(self.total(lambda run: run.num_tokens), self.total(lambda run: run.seconds))

    @cached_property
    def tokens_per_step(self) -> Floats:
        """Tokens kept by verify steps over verify steps."""
        return _divide(self.total(lambda run: run.kept), self.total(lambda run: run.steps))

    @cached_property
    def decode_tokens_per_s(self) -> Floats:
        """Tokens kept by verify steps over the seconds of the steps."""
        return _divide(self.total(lambda run: run.kept), self.total(lambda run: run.decode_s))

    @cached_property
    def mean_tokens_per_s(self) -> Floats:
        """The mean over units of each unit's own speed, as Spec-Bench takes it."""
        speed = self.total(lambda run: run.num_tokens / run.seconds if run.seconds else 0.0)
        return _divide(speed, self.weights_RU.sum(axis=1))


def summarise(
    runs: Mapping[str, Sequence[Run]], *, seed: int = 0, resamples: int = RESAMPLES
) -> dict[str, dict[str, Any]]:
    """All metrics of every method over the same units; a ratio whose divisor is zero or missing is None.

    Args:
        runs: method name -> its runs, aligned: entry i of each list is the same unit.
        seed: of the bootstrap.
        resamples: bootstrap draws.
    """
    lengths = {name: len(items) for name, items in runs.items()}
    assert len(set(lengths.values())) == 1, f"methods ran different numbers of units: {lengths}"
    num_units = next(iter(lengths.values()))
    weights_RU = bootstrap_weights(num_units, resamples, seed)
    series = {name: Series(items, weights_RU) for name, items in runs.items()}
    return {name: _summary(one, series.get(REFERENCE), series.get(PLAIN)) for name, one in series.items()}


def bootstrap_weights(num_units: int, resamples: int, seed: int) -> Floats:
    """How often each unit is drawn, [R, U]; row 0 draws each unit once, the others draw U with replacement."""
    generator = np.random.default_rng(seed)
    drawn = generator.multinomial(num_units, np.full(num_units, 1 / num_units), size=resamples)
    return np.concatenate([np.ones((1, num_units)), drawn]).astype(np.float64)


def _summary(one: Series, generate: Series | None, plain: Series | None) -> dict[str, Any]:
    ratios: dict[str, Floats | None] = {
        "tokens_per_s": one.tokens_per_s,
        "tokens_per_step": one.tokens_per_step,
        "speedup_vs_generate": _against(one, generate, lambda series: series.tokens_per_s),
        "speedup_e2e": _against(one, plain, lambda series: series.tokens_per_s),
        "speedup_decode": _against(one, plain, lambda series: series.decode_tokens_per_s),
        "speedup_specbench": _against(one, generate, lambda series: series.mean_tokens_per_s),
    }
    counts = _acceptance(one.runs)
    identical = [same for run in one.runs for same in run.identical]
    return {
        "prompts": sum(len(run.tokens) for run in one.runs),
        "tokens": sum(run.num_tokens for run in one.runs),
        "steps": sum(run.steps for run in one.runs),
        "seconds": sum(run.seconds for run in one.runs),
        **{name: _point(values) for name, values in ratios.items()},
        **counts,
        "share_identical": sum(identical) / len(identical) if identical else None,
        "first_divergences": [asdict(item) for run in one.runs for item in run.divergences],
        "interval95": {name: _interval(values) for name, values in ratios.items()},
        "time": time_split(one.runs),
        "aliases": {
            "vllm_acceptance_length": _point(one.tokens_per_step),
            "vllm_acceptance_rate_per_pos": counts["accept_at_pos"],
            "specbench_mean_accepted_tokens": _point(one.tokens_per_step),
        },
    }


def _acceptance(runs: Sequence[Run]) -> dict[str, Any]:
    """Acceptance by position and in total, pooled over all verify steps."""
    accepted = [count for run in runs for count in run.accepted_per_step]
    steps, nodes = sum(run.steps for run in runs), sum(run.nodes for run in runs)
    at_least = [sum(count >= depth for count in accepted) for depth in range(1, max(accepted, default=0) + 1)]
    return {
        "accept_at_pos": [reached / steps for reached in at_least],
        "cond_accept_at_pos": [reached / before for reached, before in zip(at_least, [steps, *at_least], strict=False)],
        "draft_acceptance": sum(accepted) / (nodes - steps) if nodes > steps else None,
        "nodes_per_step": nodes / steps if steps else None,
        "accepted_histogram": {str(count): times for count, times in sorted(Counter(accepted).items())},
    }


def time_split(runs: Sequence[Run]) -> dict[str, float]:
    """Seconds and shares of the parts of decoding; `outside` is time that the decoder itself did not count."""
    total = sum(run.seconds for run in runs)
    parts = {
        name: sum(getattr(run, f"{name}_s") for run in runs) for name in ("prefill", "draft", "verify", "overhead")
    }
    parts["outside"] = total - sum(parts.values())
    seconds = {f"{name}_s": value for name, value in parts.items()}
    return seconds | {f"{name}_share": value / total if total else 0.0 for name, value in parts.items()}


def first_difference(reference: Sequence[int], tokens: Sequence[int]) -> int | None:
    """The first position at which two answers differ, a missing token counting as different; None if they are equal."""
    for position, (expected, got) in enumerate(zip(reference, tokens, strict=False)):
        if expected != got:
            return position
    return None if len(reference) == len(tokens) else min(len(reference), len(tokens))


def cut_at_eos(tokens: Sequence[int], eos_token_ids: Sequence[int]) -> list[int]:
    """`tokens` up to and including the first end-of-text token."""
    end = next((position for position, token in enumerate(tokens) if token in eos_token_ids), len(tokens))
    return list(tokens[: end + 1])


def _divide(numerator: Floats, denominator: Floats) -> Floats:
    """Elementwise ratio, NaN where the denominator is zero."""
    return np.divide(numerator, denominator, out=np.full_like(numerator, np.nan), where=denominator != 0)


def _against(one: Series, base: Series | None, speed: Callable[[Series], Floats]) -> Floats | None:
    """The resampled ratio [R] of two speeds, or None where the base did not run."""
    return None if base is None else _divide(speed(one), speed(base))


def _point(values: Floats | None) -> float | None:
    return None if values is None or np.isnan(values[0]) else float(values[0])


def _interval(values: Floats | None) -> list[float] | None:
    """The 95% percentile interval over the resamples, or None."""
    if values is None or np.isnan(values[0]) or len(values) == 1:
        return None
    return [float(bound) for bound in np.nanpercentile(values[1:], [2.5, 97.5])]
