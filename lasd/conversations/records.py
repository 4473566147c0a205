"""Conversations as the pipelines see them, and the report of what was repaired or set aside while reading them."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from rich.table import Table

EXAMPLES_KEPT = 5

REASONS: dict[str, str] = {
    # repairs
    "first_turn_assistant": "began with an assistant turn, which was dropped",
    "empty_turn": "had empty turns, which were dropped",
    "tool_turns": "cut before a tool call or tool result",
    "late_system": "had system turns after the first turn, which were dropped",
    "merged_turns": "had neighbouring turns of one role, which were joined",
    "unanswered_tail": "ended with a user turn, which was dropped",
    "html": "HTML was turned into text",
    "invalid_utf8": "file held bytes that are not UTF-8 (replaced by U+FFFD)",
    "lone_surrogate": "half of a UTF-16 pair was replaced by U+FFFD",
    "renamed_id": "id stood for another record before, so a number was added",
    # set aside
    "cut_off_json": "cut off in the middle by the end of the file",
    "broken_json": "not readable as JSON",
    "not_a_record": "not a ShareGPT, messages or turns record",
    "unknown_role": "a turn has an unknown role",
    "non_text_content": "a turn holds something other than text",
    "no_user_turn": "no user turn",
    "no_assistant_turn": "no assistant turn to train on",
    "duplicate": "same turns as a record before",
    "contaminated": "stands in an evaluation file",
    "over_long": "prompt longer than the limit",
    "template_error": "the chat template refuses it",
    "empty_answer": "the model's first answer was empty",
    "answer_cut": "the model's first answer was cut at the token limit",
    "repetitive_answer": "the model's first answer ran into a loop",
}


@dataclass(frozen=True, slots=True)
class Message:
    """One turn. `role` is "system", "user" or "assistant"."""

    role: str
    content: str


@dataclass(slots=True)
class Conversation:
    """A conversation after repair: an optional system turn first, then user and assistant turns."""

    id: str
    messages: list[Message]
    category: str | None = None

    @property
    def system(self) -> str | None:
        """The system turn's text, or None."""
        first = self.messages[0] if self.messages else None
        return first.content if first is not None and first.role == "system" else None

    @property
    def user_turns(self) -> list[str]:
        """The texts of the user turns in order."""
        return [message.content for message in self.messages if message.role == "user"]

    def to_dicts(self) -> list[dict[str, str]]:
        """The turns as chat templates take them."""
        return [{"role": message.role, "content": message.content} for message in self.messages]


@dataclass
class Report:
    """How many records were read, repaired and set aside, and why. `read == kept + sum(set_aside.values())`.

    A record can be repaired for several reasons and is counted once for each; it is set aside for one reason only.
    """

    read: int = 0
    repaired: Counter[str] = field(default_factory=Counter)
    set_aside: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[str]] = field(default_factory=dict)
    aside_ids: list[tuple[str, str]] = field(default_factory=list, repr=False)

    @property
    def kept(self) -> int:
        """Records that remain."""
        return self.read - sum(self.set_aside.values())

    def note_repairs(self, record_id: str, reasons: Iterable[str]) -> None:
        """Counts each reason once for this record."""
        for reason in dict.fromkeys(reasons):
            self.repaired[reason] += 1
            self._remember(reason, record_id)

    def note_set_aside(self, record_id: str, reason: str) -> None:
        """Counts a record as set aside; its id and reason are also kept in `aside_ids`."""
        self.set_aside[reason] += 1
        self.aside_ids.append((record_id, reason))
        self._remember(reason, record_id)

    def _remember(self, reason: str, record_id: str) -> None:
        ids = self.examples.setdefault(reason, [])
        if len(ids) < EXAMPLES_KEPT:
            ids.append(record_id)

    def to_dict(self) -> dict[str, Any]:
        """The counts as JSON-ready values."""
        return {
            "read": self.read,
            "kept": self.kept,
            "repaired": dict(sorted(self.repaired.items())),
            "set_aside": dict(sorted(self.set_aside.items())),
            "examples": dict(sorted(self.examples.items())),
        }

    def table(self, title: str = "conversations") -> Table:
        """The report as a table for the terminal."""
        table = Table(title=title)
        for name in ("what", "records", "share", "why", "for example"):
            table.add_column(name, justify="right" if name in ("records", "share") else "left")
        rows = [("read", self.read, "", "")]
        for what, counter in (("repaired", self.repaired), ("set aside", self.set_aside)):
            for reason, count in counter.most_common():
                rows.append((what, count, REASONS.get(reason, reason), ", ".join(self.examples.get(reason, [])[:2])))
        rows.append(("kept", self.kept, "", ""))
        for what, count, why, example in rows:
            table.add_row(what, f"{count:,}", f"{count / max(self.read, 1):.1%}", why, example[:48])
        return table
