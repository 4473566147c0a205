"""The steps of the tree search, each with its progress bar and its line in the log.

Legend: M places, D hidden size, K heads.
"""

import hashlib
import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Protocol

import torch

from lasd.artifacts import Artifact
from lasd.decoding.step_time import measure_step_time
from lasd.decoding.target import TargetModel
from lasd.decoding.tree import TreeShape
from lasd.drafters.medusa import MedusaHeads
from lasd.errors import LasdError
from lasd.evaluation.prompts import read_prompts
from search.answers import Answer, answer_prompts, fingerprint_of, held_out_answers
from search.calibrate_heads import Calibration, calibrate
from search.tree_config import MedusaTreeConfig
from search.tree_growth import Growth, grow, replay
from search.tree_report import PLAIN, Choice
from search.tree_sizing import StepCosts, finalists, measure_trees, predict, prompts_at

logger = logging.getLogger(__name__)

DEFAULT_HELD_OUT_SHARE = 0.02
ROWS = (1, 2, 4, 6, 8, 12, 16, 20, 24, 32, 40, 48, 56, 64, 80, 96, 128, 192, 256)
PROBE_NODES, PROBE_REPEATS = 16, 3
CHAIN = "chain"
MIN_OWN_SHARE = 0.9


class Reporter(Protocol):
    """Where steps report to."""

    def bar(self, text: str, total: int) -> AbstractContextManager[Callable[[int], None]]:
        """A progress bar."""

    def note(self, stage: str, **figures: Any) -> None:
        """A line in the log."""


class TreeSearch:
    """One search: what it is given, and its steps in order.

    Args:
        config: the settings.
        artifact: trained heads.
        target: the model; checked against the artifact.
        log: where the steps report to.

    Raises:
        LasdError: the artifact is not heads of this model, or a setting does not fit the heads or the model.
    """

    def __init__(self, config: MedusaTreeConfig, artifact: Artifact, target: TargetModel, log: Reporter):
        self.config, self.artifact, self.target, self.log = config, artifact, target, log
        self.heads = load_heads(artifact, target, config)
        self.contexts = usable_contexts(config, target)

    def load_answers(self) -> list[Answer]:
        """Answers of the model that training did not see, enough to judge and to measure."""
        config, target = self.config, self.target
        limit = config.limit + config.measure_prompts if config.limit else 0
        if config.data:
            answers = held_out_answers(config.data, target, held_out_share(config, self.artifact), limit)
        else:
            prompts = read_prompts(config.prompts, target, limit or None, max_new_tokens=config.answer_tokens)
            with self.log.bar("answers", len(prompts)) as done:
                answers = answer_prompts(target, prompts, config.answer_tokens, config.folder / "answers.json", done)
        tokens = [sum(answer.mask) for answer in answers]
        if max(tokens) < 3:
            came = config.data or config.prompts
            raise LasdError(
                f"the {len(answers)} answers of {came} are shorter than 3 tokens; no head can be judged on them: "
                "give other prompts"
            )
        self.log.note("answers", answers=len(answers), tokens=sum(tokens))
        return answers

    def calibrate(self, answers: Sequence[Answer]) -> Calibration:
        """Rank counts on the answers; what was counted for the same heads, model and answers is not counted again."""
        assert self.artifact.weights_path is not None
        with open(self.artifact.weights_path, "rb") as file:
            weights = hashlib.file_digest(file, "sha256").hexdigest()[:32]
        fingerprint = {
            "format": 1,
            "heads": weights,
            "base_model": self.artifact.manifest.base_model.weights_fingerprint,
            "answers": fingerprint_of(answers),
            "max_rank": self.config.max_rank,
            "dtype": str(self.target.dtype).removeprefix("torch."),
            "quantization": self.target.quantization,
        }
        path = self.config.folder / "calibration.json"
        with self.log.bar("calibration", len(answers)) as done:
            calibration = calibrate(
                self.target, self.heads, answers, self.config.max_rank, fingerprint, path, progress=done
            )
        counts, own = calibration.counts, calibration.own_share
        self.log.note("calibration", answers=calibration.answers, own_share=own, top1=counts.top(1), top5=counts.top(5))
        if own < MIN_OWN_SHARE:
            logger.warning(
                "only %.1f%% of the answer tokens are the model's own likeliest choice (sampled answers, or another "
                "model's?); heads are judged on those alone, so expect less than predicted",
                100 * own,
            )
        return calibration

    def grow(self, calibration: Calibration) -> Growth:
        """The tree in the order in which it grows."""
        config = self.config
        return grow(
            calibration.counts.values(), config.max_depth or self.heads.num_heads, config.max_rank, config.max_nodes
        )

    def measure_costs(self, growth: Growth, answers: Sequence[Answer]) -> StepCosts:
        """Times of the verify pass and of the heads at each depth, and what the decoder's steps take besides."""
        repeats = self.config.step_repeats
        rows = [n for n in ROWS if n < growth.max_nodes] + [growth.max_nodes]
        depths = range(1, self.heads.num_heads + 1)
        extra = {f"draft_{depth}": partial(self._draft, depth) for depth in depths}
        with self.log.bar("step times", repeats * (len(rows) * len(self.contexts) + len(extra))) as done:
            times = measure_step_time(
                self.target, rows, self.contexts, repeats, extra=extra, progress=lambda n, _: done(n)
            )
        drafting_ms = {0: 0.0} | {depth: times.extra_ms[f"draft_{depth}"] for depth in depths}
        probe = growth.shape(min(PROBE_NODES, growth.max_nodes))
        prompts = prompts_at(self.contexts[0], answers, self.config.measure_tokens, 1)
        did = measure_trees(
            self.target, self.heads, {"probe": probe}, prompts, self.config.measure_tokens, PROBE_REPEATS
        )["probe"]
        known_ms = times.at(probe.num_nodes, round(did.cached_tokens)) + drafting_ms[probe.max_depth]
        costs = StepCosts(times, drafting_ms, max(0.0, did.step_ms - known_ms) if did.steps else 0.0)
        self.log.note("step_time", **times.to_dict(), overhead_ms=costs.overhead_ms)
        return costs

    def choose(
        self, growth: Growth, calibration: Calibration, costs: StepCosts, context: int, answers: Sequence[Answer]
    ) -> Choice:
        """Predicts every size at one number of cached tokens; measures the best few beside plain decoding and chain."""
        config, chain = self.config, chain_growth(self.config.max_depth or self.heads.num_heads)
        sized = predict(growth, replay(growth, calibration.runs), costs, context)
        sizes = finalists(sized, costs.times.rows, config.finalists)
        shapes: dict[str, TreeShape | None] = {PLAIN: None} | {
            f"tree of {nodes}": growth.shape(nodes) for nodes in sizes
        }
        said = {PLAIN: sized[0]} | {f"tree of {nodes}": sized[nodes - 1] for nodes in sizes}
        if chain.max_nodes <= config.max_nodes:
            shapes[CHAIN] = chain.shape(chain.max_nodes)
            said[CHAIN] = predict(chain, replay(chain, calibration.runs), costs, context)[-1]
        prompts = prompts_at(context, answers[::-1], config.measure_tokens, config.measure_prompts)
        with self.log.bar(f"decoding at {context:,}", len(shapes) * len(prompts) * config.measure_repeats) as done:
            did = measure_trees(
                self.target, self.heads, shapes, prompts, config.measure_tokens, config.measure_repeats, done
            )
        if not did[PLAIN].steps:
            raise LasdError(
                f"the {len(prompts)} prompts that were decoded have answers of one token; nothing can be measured: "
                "raise --measure_prompts or give other prompts"
            )
        self.log.note("measured", context=context, trees={name: one.to_dict() for name, one in did.items()})
        return Choice(context, shapes, said, did)

    @torch.inference_mode()
    def _draft(self, depth: int) -> torch.Tensor:
        """What a drafter does with the first `depth` heads."""
        hidden_MD = torch.zeros(
            1, self.target.hidden_size, dtype=self.target.dtype, device=self.target.lm_head.weight.device
        )
        return self.heads.candidates(hidden_MD, self.target, self.config.max_rank, slice(0, depth))


def chain_growth(length: int) -> Growth:
    """The chain of each head's likeliest guess, as a tree that grew."""
    return Growth(tuple((0,) * depth for depth in range(1, length + 1)), (0.0,) * length)


def held_out_share(config: MedusaTreeConfig, artifact: Artifact) -> float:
    """The share of the data to judge on: what training held out, unless the settings ask for another."""
    held_out = artifact.manifest.settings.get("training", {}).get("held_out_share")
    if held_out == 0 and not config.held_out_share:
        raise LasdError(
            f"training of {artifact.path} held nothing out, and heads look too good on answers they have learned; "
            "give --prompts FILE, or --held_out_share all the same"
        )
    if held_out is not None and config.held_out_share > held_out:
        logger.warning("--held_out_share %g is more than training held out (%g)", config.held_out_share, held_out)
    return config.held_out_share or held_out or DEFAULT_HELD_OUT_SHARE


def load_heads(artifact: Artifact, target: TargetModel, config: MedusaTreeConfig) -> MedusaHeads:
    """The artifact's heads on the target's device, after all checks that need no device."""
    kind = artifact.manifest.kind
    if kind != "medusa":
        raise LasdError(
            f"{artifact.path} is an artifact of kind {kind}; a tree is grown for kind medusa: give trained heads"
        )
    artifact.check_compatible(target)
    heads = MedusaHeads.from_tensors(artifact.tensors())
    if config.max_depth > heads.num_heads:
        raise LasdError(
            f"--max_depth {config.max_depth} is deeper than the {heads.num_heads} heads of {artifact.path}; "
            f"give at most {heads.num_heads}, or train more heads"
        )
    if config.max_rank > target.vocab_size:
        raise LasdError(
            f"--max_rank {config.max_rank} is more than the {target.vocab_size} tokens of {target.name}; give less"
        )
    return heads.to(device=target.lm_head.weight.device, dtype=target.dtype).eval().requires_grad_(False)


def usable_contexts(config: MedusaTreeConfig, target: TargetModel) -> list[int]:
    """The numbers of cached tokens asked for; one that leaves no room for the tree is lowered to the most that does."""
    most = target.max_positions - max(config.max_nodes, config.measure_tokens)
    if most < 1:
        raise LasdError(
            f"{target.name} has {target.max_positions} positions, no more than a tree of {config.max_nodes} nodes or "
            f"an answer of {config.measure_tokens} tokens takes; lower --max_nodes and --measure_tokens"
        )
    contexts = list(dict.fromkeys(min(context, most) for context in config.contexts))
    if contexts != config.contexts:
        logger.warning(
            "%s has %d positions: sized for %s cached tokens instead of %s",
            target.name,
            target.max_positions,
            contexts,
            config.contexts,
        )
    return contexts
