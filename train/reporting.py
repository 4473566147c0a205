"""What a person sees of a running training: one console for log lines and the progress bar."""

from __future__ import annotations

import logging
from typing import Any

from rich.console import Console
from rich.logging import RichHandler
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from transformers import TrainerCallback

logger = logging.getLogger(__name__)

console = Console(stderr=True)

_NOISY = ("httpx", "datasets", "accelerate", "torch.distributed", "filelock", "urllib3", "bitsandbytes", "fsspec")


def set_up_logging(rank: int) -> None:
    """Log lines go to stderr, above the progress bar; other processes than the first only warn."""
    handler: logging.Handler = logging.StreamHandler()
    if console.is_terminal:
        handler = RichHandler(
            console=console, show_path=False, markup=False, highlighter=None, log_time_format="%H:%M:%S"
        )
        handler.setFormatter(logging.Formatter("%(message)s"))
    else:
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s", "%H:%M:%S"))
    logging.basicConfig(level=logging.INFO if rank == 0 else logging.WARNING, handlers=[handler])
    for name in _NOISY:
        logging.getLogger(name).setLevel(logging.ERROR)


def progress_bar(text: str, shown: bool = True) -> Progress:
    """A bar with counts and time left; nothing where no terminal is."""
    return Progress(
        TextColumn(text),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
        disable=not shown or not console.is_terminal,
    )


class ProgressReport(TrainerCallback):
    """A progress bar over the optimizer steps, and one short line for each log of the trainer."""

    def __init__(self) -> None:
        self._bar: Progress | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **_kwargs: Any) -> None:
        """Opens the bar."""
        self._bar = progress_bar("training", shown=state.is_world_process_zero)
        self._bar.start()
        self._task = self._bar.add_task("", total=state.max_steps, completed=state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **_kwargs: Any) -> None:
        """Moves the bar."""
        if self._bar is not None:
            self._bar.update(self._task, completed=state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **_kwargs: Any) -> None:
        """Closes the bar."""
        if self._bar is not None:
            self._bar.stop()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_kwargs: Any) -> None:
        """One line a log."""
        if not state.is_world_process_zero or not logs:
            return
        step = f"step {state.global_step}/{state.max_steps}"
        if "loss" in logs:
            heads = " ".join(f"{value:.3f}" for name, value in logs.items() if name.startswith("loss_head"))
            rate = f"lr {logs['learning_rate']:.2e}, {logs['positions_per_s']:.0f} positions/s"
            logger.info("%s: loss %.3f (by head %s), %s", step, logs["loss"], heads, rate)
        elif any(name.startswith("eval_") for name in logs):
            logger.info("%s: %s", step, evaluation_line(logs))


def evaluation_line(logs: dict[str, Any]) -> str:
    """The numbers of one evaluation in one line."""
    parts = []
    if "eval_accepted_per_step" in logs:
        goal = logs["eval_accepted_goal"]
        parts.append(f"{logs['eval_accepted_per_step']:.2f} drafted tokens accepted a step (goal {goal:.2f})")
    for top in ("top1", "top5"):
        values = [value for name, value in logs.items() if name.startswith("eval_head") and name.endswith(top)]
        if values:
            parts.append(f"held-out {top} by head {' / '.join(f'{value:.3f}' for value in values)}")
    for name in ("chain", "tree"):
        measured = logs.get(f"eval_tokens_per_step_{name}")
        if measured is not None:
            predicted = logs[f"eval_predicted_tokens_per_step_{name}"]
            parts.append(f"{name} {measured:.2f} tokens a step (predicted {predicted:.2f})")
    return "; ".join(parts)
