"""Step times: monotone, interpolated, stored, and measured through the target's own forward pass."""

import itertools
from types import SimpleNamespace

import pytest
import torch

from lasd.decoding.step_time import StepTimes, interleaved_medians, measure_step_time, monotone, monotone_grid
from lasd.errors import LasdError

WHERE = {"device": "test", "dtype": "float32", "quantization": None, "threads": 1, "model": "tiny"}


def step_times(measured, rows=(1, 8, 16), contexts=(256, 2048)):
    return StepTimes(rows, contexts, tuple(map(tuple, measured)), {"heads": 1.5}, 7, **WHERE)


STEADY = step_times([[10.0, 17.0, 25.0], [20.0, 27.0, 35.0]])


@pytest.mark.parametrize(("rows", "context", "ms"), [(1, 256, 10), (16, 2048, 35), (12, 256, 21), (8, 1152, 22)])
def test_measured_points_stand_and_the_line_runs_between(rows, context, ms):
    assert STEADY.at(rows, context) == pytest.approx(ms)


def test_the_last_slope_goes_on():
    assert STEADY.at(24, 256) == pytest.approx(33)
    assert STEADY.at(16, 3840) == pytest.approx(45)


def test_below_the_first_point_its_time_stands():
    assert STEADY.at(1, 0) == 10


def test_one_measured_point_is_enough():
    assert step_times([[10.0]], rows=(4,), contexts=(64,)).at(9, 512) == 10


def test_more_rows_never_cost_less():
    times = step_times([[12.0, 11.0, 25.0], [11.5, 27.0, 26.0]])
    for context in (0, 256, 1000, 2048, 5000):
        line = [times.at(rows, context) for rows in range(1, 40)]
        assert line == sorted(line)
    for rows in (1, 8, 12):
        column = [times.at(rows, context) for context in range(0, 4000, 100)]
        assert column == sorted(column)


def test_neighbours_in_the_wrong_order_share_their_mean():
    assert monotone([1, 4, 2, 3, 9]) == [1, 3, 3, 3, 9]


def test_a_grid_is_monotone_both_ways():
    grid = monotone_grid([[5, 1, 7], [2, 6, 3], [9, 0, 8]])
    lines = [*grid, *zip(*grid, strict=True)]
    assert all(a <= b for line in lines for a, b in itertools.pairwise(line))


def test_times_survive_json_form():
    again = StepTimes.from_dict(STEADY.to_dict())
    assert again == STEADY
    assert again.at(12, 256) == STEADY.at(12, 256)


def test_unknown_stored_fields_are_refused():
    with pytest.raises(LasdError, match="watts"):
        StepTimes.from_dict({**STEADY.to_dict(), "watts": 3})


def test_a_ragged_table_is_refused():
    with pytest.raises(LasdError, match="2 contexts x 3 rows"):
        step_times([[1.0, 2.0, 3.0], [1.0, 2.0]])


def test_calls_take_turns():
    log = []
    calls = {name: lambda name=name: log.append(name) for name in "abc"}
    interleaved_medians(calls, torch.device("cpu"), repeats=4)
    rounds = [log[i : i + 3] for i in range(len(log) - 12, len(log), 3)]
    assert all(sorted(one) == ["a", "b", "c"] for one in rounds)
    assert len(set(map(tuple, rounds))) > 1


def test_progress_reaches_its_end():
    seen = []
    interleaved_medians(
        {"a": int, "b": int}, torch.device("cpu"), repeats=3, progress=lambda done, total: seen.append((done, total))
    )
    assert seen == [(n, 6) for n in range(1, 7)]


class FakeTarget:
    """Stands in for a model: notes what each pass was asked for."""

    device, dtype, quantization, name, max_positions = torch.device("cpu"), torch.float32, None, "fake", 64

    def __init__(self):
        self.passes = []

    def new_cache(self, rows, capacity):
        return SimpleNamespace(rows=rows, capacity=capacity, length=0, advance=lambda first, counts: None)

    def forward(self, rows, cache, need_logits):
        self.passes.append((rows.tokens_BN.shape[1], int(rows.positions_BN[0, 0]), cache.capacity, need_logits))
        return torch.zeros(1, rows.tokens_BN.shape[1], 5), None


def test_each_size_is_passed_at_each_context_with_all_logits():
    target = FakeTarget()
    times = measure_step_time(target, [4, 1], [16, 0], repeats=1)
    assert {(n, at, logits) for n, at, _, logits in target.passes} == {(n, at, "all") for n in (1, 4) for at in (0, 16)}
    assert (times.rows, times.contexts) == ((1, 4), (0, 16))


def test_other_parts_are_timed_in_the_same_rounds():
    runs = []
    times = measure_step_time(FakeTarget(), [1], [0], repeats=3, extra={"heads": lambda: runs.append(1)})
    assert len(runs) >= 3
    assert set(times.extra_ms) == {"heads"}


def test_more_context_than_the_model_has_is_one_line():
    with pytest.raises(LasdError, match="pass the 64 positions of fake; measure at most 56 cached tokens"):
        measure_step_time(FakeTarget(), [1, 8], [60], repeats=1)


def test_the_fingerprint_names_device_and_dtype():
    fingerprint = measure_step_time(FakeTarget(), [1], [0], repeats=1).fingerprint
    assert fingerprint["dtype"] == "float32"
    assert fingerprint["quantization"] is None
    assert fingerprint["device"]
