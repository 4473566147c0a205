"""`lasd prove`: in fp32, are the answers of plain decoding and of each method those of transformers' `generate`?

Lower precisions round differently for different numbers of rows, so only fp32 can prove a decoder exact. A proof counts
only if drafts were made and some were accepted: equal answers without a draft say nothing about drafting.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from lasd.evaluation.environment import environment, file_sha256
from lasd.evaluation.exactness import Referee
from lasd.evaluation.metrics import PLAIN, REFERENCE, Divergence, Run
from lasd.evaluation.prompts import Prompt, check_file, read_prompts
from lasd.evaluation.report import progress
from lasd.evaluation.runners import Runner
from lasd.evaluation.setup import ModelChoice, build_runners, group_prompts, method_names

Verdict = Literal["equal", "different", "nothing proven"]


@dataclass(frozen=True)
class ProveConfig:
    """The settings of one proof; `methods` beside `plain`, () = the artifact's own. The dtype is fp32."""

    choice: ModelChoice
    prompts: Path
    methods: tuple[str, ...] = ()
    limit: int | None = None
    max_new_tokens: int = 64
    batch_size: int = 1


@dataclass
class Proof:
    """How one method compares with `generate` over all prompts."""

    method: str
    prompts: int = 0
    equal: int = 0
    tokens: int = 0
    steps: int = 0
    kept: int = 0
    drafted: int = 0
    accepted: int = 0
    divergences: list[Divergence] | None = None

    def add(self, run: Run) -> None:
        """Takes in one judged run."""
        self.prompts += len(run.identical)
        self.equal += sum(run.identical)
        self.tokens += run.num_tokens
        self.steps += run.steps
        self.kept += run.kept
        self.drafted += run.nodes - run.steps
        self.accepted += sum(run.accepted_per_step)
        self.divergences = [*(self.divergences or []), *run.divergences]

    @property
    def verdict(self) -> Verdict:
        """All equal proves nothing where a drafting method never drafted, or none of its drafts was ever accepted."""
        if self.equal < self.prompts:
            return "different"
        return "equal" if self.method == PLAIN or (self.drafted and self.accepted) else "nothing proven"

    def to_dict(self) -> dict[str, Any]:
        """A JSON-able dict, with what follows from the counts."""
        return asdict(self) | {
            "rejected": self.drafted - self.accepted,
            "tokens_per_step": self.kept / self.steps if self.steps else None,
            "share_identical": self.equal / self.prompts if self.prompts else None,
            "first_divergences": [asdict(item) for item in self.divergences or []],
            "verdict": self.verdict,
        }


def run_prove(config: ProveConfig) -> dict[str, Any]:
    """Compares all answers and returns the proof; "proven" is true only if every method's verdict is "equal"."""
    check_file(config.prompts)
    target, artifact = config.choice.load()
    prompts = read_prompts(config.prompts, target, config.limit, max_new_tokens=config.max_new_tokens)
    methods = method_names(config.methods, artifact)
    runners = build_runners(target, artifact, methods, prompts, config.max_new_tokens, config.batch_size)
    proofs = compare(group_prompts(prompts, config.batch_size), runners, Referee(target))
    return {
        "proven": all(proof.verdict == "equal" for proof in proofs),
        "methods": {proof.method: proof.to_dict() for proof in proofs},
        "settings": {
            "model": target.source,
            "artifact": None if artifact is None else str(artifact.path),
            "prompts": str(config.prompts),
            "prompts_sha256": file_sha256(config.prompts),
            "max_new_tokens": config.max_new_tokens,
            "batch_size": config.batch_size,
            "environment": environment(target),
        },
    }


def compare(units: Sequence[Sequence[Prompt]], runners: Sequence[Runner], referee: Referee) -> list[Proof]:
    """Runs every contestant on every unit and compares each with `generate`."""
    proofs = {runner.name: Proof(runner.name) for runner in runners if runner.name != REFERENCE}
    for unit in progress(units, "proving"):
        runs = {runner.name: runner.run([prompt.ids for prompt in unit]) for runner in runners}
        for name, proof in proofs.items():
            referee.judge(unit, runs[REFERENCE], runs[name])
            proof.add(runs[name])
    return list(proofs.values())
