"""ENTRY: a model answers prompts itself; out come token ids with a loss mask, ready to train heads on.

    python distill/self_distill.py --model demo --prompts prompts.jsonl --output runs/distilled --max_new_tokens 256

The same command again resumes, also after `kill -9`. `--check` only prints the data report. With torchrun or
`accelerate launch` each process answers its share of the prompts.
"""

import sys
from pathlib import Path

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import dataclasses
import json
import logging
import os
from collections import Counter
from typing import TYPE_CHECKING, Any

import yaml
from rich.console import Console

from distill.answer import answer_share, prepare_jobs
from distill.config import DistillConfig, parse_config, rank_and_world
from distill.filters import set_aside_contaminated
from distill.generate import TurnRules
from distill.manifest import count_records, file_sha256, open_manifest, save_manifest, write_atomically
from distill.sample import coloured
from distill.store import Store, finished_ids
from lasd.conversations import Conversation, DistilledData, Report, read_conversations
from lasd.conversations.distilled import ASIDE_DIR, MANIFEST_NAME, read_manifest
from lasd.errors import LasdError, entry

if TYPE_CHECKING:
    from lasd.decoding.target import TargetModel

logger = logging.getLogger(__name__)

DEFAULT_MAX_PROMPT_TOKENS = 1024


def main() -> None:
    """Runs the pipeline as the command line says."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", datefmt="%H:%M:%S")
    config = parse_config()
    conversations, report = read_prompts(config)
    if config.check:
        Console().print(report.table(f"data report: {config.prompts}"))
        return
    distil(config, conversations, report)


def read_prompts(config: DistillConfig) -> tuple[list[Conversation], Report]:
    """The usable prompts of the file, evaluation prompts set aside.

    Raises:
        LasdError: a file is missing or empty.
    """
    for file in config.exclude:
        if not Path(file).is_file():
            raise LasdError(f"--exclude {file} is not a file: expected an evaluation file of prompts")
    conversations, report = read_conversations(config.prompts, html="auto" if config.html == "auto" else "keep")
    return set_aside_contaminated(conversations, report, config.exclude), report


def distil(config: DistillConfig, conversations: list[Conversation], report: Report) -> dict[str, Any]:
    """Answers the conversations and returns the manifest as stored.

    Raises:
        LasdError: nothing to answer, or the output folder was begun by another command.
    """
    rank, world = rank_and_world()
    target = _load(config)
    rules = _rules(config, target)
    jobs = prepare_jobs(conversations, report, rules, target, config.limit)
    if rank == 0:
        Console(stderr=True).print(report.table(f"data report: {config.prompts}"))
    if not jobs:
        raise LasdError(f"no prompt of {config.prompts} can be used ({report.read} read): see the data report above")
    assert config.output is not None
    output = Path(config.output)
    open_manifest(output, _identity(config, target, rules), _extra(config, report))
    store = Store(output, rank, world, config.shard_records)
    if rank == 0:
        write_atomically(output / "config.yaml", yaml.safe_dump(dataclasses.asdict(config), sort_keys=False))
        rows = [json.dumps({"id": record_id, "reason": reason}) + "\n" for record_id, reason in report.aside_ids]
        write_atomically(output / ASIDE_DIR / "prompts.jsonl", "".join(rows))
    try:
        run = answer_share(target, jobs[rank::world], rules, store, config.batch_size, config.admit_group)
    finally:
        store.close()
    manifest = _finish(output, [job.conversation.id for job in jobs], run)
    first = next(iter(DistilledData(output, manifest)), None)
    if rank == 0 and first is not None:
        Console(stderr=True).print(coloured(first, target.tokenizer))
    return manifest


def _load(config: DistillConfig) -> "TargetModel":
    from lasd.decoding.loading import load_target

    assert config.model is not None
    device = config.device
    if device == "auto" and "LOCAL_RANK" in os.environ:
        import torch

        device = f"cuda:{os.environ['LOCAL_RANK']}" if torch.cuda.is_available() else "cpu"
    return load_target(
        config.model,
        dtype=config.dtype,
        device=device,
        revision=config.revision,
        quantization=config.quantization,
        trust_remote_code=config.trust_remote_code,
    )


def _rules(config: DistillConfig, target: "TargetModel") -> TurnRules:
    from lasd.decoding.sampling import SamplingParams

    fits = target.max_positions - config.max_new_tokens
    longest = min(DEFAULT_MAX_PROMPT_TOKENS, fits) if config.max_prompt_tokens is None else config.max_prompt_tokens
    if longest > fits or longest < 1:
        raise LasdError(
            f"prompts of {longest} tokens and answers of {config.max_new_tokens} do not fit into the "
            f"{target.max_positions} positions of {target.name}: lower --max_prompt_tokens or --max_new_tokens"
        )
    sampling = SamplingParams(
        max_new_tokens=config.max_new_tokens,
        temperature=config.temperature,
        top_k=config.top_k,
        top_p=config.top_p,
        seed=config.seed,
    )
    return TurnRules(sampling, longest, config.multi_turn, config.drop_truncated, config.drop_repetitive)


def _identity(config: DistillConfig, target: "TargetModel", rules: TurnRules) -> dict[str, Any]:
    """What must be the same for a run to be resumed."""
    from lasd.artifacts import BaseModelInfo

    settings = {name: getattr(config, name) for name in _SETTINGS}
    settings |= {"max_prompt_tokens": rules.max_prompt_tokens, "dtype": str(target.dtype).removeprefix("torch.")}
    return {
        "base_model": BaseModelInfo.of(target).to_dict(),
        "settings": settings,
        "prompts": {
            "path": config.prompts,
            "sha256": file_sha256(config.prompts),
            "exclude_paths": list(config.exclude),
            "exclude_sha256": [file_sha256(file) for file in config.exclude],
        },
    }


_SETTINGS = (
    *("limit", "html", "multi_turn", "max_new_tokens", "temperature", "top_k", "top_p", "seed"),
    *("drop_truncated", "drop_repetitive", "quantization"),
)


def _extra(config: DistillConfig, report: Report) -> dict[str, Any]:
    from lasd.artifacts import provenance

    return {"report": report.to_dict(), "provenance": provenance(sys.argv, config.seed, None), "runs": []}


def _finish(output: Path, wanted: list[str], run: dict[str, Any]) -> dict[str, Any]:
    """Brings state and counts of the manifest up to date; the last of several ranks finds everything answered."""
    done, aside = finished_ids(output)
    missing = sum(1 for conversation_id in wanted if conversation_id not in done and conversation_id not in aside)
    manifest = read_manifest(output / MANIFEST_NAME)
    manifest["state"] = "partial" if missing else "complete"
    manifest["counts"] = {
        "conversations": len(wanted),
        "answered": len(done),
        "set_aside_answers": dict(Counter(aside.values())),
        **count_records(output),
    }
    if run["turns"]:
        manifest["runs"].append(run)
    save_manifest(output, manifest)
    logger.info(
        "%s: %s, %d of %d conversations, %d labelled of %d tokens; this run %d tokens in %.0f s (%.0f tokens/s)",
        output,
        manifest["state"],
        len(wanted) - missing,
        len(wanted),
        manifest["counts"].get("labelled_tokens", 0),
        manifest["counts"].get("tokens", 0),
        run["tokens"],
        run["seconds"],
        run["tokens"] / max(run["seconds"], 1e-9),
    )
    return manifest


if __name__ == "__main__":
    entry(main)
