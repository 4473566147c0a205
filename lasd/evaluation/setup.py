"""From what a command was told to what it runs: the model, the artifact, the methods and the units of prompts."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lasd.artifacts import Artifact, load_artifact
from lasd.decoding.loading import load_target
from lasd.decoding.target import TargetModel
from lasd.drafters import load_drafter
from lasd.errors import LasdError
from lasd.evaluation.metrics import PLAIN, REFERENCE
from lasd.evaluation.prompts import Prompt
from lasd.evaluation.runners import DecoderRunner, GenerateRunner, Runner


@dataclass(frozen=True)
class ModelChoice:
    """Which model to decode, with which artifact, and how to load it."""

    model: str
    artifact: Path | None = None
    dtype: str = "auto"
    device: str = "auto"
    revision: str | None = None
    quantization: str | None = None

    def load(self) -> tuple[TargetModel, Artifact | None]:
        """The loaded target, and the artifact (read first: it is quick). Loading a drafter checks that they fit."""
        artifact = None if self.artifact is None else load_artifact(self.artifact)
        target = load_target(
            self.model, dtype=self.dtype, device=self.device, revision=self.revision, quantization=self.quantization
        )
        return target, artifact


def method_names(asked: Sequence[str], artifact: Artifact | None) -> list[str]:
    """The methods beside `generate` and `plain`, each once, in the order asked for; by default the artifact's own."""
    names = list(asked) or ([artifact.manifest.kind] if artifact is not None else [])
    return [name for name in dict.fromkeys(names) if name not in (PLAIN, REFERENCE)]


def build_runners(
    target: TargetModel,
    artifact: Artifact | None,
    methods: Sequence[str],
    prompts: Sequence[Prompt],
    max_new_tokens: int,
    batch_size: int = 1,
) -> list[Runner]:
    """`generate`, `plain` and a runner for each method; every decoder's cache has room for the longest prompt."""
    context = max(len(prompt.ids) for prompt in prompts) + max_new_tokens
    drafters = {PLAIN: None} | {name: load_drafter(artifact, target, name) for name in methods}
    ours: list[Runner] = [
        DecoderRunner(name, target, drafter, max_new_tokens, max_slots=batch_size, max_context=context)
        for name, drafter in drafters.items()
    ]
    return [GenerateRunner(target, max_new_tokens), *ours]


def group_prompts(prompts: Sequence[Prompt], batch_size: int) -> list[list[Prompt]]:
    """Units of up to `batch_size` prompts of one category, categories and prompts in file order."""
    if batch_size < 1:
        raise LasdError(f"--batch-size is {batch_size}, expected at least 1: 1 answers one prompt at a time")
    if batch_size == 1:
        return [[prompt] for prompt in prompts]
    categories = dict.fromkeys(prompt.category for prompt in prompts)
    groups = [[prompt for prompt in prompts if prompt.category == category] for category in categories]
    return [group[start : start + batch_size] for group in groups for start in range(0, len(group), batch_size)]
