"""Conversations: read, repair, validate, render by chat template with an assistant mask, load distilled data."""

from lasd.conversations.distilled import DistilledData, DistilledRecord, load_distilled
from lasd.conversations.load import read_conversations
from lasd.conversations.records import REASONS, Conversation, Message, Report
from lasd.conversations.render import Rendered, render_ids, render_text, render_training

__all__ = [
    "REASONS",
    "Conversation",
    "DistilledData",
    "DistilledRecord",
    "Message",
    "Rendered",
    "Report",
    "load_distilled",
    "read_conversations",
    "render_ids",
    "render_text",
    "render_training",
]
