"""One request while it decodes: what it asked for, what it has, and when it ends."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from lasd.decoding.sampling import SamplingParams
from lasd.decoding.stats import DecodeStats
from lasd.drafters.base import DraftContext

OnTokens = Callable[[int, list[int]], None]
"""Called with (slot, newly committed tokens) after each step."""


@dataclass
class GenerationResult:
    """An answer and what it cost."""

    tokens: list[int]
    """Answer tokens; the end-of-text token is included when one was reached, and so are the tokens that complete a
    stop string."""
    finish_reason: str
    """"eos", "stop", "length" (max_new_tokens), "context" (the model's positions), or "released" (taken back before it
    ended)."""
    prompt_tokens: int
    stats: DecodeStats
    tokenizer: Any = field(default=None, repr=False)
    stop: tuple[str, ...] = ()

    @cached_property
    def text(self) -> str:
        """The answer as text, without special tokens, cut before the first stop string."""
        text = self.tokenizer.decode(self.tokens, skip_special_tokens=True)
        cuts = [place for stop in self.stop if (place := text.find(stop)) >= 0]
        return text[: min(cuts)] if cuts else text


class Request:
    """State of one live sequence."""

    def __init__(
        self,
        context: DraftContext,
        params: SamplingParams,
        eos: tuple[int, ...],
        max_tokens: int,
        tokenizer: Any,
        uniforms: Tensor | None,
        on_tokens: OnTokens | None,
    ):
        self.context, self.params, self.eos = context, params, frozenset(eos)
        self.max_tokens = max_tokens  # prompt and answer together; less than asked for where the model's positions end
        self.tokenizer, self.on_tokens = tokenizer, on_tokens
        self.uniforms = uniforms
        self.stats = DecodeStats(answers=1)
        self.finish_reason: str | None = None

    @property
    def num_answer(self) -> int:
        """Answer tokens so far."""
        return len(self.context.tokens) - self.context.num_prompt

    @property
    def remaining(self) -> int:
        """Tokens that may still follow."""
        return self.max_tokens - len(self.context.tokens)

    def take(self, tokens: list[int]) -> list[int]:
        """Commits tokens up to where the answer ends; returns those that were kept."""
        kept = []
        for token in tokens:
            kept.append(token)
            self.context.tokens.append(token)
            self.finish_reason = self._ends(token)
            if self.finish_reason:
                break
        self.stats.tokens += len(kept)
        if self.on_tokens:
            self.on_tokens(self.context.slot, kept)
        return kept

    def result(self) -> GenerationResult:
        """The answer so far."""
        return GenerationResult(
            self.context.tokens[self.context.num_prompt :],
            self.finish_reason or "released",
            self.context.num_prompt,
            self.stats,
            self.tokenizer,
            self.params.stop,
        )

    def _ends(self, token: int) -> str | None:
        if token in self.eos:
            return "eos"
        if self.params.stop and self._has_stop_string():
            return "stop"
        if self.params.stopping and self._meets_a_criterion():
            return "stop"
        if self.remaining <= 0:
            return "length" if self.num_answer >= self.params.max_new_tokens else "context"
        return None

    @property
    def prefix(self) -> list[int]:
        """What processors and criteria see: padding, prompt and answer so far."""
        return [*self.params.padding, *self.context.tokens]

    def _meets_a_criterion(self) -> bool:
        ids = torch.tensor([self.prefix])
        return any(bool(torch.as_tensor(criterion(ids, None)).all()) for criterion in self.params.stopping)

    def _has_stop_string(self) -> bool:
        """Whether the newest token completes a stop string. A token that is no whole character adds no text, so the
        tail that is decoded has four tokens for each character of the longest stop string."""
        width = 4 * max(len(stop) for stop in self.params.stop) + 4
        answer = self.context.tokens[max(self.context.num_prompt, len(self.context.tokens) - width) :]
        text = self.tokenizer.decode(answer, skip_special_tokens=True)
        return any(stop in text for stop in self.params.stop)
