"""The configuration of head training: one dataclass, read as flag > --config YAML > default."""

import dataclasses
import difflib
import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from lasd.errors import LasdError

logger = logging.getLogger(__name__)


def _setting(default: Any, text: str, choices: tuple[str, ...] | None = None) -> Any:
    metadata: dict[str, Any] = {"help": text}
    if choices:
        metadata["choices"] = list(choices)
    return field(default=default, metadata=metadata)


@dataclass
class MedusaConfig:
    """Settings of one training run. The resolved values are saved beside the output and in the artifact."""

    model: str = _setting("", "The frozen model: a short name (see lasd/zoo.py), a folder, or a Hub id.")
    data: str = _setting("", "Folder written by distill/self_distill.py.")
    output: str = _setting("", "Folder of the run; the trained artifact is written there.")

    num_heads: int = _setting(4, "Heads K: head k predicts the token k + 1 places ahead.")
    num_layers: int = _setting(1, "Residual blocks of each head.")
    projection: str = _setting(
        "shared", "shared: the model's own output embedding; own: one a head.", ("shared", "own")
    )
    draft_vocab: int = _setting(
        0, "Heads propose only this many tokens, the most frequent of the training answers; 0: the whole vocabulary."
    )
    head_decay: float = _setting(0.8, "Head k's loss has the weight head_decay ** k.")

    learning_rate: float = _setting(2e-3, "Peak learning rate.")
    lr_scheduler: str = _setting("cosine", "Schedule after the warm-up.", ("cosine", "linear", "constant"))
    warmup: float = _setting(40, "Warm-up: steps if 1 or more, a share of all steps if below 1.")
    weight_decay: float = _setting(0.0, "AdamW weight decay.")
    max_grad_norm: float = _setting(1.0, "Gradients are scaled down to this norm; 0 is off.")
    epochs: float = _setting(2.0, "Passes over the data.")
    max_steps: int = _setting(0, "Stop after this many optimizer steps; 0: after all epochs.")
    positions_per_batch: int = _setting(
        512, "Labelled tokens of one optimizer step, over all processes and accumulation steps; records stay whole."
    )
    gradient_accumulation_steps: int = _setting(1, "Micro-batches each process splits its part of a step into.")
    max_length: int = _setting(2048, "Longer records lose their end, tokens.")
    cache_hidden_states: bool = _setting(
        False, "Run the model once over all records and keep its hidden states in a file for all epochs."
    )
    seed: int = _setting(0, "Order of the records.")

    dtype: str = _setting(
        "auto", "Type the frozen model runs in; auto: the checkpoint's own.", ("auto", "bf16", "fp16", "fp32")
    )
    device: str = _setting("auto", "cpu, cuda, or auto: a GPU if there is one.", ("auto", "cpu", "cuda"))
    quantization: str = _setting("none", "bitsandbytes quantisation of the frozen model.", ("none", "nf4", "int8"))
    revision: str = _setting("", "Revision of a Hub model.")
    trust_remote_code: bool = _setting(False, "Whether code that the model's repository ships may run.")
    heads_dtype: str = _setting("bf16", "Type the trained heads are saved in.", ("bf16", "fp16", "fp32"))

    held_out_share: float = _setting(0.02, "Share of the records held out, chosen by a hash of their id.")
    eval_steps: int = _setting(0, "Optimizer steps between evaluations; 0: a tenth of the run.")
    eval_records: int = _setting(100, "Held-out records whose head accuracy is measured.")
    eval_prompts: int = _setting(8, "Held-out prompts that the real decoder answers at each evaluation.")
    eval_new_tokens: int = _setting(64, "Tokens of each of these answers.")
    gap_warning: float = _setting(0.15, "Warn if measured tokens a step fall below predicted by more than this share.")
    save_steps: int = _setting(0, "Optimizer steps between checkpoints; 0: a tenth of the run.")
    save_total_limit: int = _setting(2, "Checkpoints kept (at least 2, so that one is always whole).")
    logging_steps: int = _setting(10, "Optimizer steps between logged losses.")
    max_dropped_share: float = _setting(0.5, "Stop if a larger share of the records gives no target.")

    overfit_one_batch: bool = _setting(False, "Check of the whole chain: learn one answer of up to 64 tokens by heart.")

    def check(self) -> None:
        """Raises a LasdError that names the first value out of range."""
        needed = {name: getattr(self, name) for name in ("model", "data", "output")}
        for name, value in needed.items():
            if not value:
                raise LasdError(f"{name} is missing: pass --{name}, or set it in the --config file")
        checks: tuple[tuple[str, bool, str], ...] = (
            ("num_heads", 1 <= self.num_heads <= 16, "1 to 16"),
            ("num_layers", 1 <= self.num_layers <= 8, "1 to 8"),
            ("head_decay", 0 < self.head_decay <= 1, "above 0 and at most 1"),
            ("learning_rate", self.learning_rate > 0, "above 0"),
            ("warmup", self.warmup >= 0, "0 or above"),
            ("weight_decay", self.weight_decay >= 0, "0 or above"),
            ("max_grad_norm", self.max_grad_norm >= 0, "0 (off) or above"),
            ("epochs", self.epochs > 0, "above 0"),
            ("max_steps", self.max_steps >= 0, "0 (all epochs) or above"),
            ("positions_per_batch", self.positions_per_batch >= 1, "1 or above"),
            ("gradient_accumulation_steps", self.gradient_accumulation_steps >= 1, "1 or above"),
            ("max_length", self.max_length >= 4, "4 or above"),
            ("held_out_share", 0 <= self.held_out_share < 1, "0 (none) or above, and below 1"),
            ("eval_steps", self.eval_steps >= 0, "0 (a tenth of the run) or above"),
            ("eval_records", self.eval_records >= 1, "1 or above"),
            ("eval_prompts", self.eval_prompts >= 0, "0 (off) or above"),
            ("eval_new_tokens", self.eval_new_tokens >= 2, "2 or above"),
            ("save_steps", self.save_steps >= 0, "0 (a tenth of the run) or above"),
            ("save_total_limit", self.save_total_limit >= 2, "2 or above"),
            ("draft_vocab", self.draft_vocab == 0 or self.draft_vocab >= 4, "0 (the whole vocabulary) or at least 4"),
            ("logging_steps", self.logging_steps >= 1, "1 or above"),
        )
        for name, fine, expected in checks:
            if not fine:
                raise LasdError(f"{name} is {getattr(self, name)!r}; expected {expected}: change --{name}")


FREE_FIELDS = frozenset(
    {"output", "data", "device", "logging_steps", "save_steps", "save_total_limit", "gap_warning", "max_dropped_share"}
)
"""Settings that a resumed run may change: they change neither the steps nor what is measured (data's hash counts)."""


def read_config(arguments: Sequence[str]) -> MedusaConfig:
    """Reads the command line: flag > --config YAML > default.

    Raises:
        LasdError: an unknown name or a value of the wrong type, in either place; no or a broken file.
    """
    try:
        from trl import TrlParser
    except ImportError as error:
        raise LasdError(
            f"training needs packages that are not here ({error}): install them with `pip install 'lasd[train]'`"
        ) from error

    class Parser(TrlParser):
        def error(self, message: str) -> NoReturn:
            raise LasdError(f"{message}: see `python train/medusa.py --help`")

    settings: Any = MedusaConfig
    parser = Parser(
        settings, prog="train/medusa.py", description="Trains Medusa heads on a frozen model.", allow_abbrev=False
    )
    arguments = _joined_config_flag(arguments)
    config_path = _config_path(arguments)
    if config_path is not None:
        _check_file(config_path)
    try:
        (config,) = parser.parse_args_and_config(list(arguments))
    except LasdError:
        raise
    except ValueError as error:
        unknown = [word.split("=")[0].lstrip("-") for word in arguments if word.startswith("--") and _unknown(word)]
        raise LasdError(
            _unknown_text(unknown[0], "command line") if unknown else " ".join(str(error).split())
        ) from error
    _coerce(config)
    config.check()
    return config


def _joined_config_flag(arguments: Sequence[str]) -> list[str]:
    words: list[str] = []
    for word in arguments:
        words += ["--config", word.removeprefix("--config=")] if word.startswith("--config=") else [word]
    return words


def _config_path(arguments: Sequence[str]) -> Path | None:
    if "--config" not in arguments:
        return None
    place = list(arguments).index("--config") + 1
    if place >= len(arguments):
        raise LasdError("--config has no value; expected a YAML file: pass one, such as recipes/smoke/train.yaml")
    return Path(arguments[place])


def _check_file(path: Path) -> None:
    import yaml

    if not path.is_file():
        raise LasdError(f"config file {path} does not exist: pass a YAML file, such as recipes/smoke/train.yaml")
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise LasdError(f"config file {path} is not readable as YAML: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict):
        raise LasdError(f"config file {path} holds a {type(content).__name__}; expected lines of `name: value`")
    for name in content:
        if name not in _names():
            raise LasdError(_unknown_text(str(name), f"config file {path}"))


def _names() -> list[str]:
    return [entry.name for entry in dataclasses.fields(MedusaConfig)]


def _unknown(word: str) -> bool:
    name = word.split("=")[0].lstrip("-").replace("-", "_")
    return name not in [*_names(), "config", "help"]


def _unknown_text(name: str, where: str) -> str:
    near = difflib.get_close_matches(name.replace("-", "_"), _names(), n=1)
    hint = f"did you mean {near[0]}?" if near else "see `python train/medusa.py --help`"
    return f"{where} sets {name!r}, which is no setting of head training: {hint}"


def _coerce(config: MedusaConfig) -> None:
    """YAML gives values of YAML's own types: checks them against the fields, and widens whole numbers to floats."""
    for entry in dataclasses.fields(config):
        kind = entry.type
        assert isinstance(kind, type)
        value = getattr(config, entry.name)
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            setattr(config, entry.name, float(value))
        elif not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise LasdError(f"{entry.name} is {value!r}; expected a value of type {kind.__name__}: change it")
        choices = entry.metadata.get("choices")
        if choices and value not in choices:
            raise LasdError(f"{entry.name} is {value!r}; expected one of {', '.join(choices)}: change it")


def resolved(config: MedusaConfig) -> dict[str, Any]:
    """The configuration as plain JSON values."""
    record: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(config)))
    return record
