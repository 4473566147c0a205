"""t(rows, context): what a verify pass of this model costs on this device; read wherever a draft is sized.

Legend: B sequences (here 1), N rows of the pass.
"""

import itertools
import random
import statistics
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from typing import Any, TypeVar

import torch

from lasd.decoding.rows import verify_rows
from lasd.decoding.target import TargetModel
from lasd.decoding.tree import DraftTree, TreeShape, batch_trees
from lasd.devices import device_name
from lasd.errors import LasdError

Key = TypeVar("Key", bound=Hashable)
Progress = Callable[[int, int], None]
"""Called with (timed calls so far, timed calls in all)."""

WARM_UP_CALLS = 2


@dataclass(frozen=True)
class StepTimes:
    """Measured times of verify passes, and the times in between.

    Attributes:
        rows: rows of the pass (tree nodes, the root included), ascending.
        contexts: cached tokens before the pass, ascending.
        measured_ms: [contexts][rows]; medians as measured.
        extra_ms: other parts of a step that were timed in the same rounds, for example the drafting heads.
        repeats: timed calls behind each median.
        device, dtype, quantization, threads, model: what was measured; equal for times that can stand in for each
            other.
    """

    rows: tuple[int, ...]
    contexts: tuple[int, ...]
    measured_ms: tuple[tuple[float, ...], ...]
    extra_ms: Mapping[str, float]
    repeats: int
    device: str
    dtype: str
    quantization: str | None
    threads: int
    model: str

    def __post_init__(self) -> None:
        for name, axis in (("rows", self.rows), ("contexts", self.contexts)):
            if not axis or list(axis) != sorted(set(axis)) or axis[0] < 0:
                raise LasdError(f"step times have {name} {list(axis)}; they must ascend, without repeats")
        if len(self.measured_ms) != len(self.contexts) or any(len(line) != len(self.rows) for line in self.measured_ms):
            raise LasdError(
                f"step times are not {len(self.contexts)} contexts x {len(self.rows)} rows; measure them again"
            )
        object.__setattr__(self, "_grid", monotone_grid(self.measured_ms))

    def at(self, rows: int, context: int) -> float:
        """Milliseconds of a pass with `rows` rows behind `context` cached tokens.

        Linear between measured points, after the noise is averaged out so that more rows or more context never cost
        less. Beyond the last point the last slope goes on (its mean over the other axis); below the first one its
        time stands.
        """
        grid: list[list[float]] = getattr(self, "_grid")  # noqa: B009 (set past the frozen dataclass)
        more_rows, more_context = max(0, rows - self.rows[-1]), max(0, context - self.contexts[-1])
        inside = _interpolate(self.contexts, [_interpolate(self.rows, line, rows) for line in grid], context)
        columns = list(zip(*grid, strict=True))
        return inside + more_rows * _last_slope(self.rows, grid) + more_context * _last_slope(self.contexts, columns)

    @property
    def fingerprint(self) -> dict[str, Any]:
        """What the times hold for."""
        return fingerprint_fields(self)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; `from_dict` reads it back."""
        lists = {"rows": list(self.rows), "contexts": list(self.contexts), "extra_ms": dict(self.extra_ms)}
        return {**asdict(self), **lists, "measured_ms": [[round(ms, 4) for ms in line] for line in self.measured_ms]}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "StepTimes":
        """Reads what `to_dict` made; other fields than its own are an error."""
        names = {field.name for field in fields(cls)}
        if set(data) != names:
            odd = sorted(names.symmetric_difference(data))
            raise LasdError(f"stored step times have missing or unknown fields {odd}; measure them again")
        lists = {"rows": tuple(data["rows"]), "contexts": tuple(data["contexts"])}
        return cls(**{**data, **lists, "measured_ms": tuple(tuple(line) for line in data["measured_ms"])})


def fingerprint_fields(of: "StepTimes | Mapping[str, Any]") -> dict[str, Any]:
    """The fields that say what a measurement holds for."""
    get = of.get if isinstance(of, Mapping) else lambda name: getattr(of, name)
    return {name: get(name) for name in ("device", "dtype", "quantization", "threads", "model")}


def describe(target: TargetModel) -> dict[str, Any]:
    """The fingerprint that times measured on `target` now would carry."""
    return {
        "device": device_name(target.device),
        "dtype": str(target.dtype).removeprefix("torch."),
        "quantization": target.quantization,
        "threads": torch.get_num_threads() if target.device.type == "cpu" else 0,
        "model": target.name,
    }


def measure_step_time(
    target: TargetModel,
    rows: Sequence[int],
    contexts: Sequence[int],
    repeats: int = 7,
    *,
    extra: Mapping[str, Callable[[], object]] | None = None,
    progress: Progress | None = None,
) -> StepTimes:
    """Times the target's verify pass, the pick after every row included, for each number of rows and cached tokens.

    The passes take turns, one call of each a round in changing order, so that a slow moment of the machine falls on
    all of them; each figure is the median of its rounds. Only the shapes matter for time, so the cached tokens are
    zeros.

    Args:
        rows: numbers of rows; a pass of n rows is a chain of n nodes.
        contexts: numbers of cached tokens.
        repeats: rounds.
        extra: name -> call that is timed in the same rounds and returned in `extra_ms`.
        progress: told after each timed call.

    Returns:
        The medians in milliseconds.
    """
    rows, contexts = sorted(set(rows)), sorted(set(contexts))
    if not rows or rows[0] < 1 or not contexts or contexts[0] < 0 or repeats < 1:
        raise LasdError(
            f"step times were asked for at {rows} rows, {contexts} cached tokens, {repeats} repeats; "
            "ask for at least 1 row, 0 tokens and 1 repeat"
        )
    if contexts[-1] + rows[-1] > target.max_positions:
        raise LasdError(
            f"{contexts[-1]} cached tokens and {rows[-1]} rows pass the {target.max_positions} positions of "
            f"{target.name}; measure at most {target.max_positions - rows[-1]} cached tokens"
        )
    calls: dict[Hashable, Callable[[], object]] = {
        (context, count): call for context in contexts for count, call in _passes(target, rows, context).items()
    }
    calls.update(extra or {})
    times = interleaved_medians(calls, target.device, repeats, progress)
    measured = tuple(tuple(times[context, count] for count in rows) for context in contexts)
    extra_ms = {name: times[name] for name in extra or {}}
    return StepTimes(tuple(rows), tuple(contexts), measured, extra_ms, repeats, **describe(target))


def interleaved_medians(
    calls: Mapping[Key, Callable[[], object]],
    device: torch.device,
    repeats: int,
    progress: Progress | None = None,
    between: Callable[[], object] | None = None,
) -> dict[Key, float]:
    """Median milliseconds of each call over `repeats` rounds; in each all calls run once, in another order.

    `between` runs after each call, untimed.
    """
    tidy_up = between or (lambda: None)
    for call, _ in itertools.product(calls.values(), range(WARM_UP_CALLS)):
        call()
        tidy_up()
    samples: dict[Key, list[float]] = {key: [] for key in calls}
    order, shuffle = list(calls), random.Random(0).shuffle
    for done in range(repeats):
        shuffle(order)
        for place, key in enumerate(order, start=1):
            with timed_ms(device) as elapsed:
                calls[key]()
            samples[key].append(elapsed[0])
            tidy_up()
            if progress is not None:
                progress(done * len(order) + place, repeats * len(order))
    return {key: statistics.median(taken) for key, taken in samples.items()}


@contextmanager
def timed_ms(device: torch.device) -> Iterator[list[float]]:
    """Times the block; the list holds its milliseconds afterwards. Waits for the device before and after."""
    elapsed: list[float] = []
    synchronize(device)
    start = time.perf_counter()
    yield elapsed
    synchronize(device)
    elapsed.append((time.perf_counter() - start) * 1e3)


def synchronize(device: torch.device) -> None:
    """Waits until the device has done all it was given; a CPU is never behind."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def monotone_grid(measured: Sequence[Sequence[float]]) -> list[list[float]]:
    """The values, averaged where they fall along a line or a column, so that they fall nowhere."""
    grid = [list(line) for line in measured]
    for _ in range(20):
        lines = [monotone(line) for line in grid]
        columns = [monotone(column) for column in zip(*lines, strict=True)]
        settled = [list(line) for line in zip(*columns, strict=True)]
        if settled == grid:
            break
        grid = settled
    raised = [list(itertools.accumulate(line, max)) for line in grid]  # what averaging leaves is rounding
    return [
        list(line)
        for line in zip(*(itertools.accumulate(column, max) for column in zip(*raised, strict=True)), strict=True)
    ]


def monotone(values: Sequence[float]) -> list[float]:
    """The nearest sequence, in least squares, that never falls: neighbours in the wrong order share their mean."""
    pools: list[tuple[float, int]] = []
    for value in values:
        pools.append((value, 1))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (a, n), (b, m) = pools[-2:]
            pools[-2:] = [((a * n + b * m) / (n + m), n + m)]
    return [mean for mean, count in pools for _ in range(count)]


def _interpolate(points: Sequence[int], values: Sequence[float], at: int) -> float:
    """Between the points; the first or last value outside them."""
    if at <= points[0]:
        return values[0]
    right = next((i for i, point in enumerate(points) if point >= at), None)
    if right is None:
        return values[-1]
    share = (at - points[right - 1]) / (points[right] - points[right - 1])
    return values[right - 1] + share * (values[right] - values[right - 1])


def _last_slope(points: Sequence[int], lines: Sequence[Sequence[float]]) -> float:
    """Rise a unit between the last two points, averaged over the lines; 0 with one point."""
    if len(points) < 2:
        return 0.0
    return statistics.fmean(line[-1] - line[-2] for line in lines) / (points[-1] - points[-2])


def _passes(target: TargetModel, rows: Sequence[int], context: int) -> dict[int, Callable[[], object]]:
    """Number of rows -> a verify pass behind `context` cached tokens; it commits nothing, so it can run again."""
    cache = target.new_cache(1, context + rows[-1])
    cache.advance(0, [context])

    def one_pass(count: int) -> Callable[[], object]:
        tree = DraftTree(TreeShape.chain(count - 1), torch.ones(count, dtype=torch.int64, device=target.device))
        step = verify_rows(batch_trees([tree], target.device), [tree], [context])
        return lambda: target.forward(step, cache, "all")[0].max(-1)

    return {count: one_pass(count) for count in rows}
