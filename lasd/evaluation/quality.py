"""Task quality beside speed: what a lossy method costs. `lasd bench --quality math|summaries`.

    math        `correct`: 1 if the answer's final number equals the reference's, else 0
    summaries   `rouge1`, `rouge2`, `rougeL`: F-measures of the rouge-score package, with stemming

Each is a mean over answers, with a 95% interval, and the difference from plain decoding's with the interval of the
paired bootstrap: the same answers are drawn for both.
"""

import re
from collections.abc import Mapping, Sequence
from decimal import Decimal, InvalidOperation
from typing import Any, Protocol

import numpy as np

from lasd.errors import LasdError
from lasd.evaluation.metrics import PLAIN, RESAMPLES, Floats, bootstrap_weights
from lasd.evaluation.prompts import Prompt

KINDS = ("math", "summaries")
ENDED = "ended"
"""Beside the metrics: the share of answers that reached an end-of-text token. One cut short may score too low."""
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?|-?\.\d+")


class Scorer(Protocol):
    """Scores one answer."""

    def check(self, prompt: Prompt) -> None:
        """Raises a `LasdError` if the prompt's reference cannot be compared with."""

    def score(self, answer: str, reference: str) -> dict[str, float]:
        """Metric -> score, the same metrics for every answer."""


def load_scorer(kind: str) -> Scorer:
    """The scorer of a kind of task. Raises a `LasdError` for an unknown kind, or where its package is missing."""
    if kind not in KINDS:
        raise LasdError(f"--quality is {kind!r}, expected one of {', '.join(KINDS)}")
    return FinalNumber() if kind == "math" else Rouge()


class FinalNumber:
    """Exact match of the final number, as for GSM8K."""

    def check(self, prompt: Prompt) -> None:
        """See `Scorer`."""
        if final_number(_reference(prompt)) is None:
            raise LasdError(
                f"the reference of prompt {prompt.id} holds no number ({_reference(prompt)[:40]!r}): --quality math "
                'expects maths problems such as {"turns": [...], "reference": ["... #### 18"]}'
            )

    def score(self, answer: str, reference: str) -> dict[str, float]:
        """See `Scorer`."""
        return {"correct": float(final_number(answer) == final_number(reference))}


class Rouge:
    """ROUGE-1, ROUGE-2 and ROUGE-L."""

    def __init__(self) -> None:
        try:
            from rouge_score.rouge_scorer import RougeScorer
        except ImportError as error:
            raise LasdError(
                f"--quality summaries needs the package rouge-score ({error}): pip install 'lasd[eval]'"
            ) from None
        self._scorer = RougeScorer(["rouge1", "rouge2", "rougeL"], use_stemmer=True)

    def check(self, prompt: Prompt) -> None:
        """See `Scorer`."""
        _reference(prompt)

    def score(self, answer: str, reference: str) -> dict[str, float]:
        """See `Scorer`."""
        return {name: float(found.fmeasure) for name, found in self._scorer.score(reference, answer).items()}


def final_number(text: str) -> Decimal | None:
    """The number behind "####" if the text has that mark, else its last number; None without any.

    Example: "so 3 x 400 = $1,200.00." gives 1200.
    """
    found = _NUMBER.findall(text.rpartition("####")[2])
    try:
        return Decimal(found[-1].replace(",", "")).normalize() if found else None
    except InvalidOperation:
        return None


def check_references(prompts: Sequence[Prompt], scorer: Scorer) -> None:
    """Raises a `LasdError` unless every prompt can be scored: told before anything is measured."""
    for prompt in prompts:
        scorer.check(prompt)


def qualities(
    answers: Mapping[str, Sequence[Sequence[int]]],
    prompts: Sequence[Prompt],
    scorer: Scorer,
    tokenizer: Any,
    eos_token_ids: Sequence[int],
    seed: int = 0,
) -> dict[str, dict[str, Any]]:
    """The quality of each method's answers: metric -> mean, interval95, vs_plain, vs_plain_interval95.

    Args:
        answers: method -> token ids of its answer to each of `prompts`, in order; "plain" must be among them.
    """
    columns = {name: _columns(own, prompts, scorer, tokenizer, eos_token_ids) for name, own in answers.items()}
    weights_RU = bootstrap_weights(len(prompts), RESAMPLES, seed)
    weights_RU /= weights_RU.sum(axis=1, keepdims=True)
    return {
        name: {metric: _compared(values, columns[PLAIN][metric], weights_RU) for metric, values in own.items()}
        for name, own in columns.items()
    }


def _columns(
    answers: Sequence[Sequence[int]],
    prompts: Sequence[Prompt],
    scorer: Scorer,
    tokenizer: Any,
    eos_token_ids: Sequence[int],
) -> dict[str, Floats]:
    """Metric -> its score for each answer."""
    rows = []
    for prompt, tokens in zip(prompts, answers, strict=True):
        text = tokenizer.decode(list(tokens), skip_special_tokens=True)
        ended = float(bool(tokens) and tokens[-1] in eos_token_ids)
        rows.append(scorer.score(text, _reference(prompt)) | {ENDED: ended})
    return {metric: np.array([row[metric] for row in rows], dtype=np.float64) for metric in rows[0]}


def _compared(values_U: Floats, plain_U: Floats, weights_RU: Floats) -> dict[str, Any]:
    drawn_R, difference_R = weights_RU @ values_U, weights_RU @ (values_U - plain_U)
    return {
        "mean": float(drawn_R[0]),
        "interval95": _percentiles(drawn_R),
        "vs_plain": float(difference_R[0]),
        "vs_plain_interval95": _percentiles(difference_R),
    }


def _percentiles(drawn_R: Floats) -> list[float]:
    return [float(bound) for bound in np.percentile(drawn_R[1:], [2.5, 97.5])]


def _reference(prompt: Prompt) -> str:
    if not prompt.reference:
        raise LasdError(
            f'prompt {prompt.id} has no reference: --quality expects "reference", "answer" or "summary" in each '
            "record; choose records with --category, or leave out --quality"
        )
    return prompt.reference
