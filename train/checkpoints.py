"""The folder of a training run: which run it belongs to, which checkpoint can be trusted, and the log of metrics.

```
<output>/run.json           resolved configuration and data fingerprint: the run that the folder belongs to
<output>/metrics.jsonl      one JSON object a logged step
<output>/checkpoints/       mid-run checkpoints: heads, optimizer, scheduler, random states
<output>/hidden/            hidden states kept for all epochs, if asked for; says itself which records they are of
<output>/lasd.json, ...     the artifact, written at the end
```
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from pathlib import Path
from typing import Any

from lasd.errors import LasdError

logger = logging.getLogger(__name__)

CONFIG_NAME = "run.json"
METRICS_NAME = "metrics.jsonl"
CHECKPOINTS_NAME = "checkpoints"
HIDDEN_NAME = "hidden"
_COMPLETE_NAME = "complete.json"
_PREFIX = "checkpoint-"


def mark_complete(checkpoints: str | Path, step: int) -> None:
    """Records the files of a checkpoint and their sizes, once they are on the disk. Until then it is not trusted."""
    folder = Path(checkpoints) / f"{_PREFIX}{step}"
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != _COMPLETE_NAME)
    for path in files:
        _sync(path)
    sizes = {str(path.relative_to(folder)): path.stat().st_size for path in files}
    write_atomic(folder / _COMPLETE_NAME, json.dumps(sizes, indent=1))


def newest_complete(checkpoints: str | Path) -> Path | None:
    """The newest checkpoint whose files are all there in full, or None; half-written ones are passed over."""
    folders = [path for path in Path(checkpoints).glob(f"{_PREFIX}*") if path.name.removeprefix(_PREFIX).isdigit()]
    for folder in sorted(folders, key=_step, reverse=True):
        if _is_complete(folder):
            return folder
        logger.warning("checkpoint %s is half-written; it is not used", folder)
    return None


def discard_after(checkpoints: str | Path, step: int) -> None:
    """Deletes the checkpoints of later steps: half-written ones, which the run will write again."""
    for folder in Path(checkpoints).glob(f"{_PREFIX}*"):
        if folder.name.removeprefix(_PREFIX).isdigit() and _step(folder) > step:
            shutil.rmtree(folder)


def step_of(checkpoint: Path | None) -> int:
    """Optimizer steps done in a checkpoint; 0 for None."""
    return 0 if checkpoint is None else _step(checkpoint)


def _step(folder: Path) -> int:
    return int(folder.name.removeprefix(_PREFIX))


def _is_complete(folder: Path) -> bool:
    marker = folder / _COMPLETE_NAME
    if not marker.is_file():
        return False
    try:
        sizes = json.loads(marker.read_text(encoding="utf-8"))
    except ValueError:
        return False
    return all((folder / name).is_file() and (folder / name).stat().st_size == size for name, size in sizes.items())


def claim_output(
    output: Path, run: dict[str, Any], free: frozenset[str], defaults: dict[str, Any] | None = None
) -> None:
    """Makes the folder this run's own, or checks that it already is.

    Args:
        output: the run's folder.
        run: what identifies the run: the resolved configuration and the data's fingerprint.
        free: names of fields that may change between calls.
        defaults: what a field means that the folder's run did not know yet.

    Raises:
        LasdError: the folder belongs to another run (each differing field is named), or holds something else.
    """
    path = output / CONFIG_NAME
    if path.is_file():
        try:
            before = (defaults or {}) | json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise LasdError(f"{path} is not readable as JSON ({error}): choose another output folder") from error
        names = sorted((before.keys() | run.keys()) - free)
        differing = [
            f"{name} {before.get(name)!r} there, {run.get(name)!r} now"
            for name in names
            if before.get(name) != run.get(name)
        ]
        if differing:
            raise LasdError(
                f"output {output} belongs to another run ({'; '.join(differing)}): choose another output folder, "
                "delete this one, or give the same settings to resume it"
            )
    elif output.exists() and (not output.is_dir() or any(entry.name != HIDDEN_NAME for entry in output.iterdir())):
        raise LasdError(
            f"output {output} is not empty and is not a training run; expected a new folder or one with {CONFIG_NAME}: "
            "choose another output folder"
        )
    output.mkdir(parents=True, exist_ok=True)
    write_atomic(path, json.dumps(run, indent=2, ensure_ascii=False) + "\n")


def cut_metrics(output: Path, step: int) -> None:
    """Drops logged lines of later steps (and a torn last line), which the resumed run will log again."""
    path = output / METRICS_NAME
    if not path.is_file():
        return
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            break
        if record.get("step", 0) <= step and "train_runtime" not in record:
            kept.append(line + "\n")
    write_atomic(path, "".join(kept))


def write_atomic(path: Path, text: str) -> None:
    """Writes a text file so that it is there in full or not at all."""
    staging = path.with_name(f".{path.name}.tmp")
    staging.write_text(text, encoding="utf-8")
    _sync(staging)
    staging.replace(path)
    _sync(path.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
