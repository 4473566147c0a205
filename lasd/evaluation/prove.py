"""`lasd prove`: are the answers of plain decoding and of each method those of transformers' `generate`?

The reference answers one prompt at a time; the methods answer at every batch size that is asked for. In fp32 every
answer must equal the reference: that is the proof, and it counts only if something was drafted, accepted and rejected.
Lower precisions round differently for different numbers of rows: there each first divergence is looked into
(`lasd.evaluation.rounding`), and the report holds only if all are rounding.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from lasd.artifacts import Artifact, load_artifact, update_artifact
from lasd.artifacts.provenance import provenance
from lasd.decoding.sampling import SamplingParams
from lasd.decoding.target import TargetModel
from lasd.drafters import load_drafter
from lasd.errors import LasdError
from lasd.evaluation.environment import environment, file_sha256
from lasd.evaluation.exactness import Referee
from lasd.evaluation.metrics import PLAIN, Run
from lasd.evaluation.prompts import Prompt, check_file, read_prompts
from lasd.evaluation.report import progress
from lasd.evaluation.rounding import ROUNDING, PassShape, WatchedDrafter, diagnose
from lasd.evaluation.runners import DecoderRunner, GenerateRunner, Runner
from lasd.evaluation.sampling_proof import SamplingProof, SamplingSettings, prove_sampling
from lasd.evaluation.setup import ModelChoice, group_prompts, method_names

Verdict = Literal["equal", "different", "rounding", "unexplained", "nothing proven"]
GREEDY_COLUMNS = ("prompts", "equal", "tokens", "drafted", "accepted", "rejected", "tokens_per_step", "verdict")
SAMPLING_COLUMNS = ("samples", "drafted", "accepted", "p_value", "identical_to_plain", "verdict")


@dataclass(frozen=True)
class ProveConfig:
    """The settings of one proof; `methods` beside `plain`, () = the artifact's own; `sampling` None = not tested."""

    choice: ModelChoice
    prompts: Path
    methods: tuple[str, ...] = ()
    limit: int | None = None
    max_new_tokens: int = 64
    batch_sizes: tuple[int, ...] = (1,)
    sampling: SamplingSettings | None = None


@dataclass
class Proof:
    """How one method at one batch size compares with `generate` over all prompts."""

    method: str
    batch_size: int = 1
    exact_expected: bool = True
    prompts: int = 0
    equal: int = 0
    tokens: int = 0
    steps: int = 0
    kept: int = 0
    drafted: int = 0
    accepted: int = 0
    divergences: list[dict[str, Any]] = field(default_factory=list)

    def add(self, run: Run, diagnoses: Sequence[Mapping[str, Any]]) -> None:
        """Takes in one judged run and what is known about each of its divergences."""
        self.prompts += len(run.identical)
        self.equal += sum(run.identical)
        self.tokens += run.num_tokens
        self.steps += run.steps
        self.kept += run.kept
        self.drafted += run.nodes - run.steps
        self.accepted += sum(run.accepted_per_step)
        for divergence, diagnosis in zip(run.divergences, diagnoses, strict=True):
            self.divergences.append(asdict(divergence) | dict(diagnosis))

    @property
    def rejected(self) -> int:
        """Drafted tokens that were not accepted."""
        return self.drafted - self.accepted

    @property
    def verdict(self) -> Verdict:
        """What the answers show. Without a draft, an acceptance and a rejection they show nothing about drafting."""
        if self.equal < self.prompts and self.exact_expected:
            return "different"
        if any(item["verdict"] != ROUNDING for item in self.divergences):
            return "unexplained"
        if self.method != PLAIN and not (self.drafted and self.accepted and self.rejected):
            return "nothing proven"
        return "equal" if self.equal == self.prompts else "rounding"

    @property
    def passed(self) -> bool:
        """Whether the verdict is one to exit with 0 on."""
        return self.verdict in ("equal", "rounding")

    def to_dict(self) -> dict[str, Any]:
        """A JSON-able dict, with what follows from the counts."""
        return asdict(self) | {
            "rejected": self.rejected,
            "tokens_per_step": self.kept / self.steps if self.steps else None,
            "share_identical": self.equal / self.prompts if self.prompts else None,
            "verdict": self.verdict,
        }


def run_prove(config: ProveConfig) -> dict[str, Any]:
    """Compares all answers and returns the result.

    "passed" is what the exit code follows: all verdicts are good. "proven" says so for fp32 alone.
    """
    if not config.batch_sizes or min(config.batch_sizes) < 1:
        raise LasdError(f"--batch-size is {list(config.batch_sizes)}, expected numbers of at least 1")
    check_file(config.prompts)
    target, artifact = config.choice.load()
    most_tokens = max(config.max_new_tokens, config.sampling.tokens if config.sampling else 0)
    prompts = read_prompts(config.prompts, target, config.limit, max_new_tokens=most_tokens)
    methods = [PLAIN, *method_names(config.methods, artifact)]
    greedy = _greedy(config, target, artifact, prompts, methods)
    sampling: list[SamplingProof] = []
    if config.sampling is not None:
        drafters = {name: load_drafter(artifact, target, name) for name in methods}
        sampling = prove_sampling(target, drafters, prompts, config.sampling, max(config.batch_sizes))
    passed = all(proof.passed for proof in greedy) and all(proof.passed for proof in sampling)
    exact, sha256 = target.dtype == torch.float32, file_sha256(config.prompts)
    return {
        "passed": passed,
        "proven": passed and exact,
        "mode": "proof" if exact else "report",
        "greedy": [proof.to_dict() for proof in greedy],
        "sampling": [proof.to_dict() for proof in sampling],
        "settings": {
            "model": target.source,
            "revision": target.revision,
            "artifact": None if artifact is None else str(artifact.path),
            "prompts": str(config.prompts),
            "num_prompts": len(prompts),
            "prompts_sha256": sha256,
            "max_new_tokens": config.max_new_tokens,
            "batch_sizes": list(config.batch_sizes),
            "sampling": None if config.sampling is None else asdict(config.sampling),
            "environment": environment(target),
        },
        "provenance": provenance(sys.argv, config.sampling.seed if config.sampling else 0, f"sha256:{sha256}"),
    }


def _greedy(
    config: ProveConfig,
    target: TargetModel,
    artifact: Artifact | None,
    prompts: Sequence[Prompt],
    methods: Sequence[str],
) -> list[Proof]:
    reference = GenerateRunner(target, config.max_new_tokens)
    expected = {prompt.ids: reference.run([prompt.ids]).tokens[0] for prompt in progress(prompts, "generate")}
    context = max(len(prompt.ids) for prompt in prompts) + config.max_new_tokens
    params = SamplingParams(max_new_tokens=config.max_new_tokens)
    proofs = []
    for size in dict.fromkeys(config.batch_sizes):
        for name in methods:
            drafter = load_drafter(artifact, target, name)
            watched = None if drafter is None else WatchedDrafter(drafter)
            runner = DecoderRunner(name, target, watched, params, max_slots=size, max_context=context)
            units = group_prompts(prompts, size)
            proofs.append(compare(target, units, runner, expected, watched, batch_size=size))
    return proofs


def compare(
    target: TargetModel,
    units: Sequence[Sequence[Prompt]],
    runner: Runner,
    expected: Mapping[tuple[int, ...], list[int]],
    watched: WatchedDrafter | None = None,
    batch_size: int = 1,
) -> Proof:
    """Has one method answer every unit, compares with the expected answers, and looks into each first divergence.

    Args:
        expected: prompt -> the reference's answer.
        watched: the runner's drafter; None for plain decoding.
    """
    proof = Proof(runner.name, batch_size, exact_expected=target.dtype == torch.float32)
    referee = Referee(target)
    for unit in progress(units, f"{runner.name}, batch {batch_size}"):
        run = runner.run([prompt.ids for prompt in unit])
        referee.judge(unit, Run([expected[prompt.ids] for prompt in unit], 0.0, 0), run)
        width = max(len(prompt.ids) for prompt in unit)
        answers = {prompt.id: (prompt, got) for prompt, got in zip(unit, run.tokens, strict=True)}
        diagnoses = []
        for divergence in run.divergences:
            prompt, got = answers[divergence.prompt]
            shape = _shape(watched, prompt, divergence.position, len(unit), width)
            found = diagnose(target, prompt.ids, expected[prompt.ids], got, divergence.position, shape, width)
            diagnoses.append(asdict(found))
        proof.add(run, diagnoses)
    return proof


def _shape(watched: WatchedDrafter | None, prompt: Prompt, position: int, sequences: int, width: int) -> PassShape:
    """The shape of the pass that decided an answer token."""
    if position == 0:
        return PassShape(sequences, width)
    noted = watched.shape_at(prompt.ids, position) if watched is not None else None
    return noted or PassShape(sequences, 1)


def proof_record(result: Mapping[str, Any]) -> dict[str, Any]:
    """The result as the card shows it: a row a method and batch size."""
    settings = result["settings"]
    record: dict[str, Any] = {
        "proven": result["proven"],
        "passed": result["passed"],
        "prompts": settings["num_prompts"],
        "prompts_sha256": settings["prompts_sha256"],
        "max_new_tokens": settings["max_new_tokens"],
        "device": settings["environment"]["device"],
        "date": result["provenance"]["date"],
        "greedy": {
            f"{row['method']}, batch {row['batch_size']}": {column: row[column] for column in GREEDY_COLUMNS}
            for row in result["greedy"]
        },
    }
    if result["sampling"]:
        record["sampling"] = {
            row["method"]: {column: row[column] for column in SAMPLING_COLUMNS} for row in result["sampling"]
        }
    return record


def record_in_artifact(config: ProveConfig, result: Mapping[str, Any]) -> None:
    """Writes the result into the artifact's `measured["proof"]`, beside those of other dtypes."""
    config.choice.check_record()
    assert config.choice.artifact is not None
    before = load_artifact(config.choice.artifact).manifest.measured.get("proof", {})
    dtype = result["settings"]["environment"]["dtype"]
    update_artifact(config.choice.artifact, measured={"proof": {**before, dtype: proof_record(result)}})
