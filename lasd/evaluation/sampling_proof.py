"""The sampling part of `lasd prove`: do sampled tokens follow the model's law, whatever was drafted?

The law of each sampled token, given the tokens before it, is computed by the user's own model in transformers' code,
and the vocabulary is projected on a line: tokens by falling probability, each as wide as it is probable. A token that
follows the law falls uniformly on this line (at a random place within its own width), so the line is cut into equal
bins and the counts are tested by chi-square. The first bins are the law's top tokens, the last its tail: tokens that
are kept too often because they were drafted crowd the first bins. This holds for every prefix, so all samples count
together.

Second, the same seed must give the same tokens as plain sampling. A draw within rounding of the border between two
tokens may fall on either side; how far from it is reported.

Legend: A answers, K tokens of each, V vocabulary.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from lasd.decoding.decoder import Decoder
from lasd.decoding.request import GenerationResult
from lasd.decoding.sampling import SamplingParams
from lasd.decoding.target import TargetModel
from lasd.drafters.base import Drafter
from lasd.errors import LasdError
from lasd.evaluation.metrics import PLAIN
from lasd.evaluation.prompts import Prompt
from lasd.evaluation.report import progress
from lasd.evaluation.rounding import stock_logits_of_batch

BINS = 16
MOST_PROMPTS = 4
"""Prompts that are sampled from: many answers to few prompts share the forward passes that the law takes."""
ALPHA = 0.001
"""A method fails if so rare a deviation shows (over its tested places together)."""
BORDER = 1e-4
"""In fp32, how far from its border a draw may fall on the other side. In other dtypes that is reported, not judged."""
PASS_ELEMENTS = 2**26
"""Most logits x positions that one pass of the law computes."""


@dataclass(frozen=True)
class SamplingSettings:
    """What is sampled: `samples` answers of `tokens` tokens in all, spread over the first prompts."""

    samples: int = 500
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    tokens: int = 4

    def __post_init__(self) -> None:
        if self.samples < 5 * BINS:
            raise LasdError(f"--samples is {self.samples}, expected at least {5 * BINS}: five for each of {BINS} bins")
        if self.temperature <= 0:
            raise LasdError(f"--temperature is {self.temperature}, expected above 0: --sampling tests draws")

    def params(self, index: int) -> SamplingParams:
        """Of sample number `index`: each has a seed of its own."""
        return SamplingParams(
            self.tokens, self.temperature, self.top_k, self.top_p, self.seed + index, eos_token_ids=()
        )


@dataclass
class SamplingProof:
    """How one method's samples compare with the law and with plain sampling."""

    method: str
    samples: int
    drafted: int = 0
    accepted: int = 0
    counts: dict[str, list[int]] = field(default_factory=dict)
    p_values: dict[str, float] = field(default_factory=dict)
    impossible: int = 0
    """Tokens that the law gives no probability."""
    identical_to_plain: float | None = None
    border: float = 0.0
    """The farthest that a draw which fell on another token than in plain sampling was from that token."""
    border_allowed: float = 0.0

    @property
    def p_value(self) -> float:
        """Of all places together: the smallest, times how many there are (Bonferroni)."""
        return min(1.0, min(self.p_values.values()) * len(self.p_values))

    @property
    def verdict(self) -> str:
        """ "same law", "another law", "other tokens" (than plain sampling of the same seeds), or "nothing proven"."""
        if self.impossible or self.p_value < ALPHA:
            return "another law"
        if self.border > self.border_allowed:
            return "other tokens"
        if self.method != PLAIN and not (self.accepted and self.drafted > self.accepted):
            return "nothing proven"
        return "same law"

    @property
    def passed(self) -> bool:
        """Whether the verdict is one to exit with 0 on."""
        return self.verdict == "same law"

    def to_dict(self) -> dict[str, Any]:
        """A JSON-able dict."""
        return dict(vars(self)) | {"bins": BINS, "alpha": ALPHA, "p_value": self.p_value, "verdict": self.verdict}


def prove_sampling(
    target: TargetModel,
    drafters: Mapping[str, Drafter | None],
    prompts: Sequence[Prompt],
    settings: SamplingSettings,
    max_slots: int = 1,
) -> list[SamplingProof]:
    """Samples with every method and compares; `drafters` must hold "plain", which the others are compared with."""
    law = Law(target, settings)
    asked = [list(prompts[index % min(MOST_PROMPTS, len(prompts))].ids) for index in range(settings.samples)]
    plain: list[GenerationResult] = []
    proofs = []
    for name, drafter in sorted(drafters.items(), key=lambda item: item[0] != PLAIN):
        results = sample(target, drafter, asked, settings, max_slots, title=f"{name}, sampling")
        plain = plain or results
        proofs.append(judge(name, asked, results, plain, law))
    return proofs


def sample(
    target: TargetModel,
    drafter: Drafter | None,
    asked: Sequence[Sequence[int]],
    settings: SamplingSettings,
    max_slots: int,
    title: str = "sampling",
) -> list[GenerationResult]:
    """An answer to each of the asked prompts."""
    decoder = Decoder(target, drafter, max_slots=max_slots, max_context=max(map(len, asked)) + settings.tokens)
    results = []
    for start in progress(range(0, len(asked), max_slots), title):
        part = range(start, min(start + max_slots, len(asked)))
        results += decoder.generate([asked[i] for i in part], [settings.params(i) for i in part])
    return results


def judge(
    name: str,
    asked: Sequence[Sequence[int]],
    results: Sequence[GenerationResult],
    plain: Sequence[GenerationResult],
    law: "Law",
) -> SamplingProof:
    """Tests one method's answers. The first token comes from the prompt's pass, before any draft, and is left out."""
    answers = [tuple(result.tokens) for result in results]
    law.learn(asked, answers)
    proof = SamplingProof(name, len(answers), border_allowed=law.border_allowed)
    proof.drafted = sum(result.stats.nodes - result.stats.steps for result in results)
    proof.accepted = sum(sum(result.stats.accepted_per_step) for result in results)
    places_AK = law.places(asked, answers)
    proof.impossible = int((places_AK < 0).sum())
    for place in range(1, law.settings.tokens):
        counts = torch.bincount((places_AK[:, place].clamp(0) * BINS).long().clamp(max=BINS - 1), minlength=BINS)
        proof.counts[f"token {place + 1}"] = counts.tolist()
        proof.p_values[f"token {place + 1}"] = chi_square(counts)
    references = [tuple(result.tokens) for result in plain]
    law.learn(asked, references)
    for index, (answer, reference) in enumerate(zip(answers, references, strict=True)):
        if answer != reference:
            proof.border = max(proof.border, law.distance(index, asked[index], answer, reference))
    proof.identical_to_plain = sum(map(tuple.__eq__, answers, references)) / len(answers)
    return proof


def chi_square(counts: Tensor) -> float:
    """The p-value of counts that should be equal up to chance (Pearson; the tail is the incomplete gamma function)."""
    expected = counts.sum().double() / len(counts)
    statistic = ((counts.double() - expected) ** 2 / expected).sum()
    return float(torch.special.gammaincc(torch.tensor((len(counts) - 1) / 2, dtype=torch.float64), statistic.cpu() / 2))


@dataclass(frozen=True)
class _Placed:
    """Where the tokens of one answer lie, each under the law of its own prefix. Lists of K numbers."""

    above: list[float]
    """Probability of all likelier tokens."""
    share: list[float]
    """Its own probability (with that of tokens that tie with it)."""
    start: list[float]
    """Probability of all tokens of smaller id: where its share begins for the engine's draw."""
    chance: list[float]
    """Its own probability."""


class Law:
    """The exact law of each token of sampled answers, from stock passes; each distinct answer is computed once."""

    def __init__(self, target: TargetModel, settings: SamplingSettings) -> None:
        self.target, self.settings = target, settings
        self.border_allowed = BORDER if target.dtype == torch.float32 else 1.0
        self._placed: dict[tuple[tuple[int, ...], tuple[int, ...]], _Placed] = {}
        warpers: list[Any] = [TemperatureLogitsWarper(settings.temperature)]
        warpers += [TopKLogitsWarper(settings.top_k)] if settings.top_k else []
        warpers += [TopPLogitsWarper(settings.top_p)] if settings.top_p < 1 else []
        self._warpers = warpers

    def learn(self, asked: Sequence[Sequence[int]], answers: Sequence[tuple[int, ...]]) -> None:
        """Computes what is not known yet, texts of one length in one pass."""
        pairs = dict.fromkeys((tuple(prompt), answer) for prompt, answer in zip(asked, answers, strict=True))
        new = sorted((pair for pair in pairs if pair not in self._placed), key=lambda pair: len(pair[0]))
        while new:
            length = len(new[0][0])
            most = max(1, PASS_ELEMENTS // (self.target.vocab_size * (length + self.settings.tokens)))
            part = [pair for pair in new[:most] if len(pair[0]) == length]
            new = new[len(part) :]
            self._learn(part)

    @torch.inference_mode()
    def _learn(self, pairs: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]) -> None:
        device, count = self.target.device, self.settings.tokens
        texts = torch.tensor([[*prompt, *answer[:-1]] for prompt, answer in pairs], device=device)
        tokens_AK1 = torch.tensor([answer for _, answer in pairs], device=device).unsqueeze(-1)
        logits_AKV = stock_logits_of_batch(self.target, texts, count)
        law_AKV = self._warped(logits_AKV.flatten(0, 1)).double().softmax(-1).view(logits_AKV.shape)
        chance_AK1 = law_AKV.gather(-1, tokens_AK1)
        above_AK = (law_AKV * (law_AKV > chance_AK1)).sum(-1)
        share_AK = (law_AKV * (law_AKV == chance_AK1)).sum(-1)
        start_AK = law_AKV.cumsum(-1).gather(-1, tokens_AK1).squeeze(-1) - chance_AK1.squeeze(-1)
        columns = [part.tolist() for part in (above_AK, share_AK, start_AK, chance_AK1.squeeze(-1))]
        for pair, *numbers in zip(pairs, *columns, strict=True):
            self._placed[pair] = _Placed(*numbers)

    def _warped(self, logits_NV: Tensor) -> Tensor:
        for warper in self._warpers:
            logits_NV = warper(None, logits_NV)
        return logits_NV

    def places(self, asked: Sequence[Sequence[int]], answers: Sequence[tuple[int, ...]]) -> Tensor:
        """Each token's place on its law's line, float64 [A, K] in [0, 1); -1 for a token without probability."""
        placed = [self._placed[tuple(prompt), answer] for prompt, answer in zip(asked, answers, strict=True)]
        above_AK = torch.tensor([one.above for one in placed], dtype=torch.float64)
        share_AK = torch.tensor([one.share for one in placed], dtype=torch.float64)
        chance_AK = torch.tensor([one.chance for one in placed], dtype=torch.float64)
        generator = torch.Generator().manual_seed(self.settings.seed)
        inside_AK = torch.rand(above_AK.shape, generator=generator, dtype=torch.float64)
        return torch.where(chance_AK > 0, above_AK + inside_AK * share_AK, -1.0)

    def distance(self, index: int, prompt: Sequence[int], answer: tuple[int, ...], reference: tuple[int, ...]) -> float:
        """How far the draw at which two answers part was from the farther of the two tokens' shares."""
        place = next(i for i, (one, other) in enumerate(zip(answer, reference, strict=True)) if one != other)
        draw = float(self.settings.params(index).uniforms(extra=1)[place])
        distances = []
        for tokens in (answer, reference):
            placed = self._placed[tuple(prompt), tokens]
            start, end = placed.start[place], placed.start[place] + placed.chance[place]
            distances.append(max(start - draw, draw - end, 0.0))
        return max(distances)
