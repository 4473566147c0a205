"""How the next token is chosen: parameters, logits -> probabilities, and the draw.

Legend: B rows (sequences), N tree nodes, V vocabulary.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lasd.errors import LasdError


@dataclass(frozen=True)
class SamplingParams:
    """What one request asks for.

    A sampled answer depends on the seed alone, not on the drafter: the token at answer position i is the inverse of the
    distribution's cumulative sum at the i-th uniform number of the request's stream. Any exact drafter therefore gives
    the same answer as plain decoding (up to rounding), and the answer's law is exactly the target's.
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    """0 is greedy."""
    top_k: int = 0
    """0 is off."""
    top_p: float = 1.0
    """1 is off."""
    seed: int = 0
    eos_token_ids: tuple[int, ...] | None = None
    """None: the model's own; (): never stop at an end-of-text token."""
    stop: tuple[str, ...] = ()
    """Strings that end the answer; they are cut off the text."""
    min_new_tokens: int = 0
    typical: tuple[float, float] | None = None
    """(epsilon, delta) of typical acceptance: LOSSY, the answer no longer follows the model's distribution. None is
    exact."""
    processors: tuple[Any, ...] = field(default=(), compare=False)
    """transformers' LogitsProcessor, applied along each path with the path's own prefix, before temperature, top-k and
    top-p."""
    stopping: tuple[Any, ...] = field(default=(), compare=False)
    """transformers' StoppingCriteria, asked after each committed token."""
    padding: tuple[int, ...] = ()
    """Tokens that processors and criteria see before the prompt, as in a left-padded batch; the model never sees
    them."""

    def __post_init__(self) -> None:
        checks = (
            (self.max_new_tokens >= 1, "max_new_tokens", self.max_new_tokens, "at least 1"),
            (self.temperature >= 0, "temperature", self.temperature, "0 (greedy) or above"),
            (self.top_k >= 0, "top_k", self.top_k, "0 (off) or above"),
            (0 < self.top_p <= 1, "top_p", self.top_p, "above 0 and at most 1 (off)"),
            (self.min_new_tokens >= 0, "min_new_tokens", self.min_new_tokens, "0 or above"),
        )
        for fine, name, value, expected in checks:
            if not fine:
                raise LasdError(f"{name} is {value}; it must be {expected}")
        if self.typical is not None and (self.greedy or not all(0 < value <= 1 for value in self.typical)):
            raise LasdError(
                f"typical acceptance got {self.typical} at temperature {self.temperature}; it needs (epsilon, "
                "delta) above 0 and at most 1, "
                "and a temperature above 0"
            )
        if isinstance(self.stop, str) or any(not s for s in self.stop):
            raise LasdError(f"stop is {self.stop!r}; it must be a tuple of non-empty strings")

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken instead of a draw."""
        return self.temperature == 0

    def uniforms(self, extra: int) -> Tensor:
        """float64 [max_new_tokens + extra] on the CPU: the numbers that decide each draw of this request."""
        generator = torch.Generator().manual_seed(self.seed)
        return torch.rand(self.max_new_tokens + extra, generator=generator, dtype=torch.float64)


def probabilities(logits_NV: Tensor, params: SamplingParams) -> Tensor:
    """Temperature, then top-k, then top-p, as float32 probabilities of the same shape.

    The order and the tie rules are those of transformers' warpers: top-k keeps every token that ties with the k-th,
    top-p keeps the smallest set whose mass reaches p.
    """
    logits_NV = logits_NV.float() / params.temperature
    if 0 < params.top_k < logits_NV.shape[-1]:
        kth = logits_NV.topk(params.top_k, dim=-1).values[..., -1:]
        logits_NV = logits_NV.masked_fill(logits_NV < kth, -torch.inf)
    if params.top_p < 1:
        ordered, index = logits_NV.sort(dim=-1, descending=False)
        out = ordered.softmax(-1).cumsum(-1) <= 1 - params.top_p
        out[..., -1] = False
        logits_NV = logits_NV.masked_fill(out.scatter(-1, index, out), -torch.inf)
    return logits_NV.softmax(-1)


def draw(probs_NV: Tensor, uniforms_N: Tensor) -> Tensor:
    """The inverse of each distribution's cumulative sum at the given uniform number.

    Args:
        probs_NV: float32; each row sums to about 1.
        uniforms_N: float64 in [0, 1).

    Returns:
        int64 [N]; always a token of probability above 0.
    """
    cumulative_NV = probs_NV.double().cumsum(-1)
    threshold_N1 = (uniforms_N.double() * cumulative_NV[..., -1]).unsqueeze(-1)
    # right=True: the first token whose cumulative sum exceeds the threshold, so a token of probability 0 is never drawn
    picked = torch.searchsorted(cumulative_NV, threshold_N1, right=True).squeeze(-1)
    last_N = probs_NV.shape[-1] - 1 - (probs_NV.flip(-1) > 0).int().argmax(-1)
    return torch.minimum(picked, last_N)
