"""ENTRY: the draft tree for trained Medusa heads, sized for this machine.

    python search/medusa_tree.py --model demo --artifact runs/heads --data runs/distilled

1. Calibrate: on held-out answers of the model itself, count at which rank each head has the true token, head by head
   and path by path.
2. Grow: add the node that is accepted most often, again and again.
3. Size: time the verify pass at each number of rows and of cached tokens, predict tokens a second for every size,
   then measure the best few with the real decoder beside plain decoding and a chain.
4. Save the tree with all figures in the artifact's profile for this device, dtype and quantisation.

The same command again reuses the counts it has (they are kept as they grow, beside the artifact).
"""

import sys
from pathlib import Path

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import json
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from lasd.errors import LasdError, entry
from search.tree_config import MedusaTreeConfig, parse_config

if TYPE_CHECKING:
    from search.tree_report import Choice

logger = logging.getLogger("search.medusa_tree")


class Log:
    """Progress bars and tables for the eye, JSON lines for the rest."""

    def __init__(self, path: Path):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise LasdError(f"{path.parent} cannot be made ({error.strerror}); give another --work_dir") from error
        self.path = path
        self.console = Console(width=None if sys.stdout.isatty() else 110)
        self.bars = Console(stderr=True)

    def note(self, stage: str, **figures: Any) -> None:
        """Appends one JSON line."""
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps({"time": round(time.time(), 1), "stage": stage, **figures}) + "\n")

    @contextmanager
    def bar(self, text: str, total: int) -> Iterator[Callable[[int], None]]:
        """A progress bar with the time left; call what it gives with the number done."""
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=self.bars) as progress:
            task = progress.add_task(text, total=total)
            yield lambda done: progress.update(task, completed=done)


def main() -> None:
    """Reads the command line and searches."""
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", datefmt="%H:%M:%S"
    )
    for name in ("httpx", "filelock", "urllib3"):
        logging.getLogger(name).setLevel(logging.WARNING)
    config = parse_config(sys.argv[1:])
    search_tree(config, sys.argv)


def search_tree(config: MedusaTreeConfig, command: Sequence[str]) -> dict[str, Any]:
    """The whole search; returns the profile as saved.

    Raises:
        LasdError: the artifact is not heads of this model, the data is not this model's or empty, a setting does not
            fit.
    """
    from lasd.artifacts import load_artifact, profile_key, provenance, update_artifact
    from lasd.decoding.loading import load_target
    from search.answers import fingerprint_of
    from search.pipeline import TreeSearch
    from search.saved import write_json
    from search.tree_report import accuracy_table, choice_table, curve_table, profile_of

    config.check()
    artifact = load_artifact(config.artifact)
    target = load_target(
        config.model,
        dtype=config.dtype,
        device=config.device,
        revision=config.revision or None,
        quantization=config.quantization or None,
        trust_remote_code=config.trust_remote_code,
    )
    log = Log(config.folder / "log.jsonl")
    search = TreeSearch(config, artifact, target, log)
    write_json(config.folder / "config.json", config.to_dict())

    answers = search.load_answers()
    apart = config.measure_prompts if config.measure_prompts * 4 <= len(answers) else 0  # decoded only, not judged
    calibration = search.calibrate(answers[: len(answers) - apart])
    log.console.print(accuracy_table(calibration))
    growth = search.grow(calibration)
    costs = search.measure_costs(growth, answers)
    log.console.print(curve_table(growth, calibration, costs, search.contexts))
    choices = [search.choose(growth, calibration, costs, context, answers) for context in search.contexts]

    made_by = provenance(list(command), config.seed, fingerprint_of(answers), settings=config.to_dict())
    profile = profile_of(target, calibration, growth, costs, choices, made_by)
    update_artifact(artifact.path, profile=(profile_key(target), profile))
    for choice in choices:
        log.console.print(choice_table(choice))
        _say(log, choice)
    log.console.print(f"saved in {artifact.path / 'profiles' / profile_key(target)}.json", soft_wrap=True)
    return profile


def _say(log: Log, choice: "Choice") -> None:
    log.note(
        "chosen", context=choice.context, tree=choice.best, nodes=choice.shape.num_nodes, speedup_decode=choice.gain
    )
    size = f"{choice.shape.num_nodes} nodes, {choice.shape.max_depth} deep"
    text = f"at {choice.context:,} cached tokens: {choice.best} ({size})"
    if choice.gain > 1:
        log.console.print(f"{text}, {choice.gain:.2f}x plain decoding")
    else:
        logger.warning(
            "%s is the best tree, but no gain: %.2fx plain decoding; decode with --method plain there",
            text,
            choice.gain,
        )


if __name__ == "__main__":
    entry(main)
