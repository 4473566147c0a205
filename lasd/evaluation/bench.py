"""`lasd bench`: transformers' `generate`, our plain decoding and each method on the same prompts, interleaved.

Unit by unit (a prompt, or a batch of prompts) every contestant answers in one process; the order rotates, so that none
always runs first. Each finished unit is a line of FILE.rows.jsonl; a killed bench goes on with the same command.
"""

import json
import logging
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lasd.artifacts import Artifact, update_artifact
from lasd.artifacts.provenance import provenance
from lasd.decoding.sampling import SamplingParams
from lasd.decoding.target import TargetModel
from lasd.errors import LasdError
from lasd.evaluation.environment import environment, file_sha256, folder_sha256
from lasd.evaluation.exactness import Referee
from lasd.evaluation.journal import Journal, write_text_atomic
from lasd.evaluation.metrics import PLAIN, REFERENCE, Run, summarise
from lasd.evaluation.prompts import Prompt, check_file, read_prompts
from lasd.evaluation.quality import Scorer, check_references, load_scorer, qualities
from lasd.evaluation.report import progress
from lasd.evaluation.runners import Runner
from lasd.evaluation.setup import (
    ModelChoice,
    build_runners,
    group_prompts,
    method_label,
    method_names,
    refuse_typical_without_drafts,
)

logger = logging.getLogger(__name__)

SCHEMA = 1
WARM_UP_TOKENS = 16
RATIOS = ("speedup_vs_generate", "speedup_e2e", "speedup_decode", "speedup_specbench")


@dataclass(frozen=True)
class BenchConfig:
    """The settings of one bench; `methods` beside `generate` and `plain`, () = the artifact's own."""

    choice: ModelChoice
    prompts: Path
    output: Path
    methods: tuple[str, ...] = ()
    limit: int | None = None
    max_new_tokens: int = 128
    batch_size: int = 1
    seed: int = 0
    temperature: float = 0.0
    typical: tuple[float, float] | None = None
    """(epsilon, delta): each method also runs with typical acceptance, LOSSY."""
    quality: str | None = None
    """"math" or "summaries": answers are also scored against each record's reference."""
    categories: tuple[str, ...] = ()

    @property
    def params(self) -> SamplingParams:
        """Of every answer."""
        return SamplingParams(self.max_new_tokens, self.temperature, seed=self.seed, typical=self.typical)


def run_bench(config: BenchConfig) -> dict[str, Any]:
    """Measures, writes `config.output` and returns what it wrote."""
    if config.output.suffix != ".json":
        raise LasdError(f"--output is {config.output}, expected a file name that ends in .json")
    check_file(config.prompts)
    params = config.params
    scorer = None if config.quality is None else load_scorer(config.quality)
    target, artifact = config.choice.load()
    methods = method_names(config.methods, artifact)
    refuse_typical_without_drafts(config.typical, methods)
    prompts = read_prompts(
        config.prompts, target, config.limit, max_new_tokens=config.max_new_tokens, categories=config.categories
    )
    if scorer is not None:
        check_references(prompts, scorer)
    units = group_prompts(prompts, config.batch_size)
    runners = build_runners(target, artifact, methods, prompts, params, config.batch_size)
    lossy = [method_label(name, params) for name in methods] if params.typical else []
    settings = _settings(config, target, artifact, methods) | {"lossy": lossy}
    journal = Journal(config.output.with_suffix(".rows.jsonl"), settings)
    measure(units, runners, Referee(target), journal, reference=PLAIN if config.temperature else REFERENCE)
    rows = [journal.rows[_key(index, unit)] for index, unit in enumerate(units)]
    result = _result(config, settings, units, rows)
    if scorer is not None:
        _add_quality(result, config, units, rows, target, scorer)
    write_text_atomic(config.output, json.dumps(result, indent=1) + "\n")
    journal.complete()
    return result


def measure(
    units: Sequence[Sequence[Prompt]],
    runners: Sequence[Runner],
    referee: Referee,
    journal: Journal,
    reference: str = REFERENCE,
) -> None:
    """Runs every contestant on every unit that the journal does not hold yet.

    Args:
        reference: whose answers the others are compared with: `generate`, or when sampling `plain`, which draws the
            same numbers. `generate` draws its own then and is not compared.
    """
    todo = [(index, unit) for index, unit in enumerate(units) if _key(index, unit) not in journal.rows]
    if len(todo) < len(units):
        logger.warning("%d of %d units taken over from %s", len(units) - len(todo), len(units), journal.path)
    if not todo:
        return
    warm_up = max((unit for _, unit in todo), key=lambda unit: (len(unit), max(len(prompt.ids) for prompt in unit)))
    for runner in progress(runners, "warming up"):
        runner.run([prompt.ids for prompt in warm_up], at_most=WARM_UP_TOKENS)
    for index, unit in progress(todo, "measuring"):
        order = rotated(runners, index)
        runs = {runner.name: runner.run([prompt.ids for prompt in unit]) for runner in order}
        for name, run in runs.items():
            if name != REFERENCE or reference == REFERENCE:
                referee.judge(unit, runs[reference], run)
        row = {
            "prompts": [prompt.id for prompt in unit],
            "category": unit[0].category,
            "order": [runner.name for runner in order],
            "runs": {runner.name: runs[runner.name].to_dict() for runner in runners},
        }
        journal.append(_key(index, unit), row)


def rotated(runners: Sequence[Runner], index: int) -> list[Runner]:
    """The order of unit `index`: each runner comes first equally often, and every second round runs backwards."""
    rounds, start = divmod(index, len(runners))
    order = [*runners[start:], *runners[:start]]
    return order[::-1] if rounds % 2 else order


def _key(index: int, unit: Sequence[Prompt]) -> str:
    return f"{index}:" + ",".join(prompt.id for prompt in unit)


def _settings(
    config: BenchConfig, target: TargetModel, artifact: Artifact | None, methods: Sequence[str]
) -> dict[str, Any]:
    """All that decides what a row holds; rows with the same settings may be put together, others may not."""
    return {
        "model": target.name,
        "revision": target.revision,
        "quantization": target.quantization,
        "methods": list(methods),
        "prompts": str(config.prompts),
        "prompts_sha256": file_sha256(config.prompts),
        "artifact": None if artifact is None else str(artifact.path),
        "artifact_sha256": None if artifact is None else folder_sha256(artifact.path),
        "max_new_tokens": config.max_new_tokens,
        "batch_size": config.batch_size,
        "temperature": config.temperature,
        "typical": None if config.typical is None else list(config.typical),
        "seed": config.seed if config.temperature else None,
        "categories": list(config.categories),
        "environment": environment(target),
    }


def record_in_artifact(config: BenchConfig, result: Mapping[str, Any]) -> None:
    """Writes the main numbers of each method into the artifact's `measured`, named by prompts, dtype and batch size."""
    config.choice.check_record()
    assert config.choice.artifact is not None
    environment, settings = result["settings"]["environment"], result["settings"]
    parts = [config.prompts.stem, *config.categories, environment["dtype"], f"batch {settings['batch_size']}"]
    parts += [f"temperature {config.temperature:g}"] if config.temperature else []
    name = " ".join(["bench", *parts])
    kept = ("tokens_per_s", "tokens_per_step", "accept_at_pos", *RATIOS, "share_identical")
    rows = {
        method: {key: values[key] for key in kept}
        | {f"{ratio}_95": values["interval95"][ratio] for ratio in RATIOS}
        | {metric: found["mean"] for metric, found in values.get("quality", {}).items()}
        for method, values in result["methods"].items()
    }
    about = {
        "prompts": result["num_prompts"],
        "prompts_sha256": settings["prompts_sha256"],
        "max_new_tokens": settings["max_new_tokens"],
        "device": environment["device"],
        "date": result["provenance"]["date"],
    }
    update_artifact(config.choice.artifact, measured={name: {"methods": rows, **about}})


def _result(
    config: BenchConfig,
    settings: Mapping[str, Any],
    units: Sequence[Sequence[Prompt]],
    rows: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    made = provenance(sys.argv, config.seed, f"sha256:{settings['prompts_sha256']}")
    return {
        "schema": SCHEMA,
        "exact_expected": settings["environment"]["dtype"] == "float32",
        "quality": None,
        "num_prompts": sum(map(len, units)),
        "methods": summarise_rows(rows, config.seed, settings["lossy"]),
        "settings": dict(settings),
        "provenance": made | {"device": settings["environment"]["device"]},
    }


def _add_quality(
    result: dict[str, Any],
    config: BenchConfig,
    units: Sequence[Sequence[Prompt]],
    rows: Sequence[Mapping[str, Any]],
    target: TargetModel,
    scorer: Scorer,
) -> None:
    """Adds "quality" to the result and to each of its methods."""
    names = result["methods"]
    answers = {name: [tokens for row in rows for tokens in row["runs"][name]["tokens"]] for name in names}
    prompts = [prompt for unit in units for prompt in unit]
    found = qualities(answers, prompts, scorer, target.tokenizer, target.eos_token_ids, config.seed)
    result["quality"] = config.quality
    for name, values in names.items():
        values["quality"] = found[name]


def summarise_rows(
    rows: Sequence[Mapping[str, Any]], seed: int = 0, lossy: Collection[str] = ()
) -> dict[str, dict[str, Any]]:
    """The metrics of every method over all rows, and under "categories" over those of each category.

    Args:
        rows: of the journal.
        seed: of the bootstrap.
        lossy: methods that do not keep the model's distribution.
    """
    total = summarise(_runs(rows), seed=seed)
    categories = dict.fromkeys(row["category"] for row in rows if row["category"] is not None)
    parts = {
        category: summarise(_runs([row for row in rows if row["category"] == category]), seed=seed)
        for category in categories
    }
    for values in (total, *parts.values()):
        for name, one in values.items():
            one["lossy"] = name in lossy
    return {
        name: {**values, "categories": {category: part[name] for category, part in parts.items()}}
        for name, values in total.items()
    }


def _runs(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Run]]:
    return {name: [Run.from_dict(row["runs"][name]) for row in rows] for name in rows[0]["runs"]}
