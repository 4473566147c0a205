"""A step reads from the device once; everything else is launched without waiting."""

import pytest
import torch

from lasd.decoding.decoder import Decoder
from lasd.decoding.sampling import SamplingParams
from lasd.decoding.stats import StepClock
from tests.drafters_under_test import DRAFTERS
from tests.host_reads import host_waits

X = torch.arange(6.0)
WAITS = {
    "item": (lambda: X[0].item(), "reads"),
    "tolist": (lambda: X.tolist(), "reads"),
    "truth": (lambda: bool(X[0] > 0), "reads"),
    "mask": (lambda: X[X > 2], "reads"),
    "mask_write": (lambda: X.clone().__setitem__(X > 2, 0.0), "reads"),
    "nonzero": (lambda: torch.where(X > 2), "reads"),
    "numpy": (lambda: X.numpy(), "reads"),
    "upload": (lambda: torch.tensor([1, 2], device="cpu"), "copies"),
    "list_index": (lambda: X[[0, 2]], "copies"),
    "list_write": (lambda: X.clone().__setitem__([0, 2], 0.0), "copies"),
}


@pytest.mark.parametrize("name", WAITS)
def test_what_waits_is_seen(name):
    call, kind = WAITS[name]
    with host_waits() as waits:
        call()
    assert len(getattr(waits, kind)) == 1, waits


def test_what_does_not_wait_is_not():
    index = torch.tensor([0, 2])
    with host_waits() as waits:
        X[index].masked_fill(X[index] > 1, 0.0).topk(1)
        X.clone()[1:3] = 5.0
    assert (waits.reads, waits.copies) == ([], [])


PROMPTS = [[5, 9, 33, 4, 17, 8, 21], [40], [12, 50, 3, 3, 29, 7]]
PARAMS = {
    "greedy": SamplingParams(max_new_tokens=24, eos_token_ids=()),
    "sampled": SamplingParams(max_new_tokens=24, eos_token_ids=(), temperature=0.9, top_k=20, top_p=0.95),
    "min_new_tokens": SamplingParams(max_new_tokens=24, eos_token_ids=(2, 3), min_new_tokens=20),
    "typical": SamplingParams(max_new_tokens=24, eos_token_ids=(), temperature=0.9, typical=(0.3, 0.1)),
}


@pytest.fixture(scope="module")
def answers(llama):
    plain = Decoder(llama, max_slots=3).generate(PROMPTS, PARAMS["greedy"])
    return {tuple(prompt): result.tokens for prompt, result in zip(PROMPTS, plain, strict=True)}


@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize("params", PARAMS)
@pytest.mark.parametrize("name", ["plain", *DRAFTERS])
def test_a_step_reads_once_and_never_waits_to_upload(llama, answers, name, params, slots):
    drafter = None if name == "plain" else DRAFTERS[name](llama, answers)
    decoder = Decoder(llama, drafter, max_slots=slots)
    decoder.admit(PROMPTS[:slots], PARAMS[params])
    steps = 0
    while decoder.live_slots:
        with host_waits() as waits:
            decoder.step()
        assert waits.reads == ["tolist"]
        assert waits.copies == []
        steps += 1
    assert steps >= 3


class Event:
    """A CUDA event on a device that does nothing until the host waits for it."""

    done = -1
    count = 0

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self, stream):
        assert stream == "stream of cuda:1"
        self.place, Event.count = Event.count, Event.count + 1

    def elapsed_time(self, other):
        if max(self.place, other.place) > Event.done:
            raise RuntimeError("device not ready")
        return 2.0


def test_the_clock_of_a_gpu_asks_only_for_what_is_done(llama, answers, monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")
    read = torch.Tensor.tolist

    def waits(tensor):
        Event.done = Event.count - 1
        return read(tensor)

    monkeypatch.setattr(torch.Tensor, "tolist", waits)
    decoder = Decoder(llama, DRAFTERS["medusa"](llama, answers), max_slots=3)
    decoder._clock = StepClock(torch.device("cuda:1"))
    for result in decoder.generate(PROMPTS, PARAMS["greedy"]):
        assert result.stats.verify_s > 0


def test_the_parts_of_a_step_add_up_to_its_wall_time(monkeypatch):
    times = iter([10.0, 10.0, 11.0, 13.0, 17.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(times))
    clock = StepClock(torch.device("cpu"))
    clock.restart()
    clock.mark()
    clock.mark()
    assert clock.spans() == [1.0, 2.0, 4.0]
