"""`lasd chat`: reads messages and commands, prints answers while they grow.

Answers go to stdout, all else (statistics, remarks, errors) to stderr, so that `lasd chat < questions.txt` works too.
"""

import contextlib
import io
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any, TextIO

from lasd.answering import describe_stats, open_decoder, statistics_line
from lasd.chat import ChatSession
from lasd.decoding.sampling import SamplingParams
from lasd.errors import LasdError
from lasd.evaluation.setup import ModelChoice

HELP = """\
/system TEXT  set the system prompt for the turns to come; without TEXT: none
/undo         take the newest turn back
/drop [N]     forget the N oldest turns (1)
/reset        forget all turns; the system prompt stays
/stats        totals of this session
/help         this list
/exit         leave (or Ctrl-D)
//TEXT        a message that begins with a slash
Ctrl-C while an answer runs ends it after the step under way; what was shown of it stays in the conversation."""


class Interrupt:
    """While it is entered, the first Ctrl-C only sets `asked`. A second one raises KeyboardInterrupt at once, unless
    the answer is `over`."""

    def __enter__(self) -> "Interrupt":
        self.asked = self.over = False
        self._before: Any = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.asked and not self.over:
            raise KeyboardInterrupt
        self.asked = True


class ChatLoop:
    """Reads messages and commands until there is no more line; prints answers to `out` and remarks to `err`."""

    def __init__(self, session: ChatSession, out: TextIO, err: TextIO, label: str = "plain"):
        self.session, self.out, self.err, self.label = session, out, err, label
        self.commands: dict[str, Callable[[str], None]] = {
            "/system": self._system,
            "/undo": self._undo,
            "/drop": self._drop,
            "/reset": self._reset,
            "/stats": self._stats,
            "/help": lambda _: self._say(HELP),
        }

    def run(self, read_line: Callable[[], str | None]) -> None:
        """`read_line` gives None at the end."""
        while (line := read_line()) is not None:
            text = line.strip()
            if text in ("/exit", "/quit"):
                return
            try:
                if text.startswith("//"):
                    self._answer(text[1:])
                elif text.startswith("/"):
                    self._command(text)
                elif text:
                    self._answer(text)
            except LasdError as error:
                self._say(f"error: {' '.join(str(error).split())}")
            except KeyboardInterrupt:  # after an answer or within a command: there is nothing left to interrupt
                self._say("(leave with Ctrl-D or /exit)")

    def _answer(self, message: str) -> None:
        with Interrupt() as interrupt:
            started = False
            try:
                with contextlib.closing(self.session.answer(message)) as pieces:
                    for piece in pieces:
                        started = True
                        self.out.write(piece)
                        self.out.flush()
                        if interrupt.asked:
                            break
            except KeyboardInterrupt:  # the second Ctrl-C: the session has kept what was shown
                started = True
            finally:
                interrupt.over = True
                if started:
                    self.out.write("\n")
                    self.out.flush()
            self._remarks()

    def _remarks(self) -> None:
        session, turn = self.session, self.session.last
        if session.num_dropped:
            self._say(f"({session.num_dropped} of the oldest turns were dropped to make room)")
        if turn is None:
            self._say("(interrupted before any text; the message is not kept)")
            return
        if turn.interrupted:
            self._say("(interrupted; what was shown stays in the conversation, /undo takes it back)")
        if turn.result.finish_reason == "context":
            limit = session.decoder.target.max_positions
            self._say(f"(cut: the conversation fills the model's {limit} positions; /drop forgets the oldest turns)")
        self._say(f"{self.label}: {statistics_line(turn.result)}")

    def _command(self, text: str) -> None:
        name, _, rest = text.partition(" ")
        if name not in self.commands:
            raise LasdError(f"command {name} is unknown; it must be one of {', '.join(self.commands)}, /exit")
        self.commands[name](rest.strip())

    def _system(self, text: str) -> None:
        self.session.system = text or None
        self._say(f"(system prompt {'set' if text else 'removed'}; {len(self.session.turns)} turns stay)")

    def _undo(self, _: str) -> None:
        turn = self.session.undo()
        self._say("(there is no turn to take back)" if turn is None else f"(taken back: {turn.message})")

    def _drop(self, text: str) -> None:
        if text and not (text.isdecimal() and int(text) > 0):
            raise LasdError(f"/drop got {text!r}; it takes a number of turns, at least 1")
        dropped = self.session.drop(int(text or 1))
        self._say(f"({dropped} oldest turns forgotten, {len(self.session.turns)} stay)")

    def _reset(self, _: str) -> None:
        self.session.reset()
        self._say("(all turns forgotten)")

    def _stats(self, _: str) -> None:
        session = self.session
        self._say(
            f"{self.label}: {session.stats.answers} answers, {describe_stats(session.stats)}; {len(session.turns)} "
            f"turns fill {session.context_tokens} of {session.decoder.target.max_positions} positions"
        )

    def _say(self, text: str) -> None:
        print(text, file=self.err, flush=True)


@dataclass(frozen=True)
class ChatConfig:
    """With what to talk, and how."""

    choice: ModelChoice
    method: str | None = None
    system: str | None = None
    drop_oldest: bool = False


def run_chat(config: ChatConfig, params: SamplingParams) -> None:
    """Talks on the terminal, or answers the lines of a pipe."""
    decoder, label = open_decoder(config.choice, config.method, params)
    session = ChatSession(decoder, params, config.system, config.drop_oldest)
    loop = ChatLoop(session, sys.stdout, sys.stderr, label)
    if getattr(decoder.target.tokenizer, "chat_template", None) is None:
        print(f"({decoder.target.name} has no chat template: turns are joined as plain text)", file=sys.stderr)
    if sys.stdin.isatty():
        print(f"{decoder.target.name}, {label}; /help lists the commands", file=sys.stderr)
        loop.run(_terminal_line)
    else:
        if isinstance(sys.stdin, io.TextIOWrapper):
            sys.stdin.reconfigure(errors="replace")
        loop.run(lambda: sys.stdin.readline() or None)


def _terminal_line() -> str | None:
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (line editing and history)
    while True:
        try:
            return input("> ")
        except EOFError:
            return None
        except KeyboardInterrupt:
            print("\n(leave with Ctrl-D or /exit)", file=sys.stderr)
