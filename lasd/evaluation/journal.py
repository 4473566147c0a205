"""Rows of a running measurement, one JSON line each, so that a killed run resumes with the same command."""

import json
import logging
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lasd.errors import LasdError

logger = logging.getLogger(__name__)


class Journal:
    """An append-only file: a header line with the settings, a line a row, at last a line "complete".

    A run that was killed leaves header and rows, and the next one with the same settings takes the rows over. A
    complete journal is only kept for the reader: the next run starts a new one.

    Example: header, row "0", row "1", kill in the middle of the third line. `Journal(path, settings)` then holds the
    rows "0" and "1", the file ends behind row "1", and `append("2", ...)` writes the third line.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        self.path = path
        self.rows: dict[str, dict[str, Any]] = {}
        lines = _whole_lines(path)
        if lines and lines[-1] == {"complete": True}:
            lines = []
        if not lines:
            write_text_atomic(path, json.dumps({"settings": settings}) + "\n")
            return
        if differing := _differences(lines[0].get("settings", {}), settings):
            raise LasdError(
                f"{path} holds the rows of an unfinished run with other settings ({differing}): finish that run "
                "with its own command, remove the file, or give another --output"
            )
        self.rows = {line["key"]: line["row"] for line in lines[1:]}
        logger.info("%s: %d finished rows taken over", path, len(self.rows))

    def append(self, key: str, row: dict[str, Any]) -> None:
        """Adds a row and brings it to the disk."""
        self.rows[key] = row
        self._write_line({"key": key, "row": row})

    def complete(self) -> None:
        """Marks the journal as finished, once its result is safely written."""
        self._write_line({"complete": True})

    def _write_line(self, line: dict[str, Any]) -> None:
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(line, separators=(",", ":")) + "\n")
            file.flush()
            os.fsync(file.fileno())


def _differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """Each setting that differs, with both values; empty if none does."""
    found = []
    for name in dict.fromkeys([*old, *new]):
        before, now = old.get(name), new.get(name)
        if isinstance(before, dict) and isinstance(now, dict):
            found.append(_differences(before, now))
        elif before != now:
            found.append(f"{name} {_short(before)} there, {_short(now)} now")
    return "; ".join(filter(None, found))


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 40 else text[:12] + "..."


def _whole_lines(path: Path) -> list[dict[str, Any]]:
    """The finished lines of a journal; a last line that was cut off by a kill is removed from the file."""
    if not path.exists():
        return []
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    if len(whole) < len(data):
        os.truncate(path, len(whole))
    try:
        lines = [json.loads(line) for line in whole.splitlines()]
    except ValueError:
        lines = [None]
    if not all(isinstance(line, dict) for line in lines):
        raise LasdError(f"{path} is not a journal of this program: remove it or give another --output")
    return lines


def write_text_atomic(path: Path, text: str) -> None:
    """Writes `text` beside `path`, syncs it and renames it into place: the file is the old one or the whole new one."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        _write_and_rename(handle, temporary, path, text)
    except (PermissionError, FileExistsError, NotADirectoryError, IsADirectoryError) as error:
        raise LasdError(
            f"cannot write {path} ({error.strerror}): give --output a path in a folder you can write"
        ) from None


def _write_and_rename(handle: int, temporary: str, path: Path, text: str) -> None:
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)  # mkstemp makes it private
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
