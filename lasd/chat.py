"""A conversation with a model, without input and output: `lasd chat` is a loop over it (`lasd.chat_loop`)."""

from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace

from lasd.decoding.decoder import Decoder
from lasd.decoding.request import GenerationResult
from lasd.decoding.sampling import SamplingParams
from lasd.decoding.stats import DecodeStats
from lasd.errors import LasdError
from lasd.streaming import TextStream


@dataclass
class Turn:
    """A message and its answer."""

    message: str
    answer: str
    """What the conversation goes on with: the whole answer, or what was shown of an interrupted one."""
    result: GenerationResult
    interrupted: bool = False


class ChatSession:
    """Turns of a conversation, and the next answer as a stream.

    Args:
        decoder: one that nobody else uses meanwhile.
        params: of every answer; answer n = 0, 1, ... draws with seed `params.seed + n`, so a session can be repeated.
        system: the system prompt, if any.
        drop_oldest: whether the oldest turns may be forgotten where the context is too short for a message and an
            answer of `max_new_tokens`. Otherwise nothing is ever forgotten unasked.
    """

    def __init__(self, decoder: Decoder, params: SamplingParams, system: str | None = None, drop_oldest: bool = False):
        self.decoder, self.params, self.drop_oldest = decoder, params, drop_oldest
        self.system = system
        self.turns: list[Turn] = []
        self.last: Turn | None = None
        """The turn of the latest `answer`; None if it was not kept."""
        self.num_dropped = 0
        """Turns that the latest `answer` dropped."""
        self.stats = DecodeStats()
        """Of all answers, those since taken back included."""
        self._num_answers = 0

    def answer(self, message: str) -> Generator[str, None, None]:
        """Answers a message; yields the text while it grows, at least once a step (a piece may be empty).

        Closing the generator interrupts the answer after a whole step: what was yielded stays in the conversation with
        its message; if there was nothing yet, or on an error, the message is not kept either. The decoder's slot is
        always released.

        Raises:
            LasdError: the conversation is longer than the model's context, or decoding failed. The session stays
                usable.
        """
        self.last, self.num_dropped = None, 0
        ids = self._make_room(message)
        stream = TextStream(self.decoder.target.tokenizer, self.params.stop)
        fresh: list[int] = []
        slot = None
        try:
            slot = self.decoder.admit([ids], self._next_params(), lambda _, tokens: fresh.extend(tokens))[0]
            ended = False
            while not ended:
                yield stream.take(_drained(fresh))
                ended = slot in self.decoder.step()
            result = self.decoder.release(slot)
            rest = stream.finish(result.text)
            self._keep(Turn(message, stream.sent, result))
        except (GeneratorExit, KeyboardInterrupt):
            if slot in self.decoder.live_slots and stream.sent:
                self._keep(Turn(message, stream.sent, self.decoder.release(slot), interrupted=True))
            raise
        finally:
            for live in self.decoder.live_slots:
                self.decoder.release(live)
        yield rest

    def undo(self) -> Turn | None:
        """Takes the newest turn back."""
        return self.turns.pop() if self.turns else None

    def drop(self, count: int) -> int:
        """Forgets the `count` oldest turns; returns how many there were."""
        count = min(count, len(self.turns))
        del self.turns[:count]
        return count

    def reset(self) -> None:
        """Forgets all turns; the system prompt stays."""
        self.turns.clear()

    @property
    def context_tokens(self) -> int:
        """Tokens of the conversation when the newest answer ended."""
        result = self.turns[-1].result if self.turns else None
        return result.prompt_tokens + len(result.tokens) if result else 0

    def _next_params(self) -> SamplingParams:
        self._num_answers += 1
        return replace(self.params, seed=self.params.seed + self._num_answers - 1)

    def _keep(self, turn: Turn) -> None:
        self.turns.append(turn)
        self.last = turn
        self.stats = DecodeStats.merge([self.stats, turn.result.stats])

    def _make_room(self, message: str) -> list[int]:
        """The prompt's tokens; drops the oldest turns if that was asked for and is needed."""
        limit = self.decoder.target.max_positions
        num_tokens = 0
        for skipped in range(len(self.turns) + 1 if self.drop_oldest else 1):
            ids = self._encode(self.turns[skipped:], message)
            may_drop = self.drop_oldest and skipped < len(self.turns)
            if len(ids) + (self.params.max_new_tokens if may_drop else 1) <= limit:
                self.num_dropped = self.drop(skipped)
                return ids
            num_tokens = num_tokens or len(ids)
        if self.turns:
            advice = "/drop forgets the oldest turns, /undo the newest, /reset all of them"
        else:
            advice = "shorten the message or the system prompt"
        raise LasdError(
            f"the conversation has {num_tokens} tokens with this message, the model {limit} positions: {advice}"
        )

    def _encode(self, turns: Sequence[Turn], message: str) -> list[int]:
        from jinja2 import TemplateError

        messages = [{"role": "system", "content": self.system}] if self.system else []
        for turn in turns:
            messages += [{"role": "user", "content": turn.message}, {"role": "assistant", "content": turn.answer}]
        target = self.decoder.target
        try:
            return list(target.encode_chat([*messages, {"role": "user", "content": message}]))
        except TemplateError as error:
            advice = "if it knows no system prompt, /system without a text removes it" if self.system else "try /reset"
            raise LasdError(
                f"the chat template of {target.name} refuses the conversation ({error}): {advice}"
            ) from error


def _drained(tokens: list[int]) -> list[int]:
    taken = tokens.copy()
    tokens.clear()
    return taken
