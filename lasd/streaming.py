"""The text of an answer while it grows."""

import itertools
import logging
from collections.abc import Sequence
from typing import Any

log = logging.getLogger(__name__)

UNFINISHED = "\ufffd"
"""What a tokenizer decodes an incomplete character to."""


class TextStream:
    """Turns committed tokens into text: only text that later tokens cannot change any more.

    Held back are bytes of an incomplete character, what may be the beginning of a stop string, and, with tokenizers
    that tidy the spaces before punctuation, the last word. All pieces together are exactly the answer's text.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str] = ()) -> None:
        self.tokenizer, self.stop = tokenizer, tuple(stop)
        self.tokens: list[int] = []
        self.sent = ""
        """What was given out so far."""
        self._by_word = bool(getattr(tokenizer, "clean_up_tokenization_spaces", False))

    def take(self, tokens: Sequence[int]) -> str:
        """The text that newly committed tokens make final; it may be empty."""
        self.tokens += tokens
        return self._send(self._final(self.tokenizer.decode(self.tokens, skip_special_tokens=True)))

    def finish(self, text: str) -> str:
        """What is left of the whole answer `text` (`GenerationResult.text`)."""
        if not text.startswith(self.sent):
            log.warning("the tokenizer changed text that was already streamed; the whole answer is %r", text)
            same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(self.sent, text, strict=False))
            self.sent = "".join(character for character, _ in same)
        return self._send(text)

    def _send(self, text: str) -> str:
        piece = text[len(self.sent) :]
        self.sent += piece
        return piece

    def _final(self, text: str) -> str:
        """The part of the text so far that stays as it is."""
        text = text.rstrip(UNFINISHED)
        if self._by_word:
            text = text[: max(text.rfind(" "), 0)]
        for stop in self.stop:
            text = text[: text.find(stop)] if stop in text else text
        begun = (n for stop in self.stop for n in range(1, len(stop)) if text.endswith(stop[:n]))
        return text[: len(text) - max(begun, default=0)]
