"""Counts at which rank each head guesses the true token, on answers of the model itself; a rerun continues.

Legend: B texts of one batch, N tokens of the longest, D hidden size, V vocabulary, K heads, M places of a chunk,
R ranks.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lasd.decoding.target import TargetModel
from lasd.drafters.medusa import MedusaHeads
from search.answers import Answer
from search.rank_counts import RankCounts, Run, answer_runs
from search.saved import read_json, write_json

logger = logging.getLogger(__name__)

CHUNK_PLACES = 256
"""Places whose logits are held at once (times K heads, times the vocabulary)."""
SAVE_EVERY_S = 20.0


@dataclass
class Calibration:
    """Counts, and what they were counted on.

    Attributes:
        counts: ranks by head and by path.
        fingerprint: what the counts hold for (heads, model, answers, settings).
        runs: the counted places themselves, so that a tree can be replayed on them.
        answers: texts counted so far.
        tokens: answer tokens in them.
        own: of those, tokens that are the model's own likeliest choice; only they are judged.
    """

    counts: RankCounts
    fingerprint: dict[str, Any]
    runs: list[Run] = field(default_factory=list)
    answers: int = 0
    tokens: int = 0
    own: int = 0

    @property
    def own_share(self) -> float:
        """Share of the answer tokens that greedy decoding would have chosen."""
        return self.own / self.tokens if self.tokens else 0.0

    def save(self, path: Path) -> None:
        """Writes the counts so far; a reader finds the old file or the new one, never half of one."""
        data = {**vars(self), "counts": self.counts.to_dict()}
        write_json(path, data)

    @classmethod
    def load(cls, path: Path, fingerprint: dict[str, Any]) -> "Calibration | None":
        """Reads saved counts; None where there are none, or where they hold for something else."""
        data = read_json(path)
        if data is None or data.get("fingerprint") != fingerprint:
            return None
        return cls(**{**data, "counts": RankCounts.from_dict(data["counts"])})


@torch.inference_mode()
def calibrate(
    target: TargetModel,
    heads: MedusaHeads,
    answers: Sequence[Answer],
    max_rank: int,
    fingerprint: dict[str, Any],
    path: Path,
    *,
    batch_tokens: int = 2048,
    progress: Callable[[int], None] = lambda done: None,
) -> Calibration:
    """Counts over all answers; continues what `path` holds if its fingerprint is the same.

    Args:
        target: the model that gave the answers.
        heads: on the target's device.
        answers: texts.
        max_rank: ranks to count.
        fingerprint: of the heads, the model, the answers and the settings.
        path: where the counts are kept.
        batch_tokens: tokens of one teacher-forced pass, padding included.
        progress: told how many answers are done.
    """
    done = Calibration.load(path, fingerprint)
    if done is None:
        done = Calibration(RankCounts(heads.num_heads, max_rank), fingerprint)
    elif done.answers:
        logger.info("continuing from %s: %d of %d answers are counted", path, done.answers, len(answers))
    saved = time.monotonic()
    progress(done.answers)
    while done.answers < len(answers):
        batch = _next_batch(answers[done.answers :], batch_tokens)
        for answer, hidden_ND in zip(batch, _hidden_states(target, batch), strict=True):
            _count(done, target, heads, answer, hidden_ND)
        done.answers += len(batch)
        progress(done.answers)
        if time.monotonic() - saved > SAVE_EVERY_S:
            done.save(path)
            saved = time.monotonic()
    done.save(path)
    return done


def true_ranks(target: TargetModel, heads: MedusaHeads, hidden_MD: Tensor, true_MK: Tensor, max_rank: int) -> Tensor:
    """Rank of the true token among each head's `max_rank` likeliest guesses, in the drafter's order; else `max_rank`.

    Args:
        hidden_MD: hidden states at M places.
        true_MK: int64; the token that head 1 ... K should guess at each place.

    Returns:
        int64 [M, K].
    """
    guesses_KMR = heads.candidates(hidden_MD, target, max_rank)
    right_KMR = guesses_KMR == true_MK.T.unsqueeze(-1)
    ranks_KM = right_KMR.int().argmax(-1).masked_fill(~right_KMR.any(-1), max_rank)
    return ranks_KM.T


def _next_batch(answers: Sequence[Answer], batch_tokens: int) -> list[Answer]:
    batch: list[Answer] = []
    longest = 0
    for answer in answers:
        longest = max(longest, len(answer.ids))
        if batch and longest * (len(batch) + 1) > batch_tokens:
            break
        batch.append(answer)
    return batch


def _hidden_states(target: TargetModel, batch: Sequence[Answer]) -> list[Tensor]:
    """Hidden states [N, D] of each text, its padding cut off."""
    longest = max(len(answer.ids) for answer in batch)
    ids_BN = torch.tensor([[*answer.ids, *[0] * (longest - len(answer.ids))] for answer in batch], device=target.device)
    lengths_B = torch.tensor([len(answer.ids) for answer in batch], device=target.device)
    hidden_BND = target.hidden_states(ids_BN, lengths_B)
    return [hidden_BND[b, : len(answer.ids)] for b, answer in enumerate(batch)]


def _count(done: Calibration, target: TargetModel, heads: MedusaHeads, answer: Answer, hidden_ND: Tensor) -> None:
    """Adds one text's places: as far as the root and the tokens behind it are the model's own answer."""
    mask = [bool(labelled) for labelled in answer.mask]
    wanted = [t for t in range(len(mask) - 1) if mask[t + 1]]
    ids = torch.tensor(answer.ids, device=hidden_ND.device)
    reach = torch.arange(2, heads.num_heads + 2, device=hidden_ND.device)
    judged = [False] * len(mask)
    ranks: list[list[int]] = [[] for _ in mask]
    for first in range(0, len(wanted), CHUNK_PLACES):
        places = wanted[first : first + CHUNK_PLACES]
        places_M = torch.tensor(places, device=hidden_ND.device)
        hidden_MD = hidden_ND[places_M]
        own_M = target.project(hidden_MD).max(-1).indices == ids[places_M + 1]  # as the decoder picks
        true_MK = ids[(places_M[:, None] + reach).clamp(max=len(ids) - 1)]
        ranks_MK = true_ranks(target, heads, hidden_MD, true_MK, done.counts.max_rank)
        for place, own, line in zip(places, own_M.tolist(), ranks_MK.tolist(), strict=True):
            judged[place + 1] = own
            ranks[place] = line
    done.tokens += len(wanted)
    done.own += sum(judged)
    for run in answer_runs(judged, ranks):
        done.counts.add(run)
        done.runs.append(run)
