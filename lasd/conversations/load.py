"""Reading a whole file of conversations: every record is kept, mended or set aside, and the report says which."""

from pathlib import Path

from lasd.conversations.reading import Broken, iter_raw_records
from lasd.conversations.records import Conversation, Message, Report
from lasd.conversations.repair import HtmlMode, SetAside, Use, content_key, repair_record


def read_conversations(
    path: str | Path, *, use: Use = "prompts", html: HtmlMode = "auto", limit: int | None = None
) -> tuple[list[Conversation], Report]:
    """Reads ShareGPT (json, jsonl), messages (json, jsonl, also arrays of arrays) and {"turns": [...]} files.

    Args:
        path: the file.
        use: "prompts" if only the user turns will be answered anew, "training" if the given answers count.
        html: "auto" turns left-overs of web scrapes into text, "keep" leaves every text as it is.
        limit: stop after this many kept conversations.

    Returns:
        The conversations in the file's order, with unique ids, and the report.

    Raises:
        LasdError: the file is missing or empty.
    """
    report = Report()
    kept: list[Conversation] = []
    seen_ids: set[str] = set()
    seen_texts: set[str] = set()
    for index, raw in enumerate(iter_raw_records(path)):
        if limit is not None and len(kept) >= limit:
            break
        if isinstance(raw, Broken):
            _note_broken(raw, report)
            continue
        report.read += 1
        try:
            repaired = repair_record(raw, f"record {index + 1}", use, html)
        except SetAside as verdict:
            report.note_set_aside(verdict.record_id, verdict.reason)
            continue
        conversation = repaired.conversation
        key = content_key(_compared(conversation, use))
        if key in seen_texts:
            report.note_set_aside(conversation.id, "duplicate")
            continue
        seen_texts.add(key)
        if conversation.id in seen_ids:
            conversation.id = _free_id(conversation.id, seen_ids)
            repaired.repairs.append("renamed_id")
        seen_ids.add(conversation.id)
        report.note_repairs(conversation.id, repaired.repairs)
        kept.append(conversation)
    return kept, report


def _note_broken(broken: Broken, report: Report) -> None:
    if broken.reason == "invalid_utf8":
        report.note_repairs(broken.where, [broken.reason])
        return
    report.read += 1
    report.note_set_aside(broken.where, broken.reason)


def _compared(conversation: Conversation, use: Use) -> list[Message]:
    """What makes two records the same: for prompts the turns that are kept, for training all turns."""
    if use == "training":
        return conversation.messages
    return [message for message in conversation.messages if message.role != "assistant"]


def _free_id(wanted: str, taken: set[str]) -> str:
    number = 2
    while f"{wanted}~{number}" in taken:
        number += 1
    return f"{wanted}~{number}"
