"""How many nodes a tree should have on this device: predicted from step times, then measured with the decoder."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lasd.decoding.decoder import Decoder
from lasd.decoding.request import GenerationResult
from lasd.decoding.sampling import SamplingParams
from lasd.decoding.step_time import StepTimes
from lasd.decoding.target import TargetModel
from lasd.decoding.tree import TreeShape
from lasd.drafters.medusa import MedusaDrafter, MedusaHeads
from search.answers import Answer
from search.tree_growth import Growth

WARM_UP_TOKENS = 4


@dataclass(frozen=True)
class Prediction:
    """What a tree of `nodes` nodes should do behind `context` cached tokens."""

    context: int
    nodes: int
    depth: int
    tokens_per_step: float
    step_ms: float

    @property
    def tokens_per_s(self) -> float:
        """Tokens kept a second."""
        return 1e3 * self.tokens_per_step / self.step_ms

    def to_dict(self) -> dict[str, Any]:
        """Figures for the profile."""
        return {
            "nodes": self.nodes,
            "depth": self.depth,
            "tokens_per_step": round(self.tokens_per_step, 4),
            "step_ms": round(self.step_ms, 3),
            "tokens_per_s": round(self.tokens_per_s, 3),
        }


@dataclass
class Measurement:
    """What a tree did in the real decoder.

    Attributes:
        name: what the tree is called in tables.
        nodes: nodes of the tree, the root included.
        tokens: tokens kept by verify steps, over all prompts (one pass over each).
        steps: verify steps, over all prompts.
        rounds_s: for each prompt the decode seconds of its rounds.
        cached_tokens: mean number of cached tokens while it decoded.
    """

    name: str
    nodes: int
    tokens: int = 0
    steps: int = 0
    cached_tokens: float = 0.0
    rounds_s: list[list[float]] = field(default_factory=list)

    def add(self, answer: GenerationResult, *, first: bool) -> None:
        """Adds a round over the last prompt. Greedy rounds give the same tokens: only the `first` counts them."""
        self.rounds_s[-1].append(answer.stats.decode_s)
        if first:
            self.tokens += answer.stats.tokens - answer.stats.answers
            self.steps += answer.stats.steps
            cached = answer.prompt_tokens + len(answer.tokens) / 2
            self.cached_tokens += (cached - self.cached_tokens) / len(self.rounds_s)

    @property
    def tokens_per_step(self) -> float:
        """Tokens kept by verify steps / verify steps."""
        return self.tokens / self.steps if self.steps else 0.0

    @property
    def tokens_per_s(self) -> float:
        """Tokens kept by verify steps / sum over prompts of the median decode time."""
        seconds = sum(statistics.median(rounds) for rounds in self.rounds_s)
        return self.tokens / seconds if seconds else 0.0

    @property
    def step_ms(self) -> float:
        """Milliseconds a step."""
        return 1e3 * self.tokens_per_step / self.tokens_per_s if self.tokens else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Figures for the profile."""
        return {
            "nodes": self.nodes,
            "tokens": self.tokens,
            "steps": self.steps,
            "cached_tokens": round(self.cached_tokens),
            "tokens_per_step": round(self.tokens_per_step, 4),
            "step_ms": round(self.step_ms, 3),
            "tokens_per_s": round(self.tokens_per_s, 3),
        }


@dataclass(frozen=True)
class StepCosts:
    """What a step costs on this device.

    Attributes:
        times: verify passes.
        drafting_ms: depth of the tree -> time of the heads that fill it; 0 -> 0.
        overhead_ms: the rest of a step (acceptance, cache, Python).
    """

    times: StepTimes
    drafting_ms: Mapping[int, float]
    overhead_ms: float

    def step_ms(self, nodes: int, depth: int, context: int) -> float:
        """Milliseconds of a step with a tree of `nodes` nodes behind `context` cached tokens."""
        return self.times.at(nodes, context) + self.drafting_ms[depth] + self.overhead_ms


def predict(growth: Growth, tokens_per_step: Sequence[float], costs: StepCosts, context: int) -> list[Prediction]:
    """Tokens a step and milliseconds a step for every size of the tree, the root alone (plain decoding) first.

    Args:
        growth: the grown tree.
        tokens_per_step: for 1, 2, ... nodes what a step keeps.
        costs: of this device.
        context: cached tokens.
    """
    predictions = []
    for nodes in range(1, growth.max_nodes + 1):
        depth = growth.depth(nodes)
        step_ms = costs.step_ms(nodes, depth, context)
        predictions.append(Prediction(context, nodes, depth, tokens_per_step[nodes - 1], step_ms))
    return predictions


def finalists(predictions: Sequence[Prediction], sizes: Sequence[int], count: int) -> list[int]:
    """The sizes worth measuring: the best predicted one, then the best of `sizes`, each an eighth away from the others.

    Neighbouring sizes differ by less than any measurement can show.
    """
    ranked = sorted((p for p in predictions if p.nodes > 1), key=lambda p: -p.tokens_per_s)
    chosen = [ranked[0].nodes] if ranked else []
    for prediction in ranked[1:]:
        apart = all(abs(prediction.nodes - nodes) * 8 >= nodes for nodes in chosen)
        if len(chosen) < count and prediction.nodes in sizes and apart:
            chosen.append(prediction.nodes)
    return sorted(chosen[:count])


def measure_trees(
    target: TargetModel,
    heads: MedusaHeads,
    shapes: Mapping[str, TreeShape | None],
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    repeats: int,
    progress: Callable[[int], None] = lambda done: None,
) -> dict[str, Measurement]:
    """Decodes the prompts greedily with each tree, the trees taking turns prompt by prompt.

    Args:
        shapes: name -> tree; None is plain decoding.
        prompts: token ids.
        max_new_tokens: tokens a prompt; an answer that ends earlier ends.
        repeats: rounds over each prompt; the median of their times counts.
        progress: told how many answers are decoded.

    Returns:
        Name -> what was measured.
    """
    params = SamplingParams(max_new_tokens=max_new_tokens)
    drafters = {name: MedusaDrafter(heads, shape, target) if shape else None for name, shape in shapes.items()}
    results = {name: Measurement(name, shape.num_nodes if shape else 1) for name, shape in shapes.items()}
    order, done = list(shapes), 0
    for drafter in drafters.values():
        Decoder(target, drafter).generate(prompts[:1], SamplingParams(max_new_tokens=WARM_UP_TOKENS))
    for prompt in prompts:
        for result in results.values():
            result.rounds_s.append([])
        for round_ in range(repeats):
            order = order[1:] + order[:1]
            for name in order:
                (answer,) = Decoder(target, drafters[name]).generate([prompt], params)  # one cache at a time
                results[name].add(answer, first=round_ == 0)
                done += 1
                progress(done)
    return results


def prompts_at(context: int, answers: Sequence[Answer], max_new_tokens: int, count: int) -> list[list[int]]:
    """Prompts that decode at about `context` cached tokens, with other conversations before them while they fit.

    Args:
        context: cached tokens while the prompt is answered.
        answers: conversations; the first `count` give the prompts, up to their last answer.
        max_new_tokens: tokens that will be decoded.
        count: prompts wanted.

    Returns:
        At most `count` prompts (fewer where `answers` has fewer), each at most `context - max_new_tokens / 2` tokens
        long, or a conversation's own prompt if that is longer.
    """
    room = context - max_new_tokens // 2
    prompts = []
    for index, answer in enumerate(answers[:count]):
        prompt = answer.ids[: answer.last_start]
        others = [*answers[index + 1 :], *answers[:index]]
        for earlier in others:
            if len(prompt) + len(earlier.ids) <= room:
                prompt = [*earlier.ids, *prompt]
        prompts.append(prompt)
    return prompts
