"""From a raw record to a `Conversation`: shapes recognised, roles named alike, what is broken mended or set aside."""

import hashlib
from dataclasses import dataclass, field
from typing import Any, Literal

from lasd.conversations.html_text import clean_html
from lasd.conversations.reading import TURN_KEYS
from lasd.conversations.records import Conversation, Message

Use = Literal["prompts", "training"]
HtmlMode = Literal["auto", "keep"]

_ROLES: dict[str, str] = {
    **dict.fromkeys(("user", "human", "prompter"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "bing", "bard", "model", "bot"), "assistant"),
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(
        ("tool", "tool_call", "tool_response", "function", "function_call", "observation", "ipython"), "tool"
    ),
}


class SetAside(Exception):
    """The record cannot be used; `reason` is a key of `records.REASONS`, `record_id` its id where it has one."""

    def __init__(self, reason: str, record_id: str) -> None:
        super().__init__(reason)
        self.reason = reason
        self.record_id = record_id


@dataclass(slots=True)
class Repaired:
    """A usable conversation and the repairs it needed (keys of `records.REASONS`)."""

    conversation: Conversation
    repairs: list[str] = field(default_factory=list)
    has_own_id: bool = True


def repair_record(raw: Any, where: str, use: Use = "prompts", html: HtmlMode = "auto") -> Repaired:
    """Makes a conversation of a raw ShareGPT, messages or turns record.

    With `use="prompts"` the user turns matter: at least one must remain, and answers may be missing. With
    `use="training"` users and assistants alternate, the last turn is an assistant's, and at least one is there.

    Raises:
        SetAside: the record cannot be used.
    """
    given_id, category, turns = _shape(raw, where)
    repairs: list[str] = []
    messages = _messages(turns, given_id or where, html, repairs)
    messages = _drop_leading_and_late(messages, repairs)
    if use == "training":
        messages = _alternate(messages, repairs)
    if not any(message.role == "user" for message in messages):
        raise SetAside("no_user_turn", given_id or where)
    if use == "training" and not any(message.role == "assistant" for message in messages):
        raise SetAside("no_assistant_turn", given_id or where)
    record_id = given_id or "text-" + content_key(messages)[:16]
    return Repaired(Conversation(record_id, messages, category), repairs, bool(given_id))


def content_key(messages: list[Message]) -> str:
    """A hash of roles and texts: equal for records with the same turns."""
    digest = hashlib.sha256()
    for message in messages:
        digest.update(f"{message.role}\0{message.content}\0\0".encode("utf-8", errors="surrogatepass"))
    return digest.hexdigest()


def _shape(raw: Any, where: str) -> tuple[str, str | None, list[Any]]:
    """(id or "", category, raw turns) of a record of any known shape."""
    if isinstance(raw, list):
        return "", None, raw
    if not isinstance(raw, dict):
        raise SetAside("not_a_record", where)
    raw_id = next((raw[key] for key in ("id", "question_id", "conversation_id") if raw.get(key) not in (None, "")), "")
    record_id = _clean_surrogates(str(raw_id))
    category = raw.get("category")
    key = next((key for key in TURN_KEYS if key in raw), None)
    turns = raw[key] if key else None
    if isinstance(turns, str):
        turns = [turns]
    if not isinstance(turns, list):
        raise SetAside("not_a_record", record_id or where)
    return record_id, str(category) if category is not None else None, turns


def _messages(turns: list[Any], where: str, html: HtmlMode, repairs: list[str]) -> list[Message]:
    messages: list[Message] = []
    for turn in turns:
        role, content = _role_and_content(turn, where)
        if role == "tool":
            repairs.append("tool_turns")
            break
        text = _clean_surrogates(content)
        if text != content:
            repairs.append("lone_surrogate")
        if html == "auto":
            plain = clean_html(text)
            if plain != text:
                repairs.append("html")
                text = plain
        text = text.strip()
        if not text:
            repairs.append("empty_turn")
            continue
        messages.append(Message(role, text))
    return messages


def _role_and_content(turn: Any, where: str) -> tuple[str, str]:
    if isinstance(turn, str):
        return "user", turn
    if not isinstance(turn, dict):
        raise SetAside("not_a_record", where)
    name = turn.get("role", turn.get("from"))
    role = _ROLES.get(name.strip().lower()) if isinstance(name, str) else None
    if role is None:
        raise SetAside("unknown_role", where)
    content = next((turn[key] for key in ("content", "value", "text") if key in turn), None)
    if role == "assistant" and turn.get("tool_calls"):
        return "tool", ""
    if isinstance(content, list):
        content = _join_parts(content, where)
    if content is None:
        content = ""
    if not isinstance(content, str):
        raise SetAside("non_text_content", where)
    return role, content


def _join_parts(parts: list[Any], where: str) -> str:
    """The text of a content list of {"type": "text", "text": ...} parts."""
    texts: list[str] = []
    for part in parts:
        text = part.get("text") if isinstance(part, dict) else part
        if not isinstance(text, str):
            raise SetAside("non_text_content", where)
        texts.append(text)
    return "\n".join(texts)


def _clean_surrogates(text: str) -> str:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _drop_leading_and_late(messages: list[Message], repairs: list[str]) -> list[Message]:
    """System turns only at the front (joined), then a user turn first."""
    start = 0
    while start < len(messages) and messages[start].role == "system":
        start += 1
    system = messages[:start]
    if len(system) > 1:
        repairs.append("merged_turns")
        system = [Message("system", "\n\n".join(message.content for message in system))]
    rest = [message for message in messages[start:] if message.role != "system"]
    if len(rest) < len(messages) - start:
        repairs.append("late_system")
    first_user = next((index for index, message in enumerate(rest) if message.role == "user"), len(rest))
    if first_user:
        repairs.append("first_turn_assistant")
    return system + rest[first_user:]


def _alternate(messages: list[Message], repairs: list[str]) -> list[Message]:
    """Joins neighbours of one role and drops a last user turn that nobody answered."""
    joined: list[Message] = []
    for message in messages:
        if joined and joined[-1].role == message.role:
            joined[-1] = Message(message.role, joined[-1].content + "\n\n" + message.content)
            repairs.append("merged_turns")
        else:
            joined.append(message)
    if joined and joined[-1].role == "user" and any(message.role == "assistant" for message in joined):
        repairs.append("unanswered_tail")
        joined.pop()
    return joined
