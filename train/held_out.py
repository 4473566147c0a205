"""What the heads do on held-out answers: ranks of the true tokens, and tokens a step predicted and measured.

Legend: K heads, M positions, D hidden size, V vocabulary, P positions of one answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lasd.decoding.decoder import Decoder
from lasd.decoding.sampling import SamplingParams
from lasd.decoding.stats import DecodeStats
from lasd.decoding.target import TargetModel
from lasd.decoding.tree import TreeShape
from lasd.drafters.medusa import MedusaDrafter, MedusaHeads
from train.data import Sample, collate
from train.losses import IGNORE

NO_TARGET = -1
_ROWS = 64  # logits of this many positions at a time
_BATCH_TOKENS = 4096

DEFAULT_TREE: list[list[int]] = [
    *([rank] for rank in range(4)),
    *([0, rank] for rank in range(3)),
    [1, 0],
    [1, 1],
    [2, 0],
    [0, 0, 0],
    [0, 0, 1],
    [0, 1, 0],
    [1, 0, 0],
    [0, 0, 0, 0],
]
"""15 nodes behind the root, until a tree is sized for a machine."""


def default_tree(num_heads: int) -> list[list[int]]:
    """The default tree, cut to the number of heads."""
    return [path for path in DEFAULT_TREE if len(path) <= num_heads]


def copy_for_decoding(heads: MedusaHeads, target: TargetModel) -> MedusaHeads:
    """The heads as the decoder will run them: a copy in the target's dtype, on the device of its output embedding."""
    device = target.lm_head.weight.device
    tensors = {
        name: value.detach().to(device, target.dtype if value.is_floating_point() else value.dtype, copy=True)
        for name, value in heads.state_dict().items()
    }
    return MedusaHeads.from_tensors(tensors).eval().requires_grad_(False)


@torch.no_grad()
def token_ranks(heads: MedusaHeads, target: TargetModel, samples: Sequence[Sample]) -> list[Tensor]:
    """Rank of the true token in each head's logits, at every position of every answer.

    Args:
        heads: as `copy_for_decoding` returns them.
        target: the model the heads read.
        samples: held-out records.

    Returns:
        For each sample ranks_KP (int64, CPU): P supervised positions of head 1 in order, 0 = likeliest, equal logits
        ranked by token id; `NO_TARGET` where head k has no target there. Among the heads' `token_map` where they have
        one; a token outside it ranks behind the whole vocabulary.
    """
    by_length = sorted(range(len(samples)), key=lambda i: samples[i].num_tokens)
    ranks: list[Tensor] = [torch.empty(0)] * len(samples)
    for batch in _batches(by_length, [sample.num_tokens for sample in samples]):
        inputs = collate([samples[i] for i in batch], heads.num_heads)
        targets_KBL = inputs["targets_KBL"].to(target.device)
        hidden_BLD = target.hidden_states(inputs["ids_BL"].to(target.device), inputs["lengths_B"].to(target.device))
        valid_BL = targets_KBL[0] != IGNORE
        ranks_KM = _ranks(heads, target, hidden_BLD[valid_BL], targets_KBL[:, valid_BL]).cpu()
        for index, part in zip(batch, ranks_KM.split(valid_BL.sum(1).tolist(), dim=1), strict=True):
            ranks[index] = part
    return ranks


def _batches(order: Sequence[int], lengths: Sequence[int]) -> list[list[int]]:
    batches: list[list[int]] = []
    for index in order:
        if batches and (len(batches[-1]) + 1) * lengths[index] <= _BATCH_TOKENS:
            batches[-1].append(index)
        else:
            batches.append([index])
    return batches


def _ranks(heads: MedusaHeads, target: TargetModel, hidden_MD: Tensor, targets_KM: Tensor) -> Tensor:
    ranks_KM = torch.full_like(targets_KM, NO_TARGET)
    columns = torch.arange(target.vocab_size, device=targets_KM.device)
    offered_V = torch.ones_like(columns, dtype=torch.bool)
    if heads.token_map is not None:
        offered_V = torch.zeros_like(offered_V).index_fill_(0, heads.token_map.to(columns.device), True)
    for start in range(0, hidden_MD.shape[0], _ROWS):
        rows = slice(start, start + _ROWS)
        for k in range(heads.num_heads):
            logits_MV = heads.logits(hidden_MD[rows], target, slice(k, k + 1))[0]
            true_M1 = targets_KM[k, rows, None]
            value_M1 = logits_MV.gather(1, true_M1.clamp(min=0))
            ahead_MV = (logits_MV > value_M1) | ((logits_MV == value_M1) & (columns < true_M1))
            ranks_M = (ahead_MV & offered_V).sum(1)
            ranks_M = torch.where(offered_V[true_M1[:, 0].clamp(min=0)], ranks_M, target.vocab_size)
            ranks_KM[k, rows] = torch.where(true_M1[:, 0] == IGNORE, NO_TARGET, ranks_M)
    return ranks_KM


def accuracy(ranks: Sequence[Tensor]) -> dict[str, float]:
    """Share of true tokens among the first 1 and 5 candidates of each head: `head1_top1`, `head1_top5`, ..."""
    ranks_KP = torch.cat(list(ranks), 1)
    result = {}
    for k, ranks_P in enumerate(ranks_KP, start=1):
        known_P = ranks_P[ranks_P != NO_TARGET]
        for top in (1, 5):
            result[f"head{k}_top{top}"] = (known_P < top).float().mean().item() if len(known_P) else 0.0
    return result


def predicted_tokens_per_step(ranks: Sequence[Tensor], shape: TreeShape, new_tokens: int) -> float:
    """Tokens a step that a tree keeps if the decoder repeats the held-out answers, by walking along their ranks.

    The first position predicts behind the answer's first token, which prefill yields. From there each step keeps the
    longest path whose ranks are those of the true tokens, plus one token of the model's own.

    Args:
        ranks: as `token_ranks` returns them.
        shape: the tree.
        new_tokens: tokens of each answer that count, the first included.
    """
    paths = set(shape.paths())
    kept = steps = 0
    for ranks_KP in ranks:
        columns = ranks_KP.T.tolist()
        position, tokens = 0, 1  # position p stands for the answer's token p being the root of the step
        answer = min(new_tokens, len(columns) + 1)
        while tokens < answer and position < len(columns):
            accepted = _accepted(columns[position], paths)
            gained = min(accepted + 1, answer - tokens)
            tokens, steps, kept = tokens + gained, steps + 1, kept + gained
            position += accepted + 1
    return kept / steps if steps else 0.0


def _accepted(ranks_K: Sequence[int], paths: set[tuple[int, ...]]) -> int:
    depth = 0
    while depth < len(ranks_K) and ranks_K[depth] != NO_TARGET and tuple(ranks_K[: depth + 1]) in paths:
        depth += 1
    return depth


@dataclass(frozen=True)
class Prompted:
    """The first turn of a record: its prompt and the answer that follows it."""

    sample: Sample
    prompt: list[int]
    answer: list[int]


def first_turn(sample: Sample) -> Prompted:
    """Cuts a record at its first answer."""
    labelled = sample.mask_L.nonzero()[:, 0]
    start = int(labelled[0])
    after = (~sample.mask_L[start:]).nonzero()
    end = start + int(after[0]) if len(after) else sample.num_tokens
    turn = Sample(sample.id, sample.ids_L[:end], sample.mask_L[:end])
    return Prompted(turn, sample.ids_L[:start].tolist(), sample.ids_L[start:end].tolist())


def measured_stats(
    heads: MedusaHeads, target: TargetModel, shape: TreeShape, prompts: Sequence[Sequence[int]], new_tokens: int
) -> list[DecodeStats]:
    """Decodes the prompts greedily with the real decoder and a tree; the statistics of each.

    Args:
        heads: as `copy_for_decoding` returns them.
        target: the model.
        shape: the tree.
        prompts: token ids.
        new_tokens: tokens for each prompt.
    """
    decoder = Decoder(target, MedusaDrafter(heads, shape, target), max_slots=len(prompts))
    results = decoder.generate(prompts, SamplingParams(max_new_tokens=new_tokens))
    return [result.stats for result in results]
