"""The loop around the decoder: conversations answered turn by turn, slots kept full, prompts of like length together.

Token ids and labels come from generation itself. The ids of a turn's prompt are the template's, the ids behind it are
those the model produced; no text is tokenised to find the answer.
"""

import hashlib
import heapq
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from distill.filters import is_loop
from lasd.conversations import Conversation, DistilledRecord
from lasd.conversations.split import part_id
from lasd.decoding.sampling import SamplingParams

Encode = Callable[[list[dict[str, str]]], list[int]]
MAX_PADDED_PREFILL_TOKENS = 16_384


class TurnEncodingError(Exception):
    """The chat template refuses these turns."""


class DecodesSlots(Protocol):
    """The part of `lasd.decoding.decoder.Decoder` that the loop uses."""

    @property
    def free_slots(self) -> int:
        """Sequences that can be admitted now."""

    def admit(self, prompts: Any, params: Any) -> list[int]:
        """Prefills prompts as one batch; returns their slots."""

    def step(self) -> list[int]:
        """Decodes one step; returns the slots that ended."""

    def release(self, slot: int) -> Any:
        """The answer of a slot that ended."""


@dataclass(frozen=True)
class TurnRules:
    """How one conversation is answered."""

    sampling: SamplingParams
    max_prompt_tokens: int
    multi_turn: bool = True
    drop_truncated: bool = False
    drop_repetitive: bool = False


@dataclass
class Job:
    """A conversation on its way: what was asked so far, the records that come of it, and the prompt that is next."""

    conversation: Conversation
    messages: list[dict[str, str]]
    waiting: list[str]
    prompt: list[int]
    records: list[DistilledRecord] = field(default_factory=list)
    turn: int = 0
    verdict: str | None = None

    @classmethod
    def start(cls, conversation: Conversation, encode: Encode, multi_turn: bool = True) -> "Job":
        """The job before its first answer. Raises `TurnEncodingError`."""
        user_turns = conversation.user_turns if multi_turn else conversation.user_turns[:1]
        messages = [{"role": "system", "content": conversation.system}] if conversation.system else []
        messages.append({"role": "user", "content": user_turns[0]})
        return cls(conversation, messages, user_turns[1:], encode(messages))

    def seed(self, run_seed: int) -> int:
        """The seed of the next answer: depends on the run's seed, the id and the turn, not on batches or ranks."""
        text = f"{run_seed}\0{self.conversation.id}\0{self.turn}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 2

    def take(self, result: Any, rules: TurnRules, encode: Encode) -> bool:
        """Takes the answer to `prompt`; returns whether another turn is to be asked (then `prompt` holds it)."""
        tokens, reason = list(result.tokens), result.finish_reason
        text = result.text
        whole = reason in ("eos", "stop")
        if not text.strip():
            return self._end("empty_answer")
        if rules.drop_truncated and not whole:
            return self._end("answer_cut")
        if rules.drop_repetitive and is_loop(tokens):
            return self._end("repetitive_answer")
        self._append(tokens, reason)
        self.messages.append({"role": "assistant", "content": text})
        self.turn += 1
        if not whole or not self.waiting:
            return False
        messages = [*self.messages, {"role": "user", "content": self.waiting[0]}]
        try:
            prompt = encode(messages)
        except TurnEncodingError:
            return False
        if len(prompt) > rules.max_prompt_tokens:
            return False
        self.waiting, self.messages, self.prompt = self.waiting[1:], messages, prompt
        return True

    def _append(self, tokens: list[int], reason: str) -> None:
        last = self.records[-1] if self.records else None
        if last is None or self.prompt[: len(last.input_ids)] != last.input_ids:
            record_id = part_id(self.conversation.id, len(self.records))
            last = DistilledRecord(record_id, [], [], 0, self.conversation.category, [])
            self.records.append(last)
        last.loss_mask += [0] * (len(self.prompt) - len(last.input_ids)) + [1] * len(tokens)
        last.input_ids = self.prompt + tokens
        last.turns += 1
        last.finish.append(reason)

    def _end(self, verdict: str) -> bool:
        """Ends without this answer; the conversation as a whole is set aside only if it has no answer at all."""
        if self.records:
            self.messages.pop()
        else:
            self.verdict = verdict
        return False


def run_jobs(
    decoder: DecodesSlots, jobs: Iterable[Job], rules: TurnRules, encode: Encode, admit_group: int
) -> Iterator[tuple[Job, Any, bool]]:
    """Answers all jobs; yields (job, result, whether it is finished) for every answered turn, as they come.

    Shorter prompts go first, so that a conversation's next turn, which is longer, falls in with prompts of its length.
    Slots that became free wait until `admit_group` of them can be filled by one prefill, or nothing is left to decode.
    """
    pending = [(len(job.prompt), number, job) for number, job in enumerate(jobs)]
    heapq.heapify(pending)
    serial = len(pending)
    live: dict[int, Job] = {}
    while pending or live:
        while pending and decoder.free_slots and (not live or decoder.free_slots >= min(admit_group, len(pending))):
            batch = _next_batch(pending, decoder.free_slots)
            params = [replace(rules.sampling, seed=job.seed(rules.sampling.seed)) for job in batch]
            live.update(zip(decoder.admit([job.prompt for job in batch], params), batch, strict=True))
        for slot in decoder.step():
            result, job = decoder.release(slot), live.pop(slot)
            goes_on = job.take(result, rules, encode)
            if goes_on:
                heapq.heappush(pending, (len(job.prompt), serial, job))
                serial += 1
            yield job, result, not goes_on


def _next_batch(pending: list[tuple[int, int, Job]], free: int) -> list[Job]:
    """The shortest waiting prompts, as many as fit into the free slots without much padding."""
    shortest = pending[0][0]
    batch: list[Job] = []
    while pending and len(batch) < free:
        length = pending[0][0]
        if batch and (length > 2 * shortest + 32 or length * (len(batch) + 1) > MAX_PADDED_PREFILL_TOKENS):
            break
        batch.append(heapq.heappop(pending)[2])
    return batch
