"""The model's own answers that heads are judged on: held-out distilled data, or prompts that are answered here."""

import hashlib
import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from lasd.conversations import load_distilled
from lasd.conversations.split import held_out
from lasd.decoding.decoder import Decoder
from lasd.decoding.sampling import SamplingParams
from lasd.decoding.target import TargetModel
from lasd.errors import LasdError
from lasd.evaluation.prompts import Prompt
from search.saved import read_json, write_json

logger = logging.getLogger(__name__)

PROMPTS_AT_ONCE = 8


@dataclass(frozen=True)
class Answer:
    """A text with the model's answer in it.

    Attributes:
        ids: token ids.
        mask: for each token whether it belongs to an answer.
    """

    ids: list[int]
    mask: list[int]

    @property
    def last_start(self) -> int:
        """Number of tokens before the last answer."""
        end = max((i for i, labelled in enumerate(self.mask) if labelled), default=-1) + 1
        start = end
        while start > 0 and self.mask[start - 1]:
            start -= 1
        return start


def held_out_answers(folder: str, target: TargetModel, share: float, limit: int) -> list[Answer]:
    """Answers of distilled records that training held out, in an order by a hash of their id.

    Args:
        folder: what `distill/self_distill.py` wrote.
        target: checked against the data.
        share: the share that training held out.
        limit: most answers; 0 for all.
    """
    data = load_distilled(folder)
    data.check_against(target)
    records = [record for record in data if held_out(record.id, share) and any(record.loss_mask)]
    fitting = [record for record in records if len(record.input_ids) <= target.max_positions]
    if not fitting:
        total = data.manifest["counts"]
        raise LasdError(
            f"{folder} has no held-out answer for a share of {share:g} (its counts: {total}); "
            "give a larger --held_out_share, distil more prompts, or calibrate on --prompts FILE"
        )
    fitting.sort(key=lambda record: hashlib.sha256(f"order {record.id}".encode()).digest())
    return [Answer(record.input_ids, record.loss_mask) for record in fitting[: limit or None]]


def answer_prompts(
    target: TargetModel,
    prompts: Sequence[Prompt],
    max_new_tokens: int,
    path: Path,
    progress: Callable[[int], None] = lambda done: None,
) -> list[Answer]:
    """Greedy answers to prompts, by plain decoding; kept in `path` as they come, so that a rerun continues.

    Args:
        target: the model.
        prompts: token ids.
        max_new_tokens: tokens of an answer.
        path: where the answers are kept.
        progress: told how many prompts are answered.
    """
    asked = json.dumps([[list(prompt.ids) for prompt in prompts], max_new_tokens, target.source, str(target.dtype)])
    fingerprint = hashlib.sha256(asked.encode()).hexdigest()[:32]
    kept = read_json(path) or {}
    answers: dict[str, list[int]] = kept["answers"] if kept.get("fingerprint") == fingerprint else {}
    open_prompts = sorted((i for i in range(len(prompts)) if str(i) not in answers), key=lambda i: len(prompts[i].ids))
    decoder = Decoder(target, max_slots=PROMPTS_AT_ONCE)
    progress(len(answers))
    for first in range(0, len(open_prompts), PROMPTS_AT_ONCE):
        group = open_prompts[first : first + PROMPTS_AT_ONCE]
        results = decoder.generate([prompts[i].ids for i in group], SamplingParams(max_new_tokens=max_new_tokens))
        answers |= {str(i): result.tokens for i, result in zip(group, results, strict=True)}
        write_json(path, {"fingerprint": fingerprint, "answers": answers})
        progress(len(answers))
    texts = [(list(prompt.ids), answers[str(i)]) for i, prompt in enumerate(prompts)]
    return [Answer(prompt + answer, [0] * len(prompt) + [1] * len(answer)) for prompt, answer in texts]


def fingerprint_of(answers: Sequence[Answer]) -> str:
    """A hash of the answers and their order."""
    digest = hashlib.sha256()
    for answer in answers:
        digest.update(json.dumps([answer.ids, answer.mask]).encode())
    return digest.hexdigest()[:32]
