"""What the target decides about a pass: its pick after each row, and which drafted nodes are accepted.

Legend: B sequences, N rows of each, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lasd.decoding.acceptance import accept_picked, accept_typical
from lasd.decoding.request import Request
from lasd.decoding.sampling import draw, probabilities
from lasd.decoding.shaping import shaped
from lasd.decoding.tree import TreeBatch
from lasd.devices import on_device


@dataclass
class Verdict:
    """What the target decided about one pass."""

    best_B: Tensor
    """int64; the last accepted node of each tree."""
    picks_BN: Tensor
    """int64; the target's token after each row, scratch rows included."""
    finite_B: Tensor
    """bool; whether all logits that decided were finite."""


def decide(logits_BNV: Tensor, requests: Sequence[Request], batch: TreeBatch) -> Verdict:
    """Which nodes are accepted and what follows them, under each request's own parameters.

    Args:
        logits_BNV: the target's logits; rows behind the batch's nodes are scratch rows. Those get no processors, and
            count as the root's depth: their picks are never emitted.
        batch: the trees. A node of depth d decides the answer's token number (tokens so far) + d.
    """
    nodes = batch.tokens_BN.shape[1]
    depths_BN = torch.nn.functional.pad(batch.depths_BN, (0, logits_BNV.shape[1] - nodes))
    logits_BNV = _processed(_without_early_eos(logits_BNV, requests, depths_BN), requests, batch)
    highest_BN, picks_BN = logits_BNV.max(-1)
    for members in _alike(requests):
        params = requests[members[0]].params
        members_B = on_device(members, logits_BNV.device)
        probs_BNV = probabilities(logits_BNV[members_B] if len(members) < len(requests) else logits_BNV, params)
        uniforms_BN = torch.stack([_uniforms(requests[b], depths_BN[b]) for b in members])
        picks_BN[members_B] = draw(probs_BNV, uniforms_BN)
    best_B = accept_picked(batch, picks_BN[:, :nodes])
    for b, request in enumerate(requests):
        if request.params.typical is not None and not request.params.greedy:
            probs_NV = probabilities(logits_BNV[b, :nodes], request.params)
            best_B[b] = accept_typical(batch, b, probs_NV, *request.params.typical)
    path_BN = batch.ancestors_BNN[torch.arange(len(requests), device=best_B.device), best_B]
    finite_B = (torch.isfinite(highest_BN[:, :nodes]) | ~path_BN).all(1)
    return Verdict(best_B, picks_BN, finite_B)


def _alike(requests: Sequence[Request]) -> list[list[int]]:
    """Places of the sampling requests, those with the same distribution settings together."""
    groups: dict[tuple, list[int]] = {}
    for b, request in enumerate(requests):
        if not request.params.greedy and request.params.typical is None:
            groups.setdefault((request.params.temperature, request.params.top_k, request.params.top_p), []).append(b)
    return list(groups.values())


def _processed(logits_BNV: Tensor, requests: Sequence[Request], batch: TreeBatch) -> Tensor:
    """Each tree's logits after its request's processors, in float32; untouched where no request has any."""
    if not any(request.params.processors for request in requests):
        return logits_BNV
    logits_BNV = logits_BNV.float()
    for b, request in enumerate(requests):
        if request.params.processors:
            shape = batch.shapes[b]
            nodes = slice(0, shape.num_nodes)
            logits_BNV[b, nodes] = shaped(
                logits_BNV[b, nodes], batch.tokens_BN[b, nodes], shape, request.prefix, request.params.processors
            )
    return logits_BNV


def _uniforms(request: Request, depths_N: Tensor) -> Tensor:
    assert request.uniforms is not None
    return request.uniforms[request.num_answer + depths_N]


def _without_early_eos(logits_BNV: Tensor, requests: Sequence[Request], depths_BN: Tensor) -> Tensor:
    """End-of-text tokens get -inf at rows that decide a token before min_new_tokens."""
    early = [
        b for b, request in enumerate(requests) if request.eos and request.num_answer < request.params.min_new_tokens
    ]
    if not early:
        return logits_BNV
    logits_BNV = logits_BNV.clone()
    for b in early:
        request = requests[b]
        rows_N = depths_BN[b] + request.num_answer < request.params.min_new_tokens
        ids = on_device(sorted(request.eos), logits_BNV.device)
        logits_BNV[b, :, ids] = logits_BNV[b, :, ids].masked_fill(rows_N[:, None], -torch.inf)
    return logits_BNV
