"""Real processes: killed and started again, two ranks, and the check that learns one answer by heart."""

import os
import signal
import subprocess
import sys
import time

import pytest
import torch

from lasd.artifacts import load_artifact
from tests.train.tiny_runs import repository

pytestmark = pytest.mark.slow

LAUNCHERS = {
    "python": [sys.executable],
    "accelerate": [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "1"],
    "two ranks": [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"],
}


def command(launcher, model_dir, distilled_dir, output, **changes):
    settings = {
        "model": model_dir,
        "data": distilled_dir,
        "output": output,
        "device": "cpu",
        "dtype": "fp32",
        "num_heads": 3,
        "positions_per_batch": 96,
        "held_out_share": 0.2,
        "warmup": 2,
        "learning_rate": 1e-2,
        "logging_steps": 10,
        "eval_prompts": 0,
        "heads_dtype": "fp32",
        **changes,
    }
    flags = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    return [*LAUNCHERS[launcher], "train/medusa.py", *flags]


def start(words):
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    return subprocess.Popen(
        words, cwd=repository(), env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def finish(words):
    process = start(words)
    output, _ = process.communicate(timeout=500)
    assert process.returncode == 0, output
    return output


def test_a_killed_run_ends_with_the_same_bits(model_dir, distilled_dir, tmp_path):
    settings = {"epochs": 60, "save_steps": 40, "eval_steps": 1000}
    killed = command("python", model_dir, distilled_dir, tmp_path / "killed", **settings)
    process = start(killed)
    first = tmp_path / "killed" / "checkpoints" / "checkpoint-40" / "complete.json"
    deadline = time.monotonic() + 400
    while not first.exists() and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert first.exists()
    assert not (tmp_path / "killed" / "lasd.json").exists(), "the run ended before it was killed"

    assert "start: resumed from" in finish(killed)
    finish(command("accelerate", model_dir, distilled_dir, tmp_path / "whole", **settings))
    assert_close(tmp_path / "killed", tmp_path / "whole", rtol=0, atol=0)


def test_two_ranks_end_where_one_does(model_dir, distilled_dir, tmp_path):
    for launcher, output in (("python", "one"), ("two ranks", "two")):
        finish(command(launcher, model_dir, distilled_dir, tmp_path / output, epochs=2))
    assert_close(tmp_path / "one", tmp_path / "two", rtol=1e-3, atol=1e-4)


def test_two_ranks_fill_one_cache_of_hidden_states(model_dir, distilled_dir, tmp_path):
    for launcher, output in (("python", "one"), ("two ranks", "two")):
        settings = {"epochs": 1, "cache_hidden_states": "true"}
        finish(command(launcher, model_dir, distilled_dir, tmp_path / output, **settings))
    assert_close(tmp_path / "one", tmp_path / "two", rtol=1e-3, atol=1e-4)


def assert_close(first, second, **tolerance):
    expected, found = (load_artifact(path).tensors() for path in (first, second))
    assert max(tensor.abs().max() for tensor in expected.values()) > 1e-2
    torch.testing.assert_close(found, expected, **tolerance)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_heads_learn_one_answer_by_heart(model_dir, distilled_dir, tmp_path, dtype):
    words = command("python", model_dir, distilled_dir, tmp_path / "out", overfit_one_batch="true", dtype=dtype)
    assert "overfit check passed" in finish(words)
    assert not (tmp_path / "out" / "lasd.json").exists()
