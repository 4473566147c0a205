"""Checks the engine on a GPU in a few minutes: `make check-gpu`, or `python tests/gpu/check_gpu.py`.

It needs torch, transformers and this checkout, no network and no downloads: the models are random. With
`--device cpu --tiny` its logic runs anywhere in seconds (the times then mean nothing). Prints a table, writes JSON, and
exits with 1 if a check failed.
"""

import argparse
import json
import platform
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import torch
import transformers

from lasd.artifacts.provenance import device_description
from lasd.errors import LasdError, entry
from lasd.evaluation.journal import write_text_atomic
from tests.gpu.checks import CHECKS, FULL, TINY, Bench, Outcome

LIMIT_S = 420.0
"""No check starts later than this, so that the script ends within 8 minutes."""


def run(bench: Bench, limit_s: float = LIMIT_S) -> dict[str, Any]:
    """Runs all checks, one failing or not, and tells each as it ends."""
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    start, checks = time.perf_counter(), {}
    for name, check in CHECKS.items():
        begun = time.perf_counter()
        if begun - start > limit_s:
            outcome = Outcome(f"not run: {limit_s:.0f} s were over", False)
        else:
            outcome = _guarded(check, bench)
        seconds = time.perf_counter() - begun
        status = {True: "pass", False: "FAIL", None: "-"}[outcome.passed]
        print(f"{status:<5}{name:<30}{seconds:6.1f} s  " + outcome.summary.replace("\n", "\n" + " " * 45), flush=True)
        checks[name] = {"status": status, "seconds": seconds, "summary": outcome.summary, "data": outcome.data}
    return {
        "passed": all(one["status"] != "FAIL" for one in checks.values()),
        "seconds": time.perf_counter() - start,
        "environment": environment(bench.device),
        "tf32": False,
        "model": bench.sizes.model,
        "checks": checks,
    }


def environment(device: torch.device) -> dict[str, str]:
    """Where it ran and with which versions."""
    versions = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    return {"device": device_description(device), "cuda": str(torch.version.cuda), **versions}


def _guarded(check: Any, bench: Bench) -> Outcome:
    """A check that breaks must not keep the others from running."""
    try:
        return check(bench)
    except Exception as error:
        traceback.print_exc()
        return Outcome(f"{type(error).__name__}: {' '.join(str(error).split())[:200]}", False)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cuda", help="cuda, cuda:1, or cpu (with --tiny)")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes: the script's own test")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="FILE.json")
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise LasdError("torch sees no CUDA GPU here; on a CPU run `check_gpu.py --device cpu --tiny`")
    result = run(Bench(device, TINY if options.tiny else FULL, options.seed))
    verdict = "all checks passed" if result["passed"] else "a check FAILED"
    print(f"{verdict} in {result['seconds']:.0f} s on {result['environment']}")
    if options.output is not None:
        write_text_atomic(options.output, json.dumps(result, indent=1) + "\n")
    if not result["passed"]:
        raise SystemExit(1)


if __name__ == "__main__":
    entry(main)
