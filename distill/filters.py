"""What keeps a prompt or an answer out: evaluation prompts, over-long prompts, answers in a loop."""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from lasd.conversations import Conversation, Report, read_conversations

_NOT_WORD = re.compile(r"[\W_]+")
NGRAM_WORDS = 13
SHORT_TURN_CHARACTERS = 24
LOOP_TOKENS = 64
LOOP_MAX_PERIOD = 32


class Contamination:
    """Recognises prompts that stand in evaluation files.

    A conversation is contaminated if one of its user turns equals an evaluation turn (case, spaces and punctuation
    aside; turns shorter than 24 characters count only as first turns), or if 13 words in a row of its turn stand in
    an evaluation turn and such runs make up at least a third of the shorter of the two.
    """

    def __init__(self, files: Iterable[str | Path]) -> None:
        self.first_turns: set[str] = set()
        self.turns: set[str] = set()
        self._ngrams: dict[tuple[str, ...], set[int]] = {}
        self._ngram_counts: list[int] = []
        for file in files:
            conversations, _ = read_conversations(file)
            for conversation in conversations:
                self._add(conversation.user_turns)

    def _add(self, turns: list[str]) -> None:
        for index, turn in enumerate(turns):
            text = normalise(turn)
            if index == 0:
                self.first_turns.add(text)
            if len(text) >= SHORT_TURN_CHARACTERS:
                self.turns.add(text)
            grams = _ngrams(text)
            for gram in grams:
                self._ngrams.setdefault(gram, set()).add(len(self._ngram_counts))
            self._ngram_counts.append(len(grams))

    def __contains__(self, conversation: Conversation) -> bool:
        turns = [normalise(turn) for turn in conversation.user_turns]
        return bool(turns) and (
            turns[0] in self.first_turns
            or any(turn in self.turns for turn in turns)
            or any(self._overlaps(turn) for turn in turns)
        )

    def _overlaps(self, turn: str) -> bool:
        grams = _ngrams(turn)
        shared: dict[int, int] = {}
        for gram in grams:
            for number in self._ngrams.get(gram, ()):
                shared[number] = shared.get(number, 0) + 1
        return any(3 * count >= min(len(grams), self._ngram_counts[number]) for number, count in shared.items())


def normalise(text: str) -> str:
    """Lower case, words separated by single spaces, without punctuation."""
    return _NOT_WORD.sub(" ", text.casefold()).strip()


def _ngrams(normalised: str) -> set[tuple[str, ...]]:
    words = normalised.split()
    return {tuple(words[start : start + NGRAM_WORDS]) for start in range(len(words) - NGRAM_WORDS + 1)}


def set_aside_contaminated(
    conversations: list[Conversation], report: Report, files: Sequence[str | Path]
) -> list[Conversation]:
    """The conversations that do not stand in the evaluation files; the others are noted in the report."""
    if not files:
        return conversations
    known = Contamination(files)
    clean: list[Conversation] = []
    for conversation in conversations:
        if conversation in known:
            report.note_set_aside(conversation.id, "contaminated")
        else:
            clean.append(conversation)
    return clean


def is_loop(tokens: Sequence[int]) -> bool:
    """Whether the last 64 tokens repeat with a period of at most 32."""
    tail = list(tokens[-LOOP_TOKENS:])
    return len(tail) == LOOP_TOKENS and any(tail[period:] == tail[:-period] for period in range(1, LOOP_MAX_PERIOD + 1))
