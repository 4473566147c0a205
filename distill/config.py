"""The settings of self-distillation: one dataclass, through trl's parser (flag > `--config` YAML > default)."""

import dataclasses
import difflib
import os
import sys
import types
import typing
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from lasd.errors import LasdError


def _help(text: str) -> dict[str, Any]:
    return {"help": text}


@dataclass
class DistillConfig:
    """What `distill/self_distill.py` is told."""

    prompts: str = field(metadata=_help("File of prompts: ShareGPT, messages or {'turns': [...]}; .json or .jsonl"))
    model: str | None = field(default=None, metadata=_help("Short name, Hub id or folder of the model that answers"))
    output: str | None = field(default=None, metadata=_help("Folder to write; the same command again resumes it"))
    check: bool = field(default=False, metadata=_help("Only read the prompts and print the data report"))
    limit: int | None = field(default=None, metadata=_help("Answer the first N usable prompts of the file only"))
    exclude: list[str] = field(
        default_factory=list, metadata=_help("Evaluation files: prompts that stand in them are set aside")
    )
    html: str = field(
        default="auto",
        metadata={"help": "auto: scrape left-overs become text; keep: as is", "choices": ["auto", "keep"]},
    )
    multi_turn: bool = field(default=True, metadata=_help("Answer every user turn, each after the answers before it"))
    max_prompt_tokens: int | None = field(
        default=None, metadata=_help("Longer prompts (history included) are set aside; default 1024 or what fits")
    )
    max_new_tokens: int = field(default=512, metadata=_help("Token limit of one answer"))
    temperature: float = field(default=0.0, metadata=_help("0 is greedy"))
    top_k: int = field(default=0, metadata=_help("0 is off"))
    top_p: float = field(default=1.0, metadata=_help("1 is off"))
    seed: int = field(default=0, metadata=_help("Seed of sampled answers; each record draws from its own stream"))
    drop_truncated: bool = field(default=False, metadata=_help("Drop answers that reach max_new_tokens"))
    drop_repetitive: bool = field(default=False, metadata=_help("Drop answers that run into a loop"))
    batch_size: int = field(default=16, metadata=_help("Sequences decoded at once (slots)"))
    admit_group: int = field(default=0, metadata=_help("Prompts prefilled at once; 0: an eighth of the slots"))
    dtype: str = field(default="auto", metadata=_help("auto, bf16, fp16 or fp32"))
    device: str = field(default="auto", metadata=_help("auto, cpu, cuda, cuda:1, ..."))
    revision: str | None = field(default=None, metadata=_help("Revision of the model on the Hub"))
    quantization: str | None = field(default=None, metadata=_help("Load the model quantised, for example 4bit or 8bit"))
    trust_remote_code: bool = field(default=False, metadata=_help("Run code that comes with the model"))
    shard_records: int = field(default=5000, metadata=_help("Start a new shard after this many conversations"))

    def __post_init__(self) -> None:
        _check_types(self)
        _check(self.html in ("auto", "keep"), "html", self.html, "auto or keep")
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
    """Reads flags and the `--config` file.

    Raises:
        LasdError: trl is not installed, a key or flag is unknown, a value has the wrong type or is out of range.
    """
    try:
        from trl import TrlParser
    except ImportError as error:
        raise LasdError(
            "self-distillation reads its settings with trl, which is not installed: pip install 'lasd[distill]'"
        ) from error
    words = _split_config_flag(list(sys.argv[1:] if arguments is None else arguments))
    if "--config" in words:
        _check_keys(Path(words[words.index("--config") + 1]))

    class Parser(TrlParser):
        def error(self, message: str) -> typing.NoReturn:
            raise LasdError(f"{message}; see --help")

    kinds: Any = [DistillConfig]
    parser = Parser(kinds, allow_abbrev=False, description="Lets a model answer prompts itself.")
    try:
        config: DistillConfig = parser.parse_args_and_config(args=words)[0]
    except LasdError:
        raise
    except ValueError as error:
        raise LasdError(f"settings not understood: {error}; see --help") from error
    return config


def _split_config_flag(words: list[str]) -> list[str]:
    out: list[str] = []
    for word in words:
        out += ["--config", word.removeprefix("--config=")] if word.startswith("--config=") else [word]
    if "--config" in out:
        index = out.index("--config") + 1
        if index >= len(out) or not Path(out[index]).is_file():
            raise LasdError(f"--config {out[index] if index < len(out) else ''} is not a file: expected a YAML file")
    return out


def _check_keys(path: Path) -> None:
    """Unknown keys are named before anything else, with the nearest known one."""
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise LasdError(f"--config {path} is not YAML: {error}") from error
    if not isinstance(values, dict):
        raise LasdError(f"--config {path} holds no settings: expected lines of the form 'name: value'")
    known = [item.name for item in dataclasses.fields(DistillConfig)]
    for key in values:
        if key not in known and key != "env":
            near = difflib.get_close_matches(str(key), known, 1)
            hint = f" (did you mean {near[0]}?)" if near else ""
            raise LasdError(f"--config {path} has the unknown key {key}{hint}: see --help for all settings")


def _check_types(config: DistillConfig) -> None:
    """YAML values reach the dataclass unconverted: a wrong type is named here instead of failing far away."""
    hints = typing.get_type_hints(DistillConfig)
    for item in dataclasses.fields(config):
        value, hint = getattr(config, item.name), hints[item.name]
        kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
        allowed = tuple(typing.get_origin(kind) or kind for kind in kinds)
        if float in allowed and type(value) is int:
            setattr(config, item.name, float(value))
        elif not isinstance(value, allowed) or (isinstance(value, bool) and bool not in allowed):
            names = " or ".join("null" if kind is type(None) else kind.__name__ for kind in allowed)
            raise LasdError(f"{item.name} is {value!r}, expected {names}: set it right (flag or --config file)")


def rank_and_world() -> tuple[int, int]:
    """This process's place among those that torchrun or `accelerate launch` started: (rank, number of processes)."""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
