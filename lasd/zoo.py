"""Short model names: `llama-2-13b`, `qwen3-8b`, `demo` -> a Hugging Face Hub id or a local folder."""

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from lasd.errors import LasdError

DEMO = "demo"
DEMO_HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_SHOWN_NAMES = 4


@dataclass(frozen=True)
class ResolvedModel:
    """Where a model is loaded from.

    Attributes:
        name: what the user typed.
        source: a local folder, or a Hub id: what `from_pretrained` gets.
        revision: the Hub revision asked for; None for a local folder, or for the newest one.
        local: True if `source` is a folder, so that nothing is looked up on the network.
    """

    name: str
    source: str
    revision: str | None
    local: bool


def _sizes(short: str, hub: str, sizes: str) -> dict[str, str]:
    """Names of one family: `{}` in the short name is the size in lower case, `{}` in the Hub id the size as written."""
    return {short.format(size.lower()): hub.format(size) for size in sizes.split()}


ZOO: Mapping[str, str] = {
    **_sizes("llama-2-{}", "meta-llama/Llama-2-{}-hf", "7b 13b 70b"),
    **_sizes("llama-2-{}-chat", "meta-llama/Llama-2-{}-chat-hf", "7b 13b 70b"),
    **_sizes("codellama-{}", "codellama/CodeLlama-{}-hf", "7b 13b 34b"),
    **_sizes("llama-3-{}", "meta-llama/Meta-Llama-3-{}", "8B 70B"),
    **_sizes("llama-3-{}-instruct", "meta-llama/Meta-Llama-3-{}-Instruct", "8B 70B"),
    **_sizes("llama-3.1-{}", "meta-llama/Llama-3.1-{}", "8B 70B"),
    **_sizes("llama-3.1-{}-instruct", "meta-llama/Llama-3.1-{}-Instruct", "8B 70B"),
    **_sizes("llama-3.2-{}", "meta-llama/Llama-3.2-{}", "1B 3B"),
    **_sizes("llama-3.2-{}-instruct", "meta-llama/Llama-3.2-{}-Instruct", "1B 3B"),
    **_sizes("llama-3.3-{}-instruct", "meta-llama/Llama-3.3-{}-Instruct", "70B"),
    **_sizes("vicuna-{}-v1.3", "lmsys/vicuna-{}-v1.3", "7b 13b 33b"),
    **_sizes("vicuna-{}-v1.5", "lmsys/vicuna-{}-v1.5", "7b 13b"),
    **_sizes("mistral-7b-{}", "mistralai/Mistral-7B-{}", "v0.1 v0.3"),
    **_sizes("mistral-7b-instruct-{}", "mistralai/Mistral-7B-Instruct-{}", "v0.1 v0.2 v0.3"),
    **_sizes("mixtral-8x7b-{}", "mistralai/Mixtral-8x7B-{}", "v0.1"),
    **_sizes("mixtral-8x7b-instruct-{}", "mistralai/Mixtral-8x7B-Instruct-{}", "v0.1"),
    **_sizes("zephyr-7b-{}", "HuggingFaceH4/zephyr-7b-{}", "alpha beta"),
    **_sizes("qwen2.5-{}", "Qwen/Qwen2.5-{}", "0.5B 1.5B 3B 7B 14B 32B 72B"),
    **_sizes("qwen2.5-{}-instruct", "Qwen/Qwen2.5-{}-Instruct", "0.5B 1.5B 3B 7B 14B 32B 72B"),
    **_sizes("qwen2.5-coder-{}-instruct", "Qwen/Qwen2.5-Coder-{}-Instruct", "0.5B 1.5B 3B 7B 14B 32B"),
    **_sizes("qwen3-{}", "Qwen/Qwen3-{}", "0.6B 1.7B 4B 8B 14B 32B"),
    **_sizes("qwen3-{}-base", "Qwen/Qwen3-{}-Base", "0.6B 1.7B 4B 8B 14B"),
    **_sizes("gemma-2-{}", "google/gemma-2-{}", "2b 9b 27b"),
    **_sizes("gemma-2-{}-it", "google/gemma-2-{}-it", "2b 9b 27b"),
    **_sizes("gemma-3-{}-pt", "google/gemma-3-{}-pt", "1b 4b 12b 27b"),
    **_sizes("gemma-3-{}-it", "google/gemma-3-{}-it", "270m 1b 4b 12b 27b"),
    **_sizes("gemma-3-{}", "google/gemma-3-{}", "270m"),
    **_sizes("smollm2-{}", "HuggingFaceTB/SmolLM2-{}", "135M 360M 1.7B"),
    **_sizes("smollm2-{}-instruct", "HuggingFaceTB/SmolLM2-{}-Instruct", "135M 360M 1.7B"),
}


def resolve(name: str, revision: str | None = None) -> ResolvedModel:
    """Turns what a user typed as a model into where it is loaded from.

    A folder with a `config.json` comes first, then a short name (any case), then `org/name` on the Hub. `demo` is
    prepared on its first use (half a minute) from an installed package, without the network. Raises LasdError for
    anything else.
    """
    folder = Path(name).expanduser()
    if name and (folder / "config.json").is_file():
        return ResolvedModel(name, str(folder), None, local=True)
    if name.lower() == DEMO:
        from lasd.demo_model import prepare_demo

        return ResolvedModel(name, str(prepare_demo()), None, local=True)
    if name.lower() in ZOO:
        return ResolvedModel(name, ZOO[name.lower()], revision, local=False)
    if (folder / "lasd.json").is_file():
        raise LasdError(f"{name} is an artifact, not a model: pass it as --artifact, and its base model as --model")
    if name and folder.is_dir():
        raise LasdError(
            f"the model folder {name} has no config.json; expected a folder in the Hugging Face format: check the path"
        )
    if _HUB_ID.fullmatch(name):
        return ResolvedModel(name, name, revision, local=False)
    raise LasdError(
        f"unknown model {name!r}; expected a folder, a Hub id such as {DEMO_HUB_ID}, or a short name: "
        f"did you mean {', '.join(nearest(name))}?"
    )


def nearest(name: str) -> list[str]:
    """Returns the short names most like `name`, best first; never an empty list."""
    known = [DEMO, *ZOO]
    return difflib.get_close_matches(name.lower().replace("_", "-"), known, n=_SHOWN_NAMES, cutoff=0.0)


def canonical(name: str) -> str:
    """Returns the name under which anyone can load a model: the Hub id of a short name, anything else as it is."""
    return DEMO if name.lower() == DEMO else ZOO.get(name.lower(), name)


def hub_id(name: str) -> str | None:
    """Returns the Hub id that a name stands for (`demo`: the one it was converted from), None for a local folder."""
    if Path(name).expanduser().is_dir():
        return None
    if name.lower() == DEMO:
        return DEMO_HUB_ID
    found = canonical(name)
    return found if _HUB_ID.fullmatch(found) else None
