"""How something was made: command, seed, data, versions, commit, device and date, as plain JSON values."""

import importlib.metadata
import platform
import re
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import lasd
from lasd.devices import device_name

if TYPE_CHECKING:
    from lasd.decoding.target import TargetModel

PACKAGES = (
    "torch",
    "transformers",
    "tokenizers",
    "safetensors",
    "numpy",
    "accelerate",
    "datasets",
    "trl",
    "peft",
    "optuna",
)


def provenance(command: Sequence[str], seed: int, data_fingerprint: str | None, **extra: Any) -> dict[str, Any]:
    """Returns the record that goes into a manifest.

    Args:
        command: the command line as a list of words; a full path to an interpreter or script is cut to its name.
        seed: the seed of the run.
        data_fingerprint: fingerprint of the data that went in, None if there was none.
        **extra: anything else worth keeping (`license="apache-2.0"`, `hardware=...`); plain JSON values.
    """
    words = [Path(word).name if Path(word).is_absolute() and index < 2 else word for index, word in enumerate(command)]
    return {
        "command": words,
        "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "seed": seed,
        "data_fingerprint": data_fingerprint,
        "versions": _versions(),
        "commit": _commit(Path(lasd.__file__).resolve().parents[1]),
        "device": device_description(),
        **extra,
    }


def _versions() -> dict[str, str]:
    versions = {"lasd": lasd.__version__, "python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def _commit(root: Path) -> str | None:
    """Returns the commit of the checkout at `root` (`+changes` if files differ from it), None where there is none."""
    if not (root / ".git").exists():
        return None

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=10, check=True
            )
        except (OSError, subprocess.SubprocessError):
            return None
        return done.stdout.strip()

    commit = git("rev-parse", "HEAD")
    return f"{commit}+changes" if commit and git("status", "--porcelain", "--untracked-files=no") else commit


def device_description(device: torch.device | None = None) -> str:
    """Returns one line about a device (default: the first GPU, else the processor): name and threads or memory."""
    if device is None:
        device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        return f"{device_name(device)}, {torch.cuda.get_device_properties(device).total_memory / 2**30:.0f} GiB"
    return f"{device_name(device)}, {torch.get_num_threads()} threads"


def profile_key(target: "TargetModel") -> str:
    """Returns `<device>-<dtype>-<quantization>` of a loaded target: the name of its profile in an artifact.

    The device is `cpu-<processor>` or the GPU's name, in lower case with dashes, as in `cpu-intel-xeon-bfloat16-none`.
    """
    name = device_name(target.device)
    if target.device.type == "cpu":
        name = f"cpu {name}"
    slug = re.sub(r"\((r|tm)\)", "", name.lower())
    slug = re.sub(r"[^a-z0-9]+", "-", slug).strip("-")
    return f"{slug}-{str(target.dtype).removeprefix('torch.')}-{target.quantization or 'none'}"
