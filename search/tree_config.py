"""The settings of `search/medusa_tree.py`: flag > `--config` YAML > default; unknown names are errors."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, NoReturn

from lasd.errors import LasdError


def _setting(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True)
class MedusaTreeConfig:
    """What one tree search is told."""

    model: str = _setting("", "The model: a short name, a folder or a Hub id.")
    artifact: str = _setting("", "Folder of the trained heads; the tree is saved in its profile for this machine.")
    data: str = _setting("", "Distilled data: its held-out answers are judged and decoded.")
    prompts: str = _setting("", "File of prompts, answered first, where there is no distilled data.")
    held_out_share: float = _setting(0.0, "Share of the data that training held out; 0 takes the training's own.")
    limit: int = _setting(300, "Most answers that the heads are judged on; 0 for all.")
    answer_tokens: int = _setting(160, "Tokens of an answer to --prompts.")
    max_nodes: int = _setting(64, "Largest tree, the root included.")
    max_rank: int = _setting(10, "Most candidates of one head.")
    max_depth: int = _setting(0, "Deepest node; 0 is as deep as there are heads.")
    contexts: list[int] = field(
        default_factory=lambda: [256, 2048],
        metadata={"help": "Cached tokens to size the tree for; the first one's choice is the profile's tree."},
    )
    step_repeats: int = _setting(7, "Rounds of timed verify passes.")
    finalists: int = _setting(3, "Sizes that are measured with the decoder (besides plain decoding and a chain).")
    measure_prompts: int = _setting(4, "Prompts that each of them decodes.")
    measure_tokens: int = _setting(64, "Tokens of each answer.")
    measure_repeats: int = _setting(3, "Rounds over each prompt; medians count.")
    work_dir: str = _setting("", "Folder for counts and the log; default: beside the artifact, NAME-tree-search.")
    dtype: str = _setting("auto", "bf16, fp16, fp32, or auto for the checkpoint's own.")
    device: str = _setting("auto", "cpu, cuda, cuda:N, or auto.")
    revision: str = _setting("", "Revision of the model on the Hub.")
    quantization: str = _setting("", "nf4 or int8 (bitsandbytes).")
    trust_remote_code: bool = _setting(False, "Whether code that comes with the model may run.")
    seed: int = _setting(0, "Seed of the run (the search itself draws nothing).")

    def check(self) -> None:
        """Raises LasdError for the first setting that cannot be used."""
        for name in ("model", "artifact"):
            if not getattr(self, name):
                raise LasdError(f"--{name} is missing; give one, or set it in the --config file")
        if bool(self.data) == bool(self.prompts):
            came = "both --data and --prompts" if self.data else "neither --data nor --prompts"
            raise LasdError(f"{came} came; give one: a folder of distilled data, or a file of prompts")
        listed = isinstance(self.contexts, list) and self.contexts
        if not listed or not all(isinstance(n, int) and n >= 1 for n in self.contexts):
            raise LasdError(
                f"contexts is {self.contexts!r}; it must be numbers of cached tokens from 1, as --contexts 256 2048"
            )
        lows = {
            "limit": 0,
            "answer_tokens": 2,
            "max_nodes": 2,
            "max_rank": 1,
            "max_depth": 0,
            "step_repeats": 1,
            "finalists": 1,
        }
        lows |= {"measure_prompts": 1, "measure_tokens": 2, "measure_repeats": 1}
        for name, low in lows.items():
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < low:
                raise LasdError(f"{name} is {value!r}; it must be a whole number from {low}")
        if not isinstance(self.held_out_share, int | float) or not 0 <= self.held_out_share <= 1:
            raise LasdError(f"held_out_share is {self.held_out_share!r}; it must be from 0 (the training's own) to 1")

    @property
    def folder(self) -> Path:
        """Where counts and the log are kept."""
        artifact = Path(self.artifact)
        return Path(self.work_dir) if self.work_dir else artifact.with_name(f"{artifact.resolve().name}-tree-search")

    def to_dict(self) -> dict[str, Any]:
        """The resolved settings."""
        return asdict(self)


def parse_config(arguments: Sequence[str]) -> MedusaTreeConfig:
    """Reads flags and the `--config` file.

    Raises:
        LasdError: trl is not installed; the file is missing or no YAML mapping; a name is unknown; a value cannot be
            used.
    """
    try:
        from trl import TrlParser
    except ImportError as error:
        raise LasdError(
            f"the tree search reads its settings with trl, which is not installed ({error}); pip install 'lasd[search]'"
        ) from error

    class OneLineParser(TrlParser):
        def error(self, message: str) -> NoReturn:
            raise LasdError(f"{message}; see `python search/medusa_tree.py --help`")

    settings: Any = MedusaTreeConfig
    parser = OneLineParser(settings, prog="search/medusa_tree.py")
    _check_file(arguments)
    try:
        (config,) = parser.parse_args_and_config(list(arguments))
    except LasdError:
        raise
    except ValueError as error:
        raise LasdError(f"{error} Settings are: {', '.join(f.name for f in fields(MedusaTreeConfig))}") from error
    assert isinstance(config, MedusaTreeConfig)
    config.check()
    return config


def _check_file(arguments: Sequence[str]) -> None:
    if "--config" not in arguments:
        return
    import yaml

    place = list(arguments).index("--config") + 1
    path = Path(arguments[place]) if place < len(arguments) else Path()
    if not path.is_file():
        raise LasdError(f"--config {path} is not a file; give a YAML file of settings")
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise LasdError(f"--config {path} cannot be read as YAML ({error}); write one `name: value` a line") from error
    if not isinstance(content, dict):
        raise LasdError(f"--config {path} holds a {type(content).__name__}; write one `name: value` a line")
