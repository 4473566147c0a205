"""One process's share of the prompts: prepared, answered with the decoder, stored as the answers come."""

import logging
from typing import TYPE_CHECKING, Any

import torch
from jinja2.exceptions import TemplateError

from distill.generate import Encode, Job, TurnEncodingError, TurnRules, run_jobs
from distill.progress import DistillProgress
from distill.store import Store, finished_ids
from lasd.conversations import Conversation, Report
from lasd.decoding.decoder import Decoder
from lasd.errors import LasdError

if TYPE_CHECKING:
    from lasd.decoding.target import TargetModel

logger = logging.getLogger(__name__)

_TIMES = ("prefill_s", "verify_s", "overhead_s")
_FROM = {"system": "system", "user": "human", "assistant": "gpt"}


def encoder(target: "TargetModel") -> Encode:
    """The target's chat template as the loop takes it: what the template refuses is a `TurnEncodingError`."""

    def encode(messages: list[dict[str, str]]) -> list[int]:
        try:
            return target.encode_chat(messages)
        except (TemplateError, LasdError) as error:
            raise TurnEncodingError(str(error)) from error

    return encode


def prepare_jobs(
    conversations: list[Conversation], report: Report, rules: TurnRules, target: "TargetModel", limit: int | None
) -> list[Job]:
    """The first `limit` conversations that the template takes and whose first prompt fits."""
    encode = encoder(target)
    jobs: list[Job] = []
    for conversation in conversations:
        if limit is not None and len(jobs) >= limit:
            break
        try:
            job = Job.start(conversation, encode, rules.multi_turn)
        except TurnEncodingError as error:
            logger.debug("%s: %s", conversation.id, error)
            report.note_set_aside(conversation.id, "template_error")
            continue
        if len(job.prompt) > rules.max_prompt_tokens:
            report.note_set_aside(conversation.id, "over_long")
        else:
            jobs.append(job)
    return jobs


def answer_share(
    target: "TargetModel", jobs: list[Job], rules: TurnRules, store: Store, batch_size: int, admit_group: int
) -> dict[str, Any]:
    """Answers the jobs that no earlier run finished.

    Args:
        target: the model that answers.
        jobs: this process's share.
        rules: how a conversation is answered.
        store: where finished conversations go, one by one.
        batch_size: sequences decoded at once.
        admit_group: prompts prefilled at once; 0 means an eighth of the slots.

    Returns:
        What it took: turns, tokens, seconds and their parts.

    Raises:
        LasdError: the device's memory does not suffice; what was finished is stored.
    """
    done, aside = finished_ids(store.output)
    waiting = [job for job in jobs if job.conversation.id not in done and job.conversation.id not in aside]
    if len(waiting) < len(jobs):
        logger.info("resuming: %d of %d conversations are there already", len(jobs) - len(waiting), len(jobs))
    slots = min(batch_size, max(len(waiting), 1))
    total, left = _turns(jobs), _turns(waiting)
    name = "progress.jsonl" if store.rank == 0 else f"progress-{store.rank:05d}.jsonl"
    times = dict.fromkeys(_TIMES, 0.0)
    encode, decoder = encoder(target), _decoder(target, waiting, rules, slots)
    with DistillProgress(store.output / name, total, total - left, show=store.rank == 0) as progress:
        try:
            for job, result, finished in run_jobs(decoder, waiting, rules, encode, admit_group or max(1, slots // 8)):
                progress.advance(len(result.tokens), 1 + (len(job.waiting) if finished else 0))
                times = {part: seconds + getattr(result.stats, part) for part, seconds in times.items()}
                if finished:
                    _store(job, store)
        except torch.OutOfMemoryError as error:
            raise LasdError(
                f"{slots} sequences at once do not fit into the memory of {target.device}: lower --batch_size or "
                "--max_prompt_tokens and run again; finished work is kept"
            ) from error
    took = {"tokens": progress.tokens, "seconds": round(progress.seconds, 2)}
    times = {part: round(seconds, 2) for part, seconds in times.items()}
    return {"rank": store.rank, "batch_size": slots, "turns": progress.done - (total - left), **took, **times}


def _turns(jobs: list[Job]) -> int:
    return sum(1 + len(job.waiting) for job in jobs)


def _decoder(target: "TargetModel", waiting: list[Job], rules: TurnRules, slots: int) -> Decoder:
    """A decoder whose slots are as long as these jobs can become."""
    longest = max((len(job.prompt) for job in waiting), default=1)
    if any(job.waiting for job in waiting):
        longest = rules.max_prompt_tokens
    return Decoder(target, max_slots=slots, max_context=longest + rules.sampling.max_new_tokens)


def _store(job: Job, store: Store) -> None:
    if job.verdict:
        store.set_aside(job.conversation.id, job.verdict)
        return
    readable = [{"from": _FROM[message["role"]], "value": message["content"]} for message in job.messages]
    store.write(job.conversation.id, job.records, readable)
