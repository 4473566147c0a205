"""Which records are held out: one rule for training, which must not see them, and for whatever is measured on them."""

import hashlib
import re

_PART = re.compile(r"#part\d+\Z")


def part_id(conversation_id: str, part: int) -> str:
    """The id of a conversation's `part`-th record, counted from 0; most conversations are one record."""
    return conversation_id if part == 0 else f"{conversation_id}#part{part + 1}"


def held_out(record_id: str, share: float) -> bool:
    """Whether a record is held out: a property of its conversation's id alone, so every pipeline draws the same line.

    The parts of one conversation (`part_id`) share their history, so they are always on the same side.

    Args:
        record_id: the record's id.
        share: share held out, in [0, 1]; a larger share holds out all that a smaller one does.
    """
    digest = hashlib.sha256(_PART.sub("", record_id).encode()).digest()
    return int.from_bytes(digest[:8], "big") < share * 2**64
