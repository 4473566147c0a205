"""What the target picks after each row of a pass: the likeliest token, or a draw.

Legend: B sequences, N rows of each, V vocabulary.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from lasd.decoding.request import Request
from lasd.decoding.sampling import draw, probabilities
from lasd.decoding.shaping import shaped
from lasd.decoding.tree import TreeBatch


def pick(logits_BNV: Tensor, requests: Sequence[Request], batch: TreeBatch) -> tuple[Tensor, Tensor]:
    """The target's token after each row, under each request's own parameters.

    Args:
        logits_BNV: the target's logits; rows behind the batch's nodes are scratch rows. Those get no processors, and count
            as the root's depth: their picks are never emitted.
        batch: the trees. A node of depth d decides the answer's token number (tokens so far) + d.

    Returns:
        picks int64 [B, N], and bool [B]: whether all of a sequence's rows had a finite best logit.
    """
    depths_BN = torch.nn.functional.pad(batch.depths_BN, (0, logits_BNV.shape[1] - batch.depths_BN.shape[1]))
    logits_BNV = _processed(_without_early_eos(logits_BNV, requests, depths_BN), requests, batch)
    best_BN, picks_BN = logits_BNV.max(-1)
    groups: dict[tuple, list[int]] = {}
    for b, request in enumerate(requests):
        if not request.params.greedy:
            groups.setdefault((request.params.temperature, request.params.top_k, request.params.top_p), []).append(b)
    for members in groups.values():
        probs_BNV = probabilities(logits_BNV[members] if len(members) < len(requests) else logits_BNV, requests[members[0]].params)
        uniforms_BN = torch.stack([_uniforms(requests[b], depths_BN[b]) for b in members])
        picks_BN[members] = draw(probs_BNV, uniforms_BN)
    return picks_BN, torch.isfinite(best_BN).all(1)


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
    early = [b for b, request in enumerate(requests) if request.eos and request.num_answer < request.params.min_new_tokens]
    if not early:
        return logits_BNV
    logits_BNV = logits_BNV.clone()
    for b in early:
        request = requests[b]
        rows_N = depths_BN[b] + request.num_answer < request.params.min_new_tokens
        ids = torch.tensor(sorted(request.eos), device=logits_BNV.device)
        logits_BNV[b, :, ids] = logits_BNV[b, :, ids].masked_fill(rows_N[:, None], -torch.inf)
    return logits_BNV
