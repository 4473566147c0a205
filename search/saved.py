"""Files in which a search keeps what it has so far."""

import json
import logging
import os
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)


def read_json(path: Path) -> dict[str, Any] | None:
    """The object in a file that an earlier run kept; None where there is none, or where it is damaged."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError:
        data = None
    if not isinstance(data, dict):
        logger.warning("%s is damaged; what it held is made anew", path)
        return None
    return data


def write_json(path: Path, data: dict[str, Any]) -> None:
    """Writes a file whole, or leaves the old one as it is."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(path.name + ".part")
    try:
        with open(beside, "w", encoding="utf-8") as file:
            json.dump(data, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)
