"""What a measurement ran on and with: the part of a result that lets another person repeat it."""

import hashlib
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from lasd.artifacts.provenance import device_description
from lasd.decoding.target import TargetModel


def environment(target: TargetModel) -> dict[str, Any]:
    """Device, dtype, threads and code of this process; equal dicts mean comparable times."""
    return {
        "device": device_description(target.device),
        "dtype": str(target.dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "generate_attention": str(target.config._attn_implementation),
        "code_sha256": code_sha256(),
    }


@lru_cache(maxsize=1)
def code_sha256() -> str:
    """The sha256 of this package's Python files: rows of two versions of the code are never mixed."""
    return folder_sha256(Path(__file__).resolve().parents[1], suffix=".py")


def folder_sha256(folder: Path, suffix: str = "") -> str:
    """The sha256 over names and contents of a folder's files that end in `suffix`; README.md is left out."""
    digest = hashlib.sha256()
    for file in sorted(folder.rglob(f"*{suffix}")):
        if file.is_file() and file.name != "README.md":
            digest.update(f"{file.relative_to(folder)} {file_sha256(file)}\n".encode())
    return digest.hexdigest()


def file_sha256(path: str | Path) -> str:
    """The sha256 of a file's bytes."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
