"""A distilled record on the terminal, with what is labelled in colour: the quickest check of template and mask."""

from itertools import groupby
from typing import Any

from rich.text import Text

from lasd.conversations import DistilledRecord

LONGEST_TOKENS = 400


def coloured(record: DistilledRecord, tokenizer: Any) -> Text:
    """The record's text; labelled tokens green, the others dim. Cut after 400 tokens."""
    text = Text(f"record {record.id} (green: labelled)\n", style="bold")
    pairs = list(zip(record.input_ids, record.loss_mask, strict=True))[:LONGEST_TOKENS]
    for labelled, run in groupby(pairs, key=lambda pair: pair[1]):
        text.append(tokenizer.decode([token for token, _ in run]), style="green" if labelled else "dim")
    if len(record.input_ids) > LONGEST_TOKENS:
        text.append(" ...", style="dim")
    return text
