"""Progress as a bar with tokens/s and time left (log lines where there is no terminal), and as JSON lines in a file."""

import json
import logging
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

logger = logging.getLogger(__name__)

LINE_SECONDS = 10.0
LOG_SECONDS = 60.0


class DistillProgress:
    """Counts answered turns of `total_turns`; `done_turns` of them were there before.

    Args:
        path: the JSON lines file, appended to.
        total_turns: turns of the whole share.
        done_turns: turns answered by earlier runs.
        show: whether to draw a bar (rank 0 on a terminal).
    """

    def __init__(self, path: Path, total_turns: int, done_turns: int, show: bool = True) -> None:
        self._console = Console(stderr=True)
        self._show = show and self._console.is_terminal
        self._log = show and not self._console.is_terminal
        self._bar = Progress(
            TextColumn("answering"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("turns"),
            TextColumn("{task.fields[rate]:.0f} tokens/s"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=self._console,
            refresh_per_second=2,
            disable=not self._show,
        )
        self._task = self._bar.add_task("answering", total=total_turns, completed=done_turns, rate=0.0)
        self._file = path.open("a", encoding="utf-8")
        self.total, self.done, self.tokens = total_turns, done_turns, 0
        self._done_at_start = done_turns
        self._started = self._line_at = self._log_at = time.monotonic()

    def __enter__(self) -> "DistillProgress":
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._write()
        self._bar.stop()
        self._file.close()

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._started

    @property
    def tokens_per_s(self) -> float:
        """Answer tokens per second of this run."""
        return self.tokens / max(self.seconds, 1e-9)

    def advance(self, tokens: int, turns: int) -> None:
        """Notes an answer of `tokens` tokens that settles `turns` turns (several if the conversation ends early)."""
        self.tokens += tokens
        self.done += turns
        now = time.monotonic()
        self._bar.update(self._task, advance=turns, rate=self.tokens_per_s)
        if now - self._line_at > LINE_SECONDS:
            self._line_at = now
            self._write()
        if self._log and now - self._log_at > LOG_SECONDS:
            self._log_at = now
            state = self.state()
            logger.info(
                "%d of %d turns, %.0f tokens/s, %.0f s left", self.done, self.total, self.tokens_per_s, state["left_s"]
            )

    def state(self) -> dict[str, Any]:
        """What a JSON line says."""
        settled = self.done - self._done_at_start
        left = (self.total - self.done) * self.seconds / settled if settled else 0.0
        return {
            "time": round(time.time(), 3),
            "elapsed_s": round(self.seconds, 3),
            "turns_done": self.done,
            "turns_total": self.total,
            "tokens": self.tokens,
            "tokens_per_s": round(self.tokens_per_s, 2),
            "left_s": round(left, 1),
        }

    def _write(self) -> None:
        self._file.write(json.dumps(self.state()) + "\n")
        self._file.flush()
