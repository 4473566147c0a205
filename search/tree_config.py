"""The settings of `search/medusa_tree.py`."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lasd.errors import LasdError
from lasd.settings import parse_settings, setting


@dataclass(frozen=True)
class MedusaTreeConfig:
    """What one tree search is told."""

    model: str = setting("", "The model: a short name, a folder or a Hub id.")
    artifact: str = setting("", "Folder of the trained heads; the tree is saved in its profile for this machine.")
    data: str = setting("", "Distilled data: its held-out answers are judged and decoded.")
    prompts: str = setting("", "File of prompts, answered first, where there is no distilled data.")
    held_out_share: float = setting(0.0, "Share of the data that training held out; 0 takes the training's own.")
    limit: int = setting(300, "Most answers that the heads are judged on; 0 for all.")
    answer_tokens: int = setting(160, "Tokens of an answer to --prompts.")
    max_nodes: int = setting(64, "Largest tree, the root included.")
    max_rank: int = setting(10, "Most candidates of one head.")
    max_depth: int = setting(0, "Deepest node; 0 is as deep as there are heads.")
    contexts: list[int] = setting(
        [256, 2048], "Cached tokens to size the tree for; the first one's choice is the profile's tree."
    )
    step_repeats: int = setting(7, "Rounds of timed verify passes.")
    finalists: int = setting(3, "Sizes that are measured with the decoder (besides plain decoding and a chain).")
    measure_prompts: int = setting(4, "Prompts that each of them decodes.")
    measure_tokens: int = setting(64, "Tokens of each answer.")
    measure_repeats: int = setting(3, "Rounds over each prompt; medians count.")
    work_dir: str = setting("", "Folder for counts and the log; default: beside the artifact, NAME-tree-search.")
    dtype: str = setting("auto", "bf16, fp16, fp32, or auto for the checkpoint's own.")
    device: str = setting("auto", "cpu, cuda, cuda:N, or auto.")
    revision: str = setting("", "Revision of the model on the Hub.")
    quantization: str = setting("", "nf4 or int8 (bitsandbytes).")
    trust_remote_code: bool = setting(False, "Whether code that comes with the model may run.")
    seed: int = setting(0, "Seed of the run (the search itself draws nothing).")

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
    """Reads flags and the `--config` file; errors are one line."""
    config = parse_settings(MedusaTreeConfig, arguments, program="search/medusa_tree.py", extra="search")
    config.check()
    return config
