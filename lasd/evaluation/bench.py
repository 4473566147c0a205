"""`lasd bench`: transformers' `generate`, our plain decoding and each method on the same prompts, interleaved.

Unit by unit (a prompt, or a batch of prompts) every contestant answers in one process; the order rotates, so that none
always runs first. Each finished unit is a line of FILE.rows.jsonl; a killed bench goes on with the same command.
"""

import json
import logging
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lasd.artifacts import Artifact, update_artifact
from lasd.artifacts.provenance import provenance
from lasd.decoding.target import TargetModel
from lasd.errors import LasdError
from lasd.evaluation.environment import environment, file_sha256, folder_sha256
from lasd.evaluation.exactness import Referee
from lasd.evaluation.journal import Journal, write_text_atomic
from lasd.evaluation.metrics import REFERENCE, Run, summarise
from lasd.evaluation.prompts import Prompt, check_file, read_prompts
from lasd.evaluation.report import progress
from lasd.evaluation.runners import Runner
from lasd.evaluation.setup import ModelChoice, build_runners, group_prompts, method_names

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


def run_bench(config: BenchConfig) -> dict[str, Any]:
    """Measures, writes `config.output` and returns what it wrote."""
    if config.output.suffix != ".json":
        raise LasdError(f"--output is {config.output}, expected a file name that ends in .json")
    check_file(config.prompts)
    target, artifact = config.choice.load()
    prompts = read_prompts(config.prompts, target, config.limit, max_new_tokens=config.max_new_tokens)
    units = group_prompts(prompts, config.batch_size)
    methods = method_names(config.methods, artifact)
    runners = build_runners(target, artifact, methods, prompts, config.max_new_tokens, config.batch_size)
    settings = _settings(config, target, artifact, methods)
    journal = Journal(config.output.with_suffix(".rows.jsonl"), settings)
    measure(units, runners, Referee(target), journal)
    result = _result(config, settings, units, [journal.rows[_key(index, unit)] for index, unit in enumerate(units)])
    write_text_atomic(config.output, json.dumps(result, indent=1) + "\n")
    journal.complete()
    return result


def measure(units: Sequence[Sequence[Prompt]], runners: Sequence[Runner], referee: Referee, journal: Journal) -> None:
    """Runs every contestant on every unit that the journal does not hold yet."""
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
        for run in runs.values():
            referee.judge(unit, runs[REFERENCE], run)
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
        "model": target.source,
        "revision": target.revision,
        "quantization": target.quantization,
        "methods": list(methods),
        "prompts": str(config.prompts),
        "prompts_sha256": file_sha256(config.prompts),
        "artifact": None if artifact is None else str(artifact.path),
        "artifact_sha256": None if artifact is None else folder_sha256(artifact.path),
        "max_new_tokens": config.max_new_tokens,
        "batch_size": config.batch_size,
        "temperature": 0.0,
        "environment": environment(target),
    }


def record_in_artifact(config: BenchConfig, result: Mapping[str, Any]) -> None:
    """Writes the main numbers of each method into the artifact's `measured`, named by prompts, dtype and batch size."""
    if config.choice.artifact is None:
        raise LasdError("--record without --artifact: expected the artifact that the results belong to")
    environment, settings = result["settings"]["environment"], result["settings"]
    name = f"bench {config.prompts.stem} {environment['dtype']} batch {settings['batch_size']}"
    kept = ("tokens_per_s", "tokens_per_step", "accept_at_pos", *RATIOS, "share_identical")
    rows = {
        method: {key: values[key] for key in kept} | {f"{ratio}_95": values["interval95"][ratio] for ratio in RATIOS}
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
        "num_prompts": sum(map(len, units)),
        "methods": summarise_rows(rows, config.seed),
        "settings": dict(settings),
        "provenance": made | {"device": settings["environment"]["device"]},
    }


def summarise_rows(rows: Sequence[Mapping[str, Any]], seed: int = 0) -> dict[str, dict[str, Any]]:
    """The metrics of every method over all rows, and under "categories" over those of each category."""
    total = summarise(_runs(rows), seed=seed)
    categories = dict.fromkeys(row["category"] for row in rows if row["category"] is not None)
    parts = {
        category: summarise(_runs([row for row in rows if row["category"] == category]), seed=seed)
        for category in categories
    }
    return {
        name: {**values, "categories": {category: part[name] for category, part in parts.items()}}
        for name, values in total.items()
    }


def _runs(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Run]]:
    return {name: [Run.from_dict(row["runs"][name]) for row in rows] for name in rows[0]["runs"]}
