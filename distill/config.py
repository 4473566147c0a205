"""The settings of self-distillation."""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from lasd.errors import LasdError
from lasd.settings import check_values, parse_settings, setting


@dataclass
class DistillConfig:
    """What `distill/self_distill.py` is told."""

    prompts: str = field(metadata={"help": "File of prompts: ShareGPT, messages or {'turns': [...]}; .json or .jsonl"})
    model: str | None = setting(None, "Short name, Hub id or folder of the model that answers")
    output: str | None = setting(None, "Folder to write; the same command again resumes it")
    check: bool = setting(False, "Only read the prompts and print the data report")
    limit: int | None = setting(None, "Answer the first N usable prompts of the file only")
    exclude: list[str] = setting([], "Evaluation files: prompts that stand in them are set aside")
    html: str = setting("auto", "auto: scrape left-overs become text; keep: as is", ("auto", "keep"))
    multi_turn: bool = setting(True, "Answer every user turn, each after the answers before it")
    max_prompt_tokens: int | None = setting(
        None, "Longer prompts (history included) are set aside; default 1024 or what fits"
    )
    max_new_tokens: int = setting(512, "Token limit of one answer")
    temperature: float = setting(0.0, "0 is greedy")
    top_k: int = setting(0, "0 is off")
    top_p: float = setting(1.0, "1 is off")
    seed: int = setting(0, "Seed of sampled answers; each record draws from its own stream")
    drop_truncated: bool = setting(False, "Drop answers that reach max_new_tokens")
    drop_repetitive: bool = setting(False, "Drop answers that run into a loop")
    batch_size: int = setting(16, "Sequences decoded at once (slots)")
    admit_group: int = setting(0, "Prompts prefilled at once; 0: an eighth of the slots")
    dtype: str = setting("auto", "auto, bf16, fp16 or fp32")
    device: str = setting("auto", "auto, cpu, cuda, cuda:1, ...")
    revision: str | None = setting(None, "Revision of the model on the Hub")
    quantization: str | None = setting(None, "Load the model quantised, for example 4bit or 8bit")
    trust_remote_code: bool = setting(False, "Run code that comes with the model")
    shard_records: int = setting(5000, "Start a new shard after this many conversations")

    def __post_init__(self) -> None:
        check_values(self)
        for name, low in (("batch_size", 1), ("max_new_tokens", 1), ("shard_records", 1), ("admit_group", 0)):
            _check(getattr(self, name) >= low, name, getattr(self, name), f"at least {low}")
        for name in ("limit", "max_prompt_tokens"):
            value = getattr(self, name)
            _check(value is None or value >= 1, name, value, "at least 1")
        _check(self.temperature >= 0, "temperature", self.temperature, "0 (greedy) or above")
        _check(0 < self.top_p <= 1, "top_p", self.top_p, "above 0 and at most 1")
        if not self.check:
            for name in ("model", "output"):
                _check(bool(getattr(self, name)), name, "missing", f"--{name} (only --check runs without)")


def _check(fine: bool, name: str, value: Any, expected: str) -> None:
    if not fine:
        raise LasdError(f"--{name} is {value}, expected {expected}")


def parse_config(arguments: Sequence[str] | None = None) -> DistillConfig:
    """Reads flags and the `--config` file; errors are one line."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    return parse_settings(DistillConfig, words, program="distill/self_distill.py", extra="distill")


def rank_and_world() -> tuple[int, int]:
    """This process's place among those that torchrun or `accelerate launch` started: (rank, number of processes)."""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
