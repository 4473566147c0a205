"""From what a command was told to what it runs: the model, the artifact, the methods and the units of prompts."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from lasd.artifacts import Artifact, load_artifact
from lasd.decoding.loading import load_target
from lasd.decoding.sampling import SamplingParams
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

    def check_record(self, record: bool = True) -> None:
        """Raises a `LasdError` if results are to be recorded and there is no artifact for them."""
        if record and self.artifact is None:
            raise LasdError("--record without --artifact: expected the artifact that the results belong to")

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
    params: SamplingParams,
    batch_size: int = 1,
) -> list[Runner]:
    """`generate`, `plain` and a runner for each method; every decoder's cache has room for the longest prompt.

    With `params.typical` each method comes twice: exact, and with typical acceptance under a name that says LOSSY.
    """
    context = max(len(prompt.ids) for prompt in prompts) + params.max_new_tokens
    exact = replace(params, typical=None)
    runners: list[Runner] = [GenerateRunner(target, params.max_new_tokens, params.temperature, params.seed)]
    for each in [exact, params] if params.typical else [exact]:
        for name in methods if each.typical else [PLAIN, *methods]:
            drafter = load_drafter(artifact, target, name)
            runners.append(
                DecoderRunner(
                    method_label(name, each), target, drafter, each, max_slots=batch_size, max_context=context
                )
            )
    return runners


def method_label(method: str, params: SamplingParams) -> str:
    """The method as results name it: a lossy one says so wherever it shows."""
    if params.typical is None:
        return method
    epsilon, delta = params.typical
    return f"{method} (typical {epsilon:g}/{delta:g}, LOSSY)"


def parse_typical(text: str | None) -> tuple[float, float] | None:
    """ "0.09,0.3" -> (epsilon, delta) of typical acceptance; None stays None."""
    if text is None:
        return None
    try:
        epsilon, delta = (float(part) for part in text.split(","))
    except ValueError:
        raise LasdError(f"--typical is {text!r}, expected EPSILON,DELTA, such as 0.09,0.3") from None
    return epsilon, delta


def refuse_typical_without_drafts(typical: tuple[float, float] | None, methods: Sequence[str]) -> None:
    """Raises a `LasdError` where typical acceptance is asked for and nothing drafts."""
    if typical is not None and not [name for name in methods if name != PLAIN]:
        raise LasdError(
            "--typical came with plain decoding, which drafts nothing: expected --artifact, or a --method that drafts"
        )


def group_prompts(prompts: Sequence[Prompt], batch_size: int) -> list[list[Prompt]]:
    """Units of up to `batch_size` prompts of one category, categories and prompts in file order."""
    if batch_size < 1:
        raise LasdError(f"--batch-size is {batch_size}, expected at least 1: 1 answers one prompt at a time")
    if batch_size == 1:
        return [[prompt] for prompt in prompts]
    categories = dict.fromkeys(prompt.category for prompt in prompts)
    groups = [[prompt for prompt in prompts if prompt.category == category] for category in categories]
    return [group[start : start + batch_size] for group in groups for start in range(0, len(group), batch_size)]
