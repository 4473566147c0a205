"""Reads evaluation prompts: the first user turn of each record, as the token ids that every method is given."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lasd.decoding.target import TargetModel
from lasd.errors import LasdError

_USER_NAMES = {"human", "user", "prompter"}
_REFERENCE_KEYS = ("reference", "answer", "summary")
_ID_KEYS = ("id", "question_id", "conversation_id", "task_id")
_FORMS = (
    '{"turns": [...]}, {"prompt": "..."}, {"messages": [...]}, {"conversations": [...]} (ShareGPT), or plain text lines'
)


@dataclass(frozen=True)
class Prompt:
    """One prompt as every method sees it; `ids` are its token ids, chat template and generation prompt included."""

    id: str
    category: str | None
    ids: tuple[int, ...]
    reference: str | None = None
    """A good answer to it, where the record has one."""


def read_prompts(
    path: str | Path,
    target: TargetModel,
    limit: int | None = None,
    *,
    max_new_tokens: int = 0,
    raw: bool = False,
    categories: Sequence[str] = (),
) -> list[Prompt]:
    """Reads the first user turns of `path` (json, jsonl or plain text lines) in file order.

    Args:
        path: a file whose records are `{"turns": [...]}`, `{"prompt": ...}`, `{"question": ...}`, messages,
            ShareGPT, or plain lines.
        target: the model whose tokenizer and chat template render the turns.
        limit: keep the first `limit` prompts only; None keeps all.
        max_new_tokens: tokens that will follow; each prompt must leave room for them in the model's context.
        raw: encode the text itself, without the chat template.
        categories: keep records of these categories only, before the limit counts; () keeps all.

    Raises:
        LasdError: no such file, no prompt in it, a record of unknown form, or a prompt too long for the context.
    """
    path = Path(path)
    if limit is not None and limit < 1:
        raise LasdError(f"--limit is {limit}, expected at least 1: leave it out to take all prompts of {path}")
    prompts: list[Prompt] = []
    seen: dict[str | None, None] = {}
    for number, record in _records(path):
        if limit is not None and len(prompts) == limit:
            break
        category = None if record.get("category") is None else str(record["category"])
        seen.setdefault(category)
        if categories and category not in categories:
            continue
        messages = _first_turn(record, where=f"{path} record {number}")
        name = next((str(record[key]) for key in _ID_KEYS if record.get(key) is not None), str(number))
        ids = encode(target, messages, raw=raw)
        check_length(target, len(ids), max_new_tokens, what=f"prompt {name} of {path}")
        prompts.append(Prompt(name, category, tuple(ids), _reference(record)))
    if not prompts and categories:
        there = ", ".join(sorted(filter(None, seen))) or "none"
        raise LasdError(f"{path} has no record of category {' or '.join(categories)}: its categories are {there}")
    if not prompts:
        raise LasdError(f"no prompt in {path}: expected at least one record of the form {_FORMS}")
    return prompts


def check_file(path: str | Path) -> None:
    """Raises a `LasdError` if `path` cannot be read or is empty: told before a model is loaded for it."""
    _read_text(Path(path))


def encode(target: TargetModel, messages: list[dict[str, str]], *, raw: bool = False) -> list[int]:
    """Token ids of `messages` by the chat template; `raw` encodes the last message's text alone."""
    if not raw:
        return list(target.encode_chat(messages))
    ids = list(target.tokenizer(messages[-1]["content"])["input_ids"])
    if not ids:
        raise LasdError("the prompt has no tokens: expected at least one, give a text or leave out --raw")
    return ids


def check_length(target: TargetModel, prompt_tokens: int, max_new_tokens: int, what: str = "the prompt") -> None:
    """Raises a `LasdError` unless the prompt and what follows it fit the model's context."""
    if prompt_tokens + max_new_tokens <= target.max_positions:
        return
    room = target.max_positions - prompt_tokens
    advice = f"lower --max-new-tokens to {room} or shorten it" if room > 0 else "shorten it or take it out"
    raise LasdError(
        f"{what} has {prompt_tokens} tokens, and with {max_new_tokens} new ones it is longer than the "
        f"{target.max_positions} positions of {target.name}: {advice}"
    )


def _records(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields (1-based record number, record); a plain text line becomes `{"prompt": line}`."""
    text = _read_text(path)
    if path.suffix == ".json":
        whole = _whole_json(text)
        if whole is not None:
            items = whole if isinstance(whole, list) else [whole]
            yield from ((number, _as_record(item)) for number, item in enumerate(items, start=1))
            return
    is_json = path.suffix in (".json", ".jsonl") or text.lstrip().startswith('{"')
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            yield number, _json_line(line, path, number) if is_json else {"prompt": line.strip()}


def _read_text(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (FileNotFoundError, NotADirectoryError):
        raise LasdError(f"no prompt file {path}: expected a json, jsonl or text file, check --prompts") from None
    except (IsADirectoryError, PermissionError, UnicodeDecodeError) as error:
        raise LasdError(f"{path} is not a readable text file ({error}): give a json, jsonl or text file") from None
    if not text.strip():
        raise LasdError(f"{path} is empty: expected at least one record of the form {_FORMS}")
    return text


def _whole_json(text: str) -> Any | None:
    """The value of a file that is one JSON value, or None (JSON lines in a .json file are common)."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return None


def _json_line(line: str, path: Path, number: int) -> dict[str, Any]:
    try:
        return _as_record(json.loads(line))
    except json.JSONDecodeError as error:
        raise LasdError(
            f"{path} line {number} is not JSON ({error.msg} at column {error.colno}): mend the line, or name the "
            "file .txt if each line is a prompt"
        ) from None


def _as_record(item: Any) -> dict[str, Any]:
    return item if isinstance(item, dict) else {"prompt": item}


def _first_turn(record: dict[str, Any], where: str) -> list[dict[str, str]]:
    """The messages up to and including the first user turn (a system message before it is kept)."""
    if isinstance(record.get("turns"), list) and record["turns"]:
        messages = [("user", record["turns"][0])]
    elif isinstance(record.get("prompt"), str):
        messages = [("user", record["prompt"])]
    elif isinstance(record.get("question"), str):
        messages = [("user", record["question"])]
    else:
        listed = next((record[key] for key in ("messages", "conversations", "prompt") if key in record), None)
        messages = _dialogue(listed)
    if not messages or messages[-1][0] != "user" or not all(isinstance(text, str) for _, text in messages):
        raise LasdError(
            f"{where} has no user turn (its keys: {', '.join(map(str, record)) or 'none'}): expected {_FORMS}"
        )
    if not messages[-1][1].strip():
        raise LasdError(f"the first user turn of {where} is empty: expected some text, mend or remove the record")
    return [{"role": role, "content": text} for role, text in messages]


def _reference(record: dict[str, Any]) -> str | None:
    """The reference answer to the first turn, if there is one."""
    found = next((record[key] for key in _REFERENCE_KEYS if record.get(key)), None)
    if isinstance(found, list):
        found = found[0]
    return found if isinstance(found, str) else None


def _dialogue(listed: Any) -> list[tuple[str, Any]]:
    """(role, text) of a messages or ShareGPT list, from a leading system message to the first user turn."""
    messages: list[tuple[str, Any]] = []
    for item in listed if isinstance(listed, list) else []:
        if not isinstance(item, dict):
            return []
        role, text = item.get("role", item.get("from")), item.get("content", item.get("value"))
        if role in _USER_NAMES:
            return [*messages, ("user", text)]
        if role == "system" and not messages:
            messages.append(("system", text))
    return []
