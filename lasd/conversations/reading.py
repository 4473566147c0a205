"""From a JSON or JSONL file to raw records; what is cut off or broken is reported, and every whole record is saved."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lasd.errors import LasdError

TURN_KEYS = ("conversations", "messages", "conversation", "turns", "items", "prompt")
_WRAPPER_KEYS = ("data", "rows", "train", "records")
_SPACE_OR_COMMA = re.compile(r"[\s,]*")
_RECORD_START = re.compile(
    r'\{\s*"(?:id|question_id|conversations|messages|conversation|turns|items|prompt|source|category)"\s*:'
    r'|\[\s*\{\s*"(?:role|from)"\s*:'
    r"|(?<=\n)[\[{]"
)


@dataclass(frozen=True, slots=True)
class Broken:
    """A stretch of the file that held a record which cannot be read. `reason` is a key of `records.REASONS`."""

    reason: str
    where: str


def iter_raw_records(path: str | Path) -> Iterator[Any]:
    """Yields the file's raw records in order, and a `Broken` for each stretch that cannot be read.

    JSONL is streamed line by line. A JSON file (an array of records, an array of arrays of messages, one record, or a
    wrapper such as {"data": [...]}) is parsed at once; if it is cut off or damaged, all whole records are saved one by
    one. Bytes that are not UTF-8 are replaced by U+FFFD and announced by one `Broken("invalid_utf8", ...)`.

    Raises:
        LasdError: the file is missing, a folder, or empty.
    """
    path = Path(path)
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "does not exist"
        raise LasdError(f"prompt file {path} {what}: expected a .json or .jsonl file of conversations")
    first_line, is_only_line = _first_line(path)
    if not first_line:
        raise LasdError(f"prompt file {path} is empty: expected at least one conversation")
    if not is_only_line and _parses(first_line):
        yield from _iter_lines(path)
        return
    yield from _iter_document(path)


def _first_line(path: Path) -> tuple[bytes, bool]:
    """The first line that is not blank, and whether no other such line follows."""
    first = b""
    with path.open("rb") as file:
        for raw_line in file:
            line = raw_line.removeprefix(b"\xef\xbb\xbf").strip()
            if line and first:
                return first, False
            first = first or line
    return first, True


def _parses(line: bytes) -> bool:
    try:
        json.loads(line.decode("utf-8", errors="replace"))
    except ValueError:
        return False
    return True


def _decode(raw: bytes, where: str) -> tuple[str, Broken | None]:
    try:
        return raw.decode("utf-8-sig"), None
    except UnicodeDecodeError:
        return raw.decode("utf-8-sig", errors="replace"), Broken("invalid_utf8", where)


def _iter_lines(path: Path) -> Iterator[Any]:
    with path.open("rb") as file:
        for number, raw_line in enumerate(file, start=1):
            if not raw_line.strip():
                continue
            text, damage = _decode(raw_line, f"line {number}")
            if damage:
                yield damage
            try:
                record = json.loads(text)
            except ValueError:
                at_end = not raw_line.endswith(b"\n")
                yield Broken("cut_off_json" if at_end else "broken_json", f"line {number}")
            else:
                yield record


def _iter_document(path: Path) -> Iterator[Any]:
    text, damage = _decode(path.read_bytes(), str(path))
    if damage:
        yield damage
    try:
        document = json.loads(text)
    except ValueError:
        yield from _salvage(text)
    else:
        yield from _unwrap(document)


def _unwrap(document: Any) -> Iterator[Any]:
    """The records of a whole JSON document."""
    if isinstance(document, dict) and not any(key in document for key in TURN_KEYS):
        for key in _WRAPPER_KEYS:
            if isinstance(document.get(key), list):
                yield from document[key]
                return
    if isinstance(document, list) and not _is_message(document[0] if document else None):
        yield from document
    else:
        yield document


def _is_message(item: Any) -> bool:
    return isinstance(item, dict) and ("role" in item or "from" in item) and not any(key in item for key in TURN_KEYS)


def _is_record(item: Any) -> bool:
    if isinstance(item, dict):
        return any(key in item for key in TURN_KEYS)
    return isinstance(item, list) and bool(item) and _is_message(item[0])


def _salvage(text: str) -> Iterator[Any]:
    """Whole records of a damaged document, one after the other; after damage it goes on at the next record's start."""
    decoder = json.JSONDecoder()
    position = _start_of_records(text)
    while True:
        position = _end(_SPACE_OR_COMMA, text, position)
        if position >= len(text) or text[position] == "]":
            return
        try:
            record, position = decoder.raw_decode(text, position)
        except ValueError:
            found = _next_record(decoder, text, position + 1)
            if found is None:
                yield Broken("cut_off_json", f"character {position}")
                return
            yield Broken("broken_json", f"character {position}")
            record, position = found
        yield record


def _start_of_records(text: str) -> int:
    """Where the first record of a damaged document starts: behind the bracket of an outer array, if there is one."""
    start = _end(_SPACE_OR_COMMA, text, 0)
    if text[start : start + 1] == "[":
        return start + 1
    wrapper = re.compile(r'\{\s*"(?:' + "|".join(_WRAPPER_KEYS) + r')"\s*:\s*\[').match(text, start)
    return wrapper.end() if wrapper else start


def _next_record(decoder: json.JSONDecoder, text: str, position: int) -> tuple[Any, int] | None:
    for match in _RECORD_START.finditer(text, position):
        try:
            record, end = decoder.raw_decode(text, match.start())
        except ValueError:
            continue
        if _is_record(record):
            return record, end
    return None


def _end(pattern: re.Pattern[str], text: str, position: int) -> int:
    match = pattern.match(text, position)
    return match.end() if match else position
