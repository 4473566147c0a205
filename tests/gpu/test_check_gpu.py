"""The GPU script's own logic, on a CPU with tiny models."""

import json
from types import SimpleNamespace

import pytest
import torch

from lasd.decoding.decoder import Decoder
from lasd.errors import LasdError
from tests.gpu import check_gpu, checks, waits
from tests.gpu.checks import CHECKS, TINY, Bench, Outcome


@pytest.fixture
def bench() -> Bench:
    return Bench(torch.device("cpu"), TINY)


def test_the_script_runs_every_check_and_writes_what_it_found(tmp_path, capsys):
    check_gpu.main(["--device", "cpu", "--tiny", "--output", str(tmp_path / "gpu.json")])
    result = json.loads((tmp_path / "gpu.json").read_text())
    assert list(result["checks"]) == list(CHECKS)
    assert result["passed"]
    assert result["checks"]["host waits, bf16"]["data"]["medusa, B = 3"]["what"] == ["tolist"]
    assert min(result["checks"]["exactness, fp32"]["data"]["distinct_tokens"]) > 2
    assert "all checks passed" in capsys.readouterr().out


def test_an_answer_that_differs_fails(bench, monkeypatch):
    own = checks.own_answer

    def shifted(model, prompt, count, device):
        answer = own(model, prompt, count, device)
        return [*answer[:-1], (answer[-1] + 1) % 97]

    monkeypatch.setattr(checks, "own_answer", shifted)
    assert checks.exactness(bench).passed is False
    assert checks.split_over_devices(bench).passed is False


def test_a_near_tie_is_told_from_a_wrong_token(bench):
    target, prompt = bench.target(torch.float32), bench.prompt(5)
    own = checks.own_answer(target.model, prompt, 4, bench.device)
    answers = {tuple(prompt): own}
    assert checks.parting_gap(target, prompt, answers, own) is None
    assert checks.parting_gap(target, prompt, answers, [*own[:2], own[2] + 1, own[3]]) > checks.ROUNDING_GAP
    assert checks.parting_gap(target, prompt, answers, own[:2]) == float("inf")


def test_a_second_read_in_a_step_fails(bench, monkeypatch):
    step = Decoder.step

    def with_a_read(self):
        float(torch.zeros(1).sum())
        return step(self)

    monkeypatch.setattr(Decoder, "step", with_a_read)
    assert checks.host_waits(bench).passed is False


def event(name, start, end=0.0, device="CPU"):
    return SimpleNamespace(
        name=name, time_range=SimpleNamespace(start=start, end=end), device_type=SimpleNamespace(name=device)
    )


def test_profiled_waits_are_counted_within_steps():
    events = [
        event("cudaDeviceSynchronize", 1),  # the profiler's own
        event(waits.STEP, 10, 20),
        event(waits.STEP, 10, 40, "CUDA"),
        event("cudaStreamSynchronize", 15),
        event("Memcpy DtoH (Device -> Pageable)", 16, device="CUDA"),
        event(waits.STEP, 30, 40),
        event("cudaStreamSynchronize", 32),
        event("cudaStreamSynchronize", 39),
        event("Memcpy DtoH (Device -> Pageable)", 41, device="CUDA"),
        event("Memcpy HtoD (Pageable -> Device)", 31, device="CUDA"),
        event("cudaLaunchKernel", 12),
        event("cudaDeviceSynchronize", 50),
    ]
    assert waits.count_waits(events) == {
        "waits_per_step": 2,
        "reads_per_step": 1,
        "pageable_uploads_per_step": 0.5,
        "launches_per_step": 0.5,
    }


def test_a_check_that_breaks_fails_and_the_others_run(bench, monkeypatch, capsys):
    def broken(bench):
        raise RuntimeError("device lost")

    monkeypatch.setattr(check_gpu, "CHECKS", {"first": broken, "second": lambda bench: Outcome("fine", True)})
    result = check_gpu.run(bench)
    assert [one["status"] for one in result["checks"].values()] == ["FAIL", "pass"]
    assert not result["passed"]
    assert "RuntimeError: device lost" in capsys.readouterr().out


def test_a_failed_check_ends_the_script_with_1(monkeypatch):
    monkeypatch.setattr(check_gpu, "CHECKS", {"first": lambda bench: Outcome("wrong", False)})
    with pytest.raises(SystemExit, match="1"):
        check_gpu.main(["--device", "cpu", "--tiny"])


def test_no_check_starts_after_the_limit(bench, monkeypatch):
    monkeypatch.setattr(check_gpu, "CHECKS", {"late": lambda bench: Outcome("fine", True)})
    assert check_gpu.run(bench, limit_s=-1)["checks"]["late"]["status"] == "FAIL"


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_without_a_gpu_one_line_says_what_to_do():
    with pytest.raises(LasdError, match="torch sees no CUDA GPU here; on a CPU run"):
        check_gpu.main([])
