"""Losses of the Medusa heads: pure functions of hidden features and token ids.

Legend: B rows of a batch, L tokens of a row, K heads, M supervised positions, R supervised (head, position) pairs,
C pairs of one chunk, D hidden size, V vocabulary.

Head k (k = 1..K) reads the hidden state at position t and is trained on token t + 1 + k; the model's own output
embedding predicts token t + 1. The shift is made in one place, `shift_targets`; everything after it works on targets
that already stand at the position they are predicted from.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

IGNORE = -100
"""Target of a (head, position) pair that has none."""

_CPU_CHUNK_ROWS = 256
_CPU_CACHE_ROWS = 32
_GPU_CHUNK_BYTES = 256 * 1024 * 1024


def shift_targets(ids_BL: Tensor, mask_BL: Tensor, num_heads: int) -> Tensor:
    """Builds the targets of every head: the only place where tokens are shifted.

    Args:
        ids_BL: token ids, right-padded.
        mask_BL: True (or 1) where the token was written by the assistant; False in prompts and padding.
        num_heads: K.

    Returns:
        targets_KBL, int64: `targets[k - 1, b, t]` is token t + 1 + k of row b if tokens t + 1 ... t + 1 + k are all
        labelled, else `IGNORE`. The first supervised position of an answer is the token just before it; because the
        run must be unbroken, no target ever crosses a turn. A row holds tokens of one record only, so none crosses a
        record. The positions of head k are a subset of those of head k - 1.
    """
    labelled_BL = mask_BL.bool()
    length = ids_BL.shape[1]
    targets_KBL = ids_BL.new_full((num_heads, *ids_BL.shape), IGNORE, dtype=torch.long)
    unbroken_BL = labelled_BL[:, 1:]  # at column t: tokens t + 1 ... t + offset are labelled, offset = 1
    for k in range(1, num_heads + 1):
        offset = k + 1
        if length <= offset:
            break
        unbroken_BL = unbroken_BL[:, : length - offset] & labelled_BL[:, offset:]
        targets_KBL[k - 1, :, : length - offset] = torch.where(unbroken_BL, ids_BL[:, offset:].long(), IGNORE)
    return targets_KBL


def count_targets(targets_KBL: Tensor) -> Tensor:
    """Number of targets of each head, counts_K (int64)."""
    return (targets_KBL != IGNORE).flatten(1).sum(1)


def head_weights(num_heads: int, decay: float) -> Tensor:
    """weights_K: `decay ** k` for k = 1..K (the paper uses 0.8)."""
    return decay ** torch.arange(1, num_heads + 1, dtype=torch.float32)


@dataclass(frozen=True)
class Projection:
    """How features become logits.

    Attributes:
        project: features [..., D] to logits [..., V]; differentiable.
        weight_VD: set if `project` is exactly a product with this matrix; the fast path needs it. None otherwise
            (biased, quantised, capped or scaled outputs): `project` is then differentiated chunk by chunk.
    """

    project: Callable[[Tensor], Tensor]
    weight_VD: Tensor | None = None

    @classmethod
    def of_weight(cls, weight_VD: Tensor) -> Projection:
        """The plain product with one matrix."""
        return cls(lambda features: functional.linear(features, weight_VD.to(features.dtype)), weight_VD)


def plain_head_loss(
    features_KMD: Tensor, targets_KM: Tensor, projections: Sequence[Projection], scale_K: Tensor
) -> tuple[Tensor, Tensor]:
    """The slow obvious loss: every logit of every head at once, in float32. Kept to test the fast one against.

    Returns:
        As `head_loss`.
    """
    sums = []
    for k, projection in enumerate(projections):
        logits_MV = projection.project(features_KMD[k]).float()
        sums.append(functional.cross_entropy(logits_MV, targets_KM[k], ignore_index=IGNORE, reduction="sum"))
    sums_K = torch.stack(sums)
    return (sums_K * scale_K.to(sums_K)).sum(), sums_K.detach()


def head_loss(
    features_KMD: Tensor,
    targets_KM: Tensor,
    projections: Sequence[Projection],
    scale_K: Tensor,
    chunk_rows: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Weighted cross-entropy of all heads, without ever holding more than one chunk of logits.

    The gradient with respect to the features is computed in the forward pass, chunk by chunk, so `backward` only scales
    it. Only (head, position) pairs that have a target reach the vocabulary.

    Args:
        features_KMD: output of the heads' residual blocks.
        targets_KM: token ids, `IGNORE` where head k has no target.
        projections: one a head; heads that share one object are projected together.
        scale_K: factor of each head's sum, that is weight / number of targets in the whole optimizer step.
        chunk_rows: pairs per chunk; None chooses by device.

    Returns:
        loss (scalar, float32): sum over heads of scale_k times the summed cross-entropy; sums_K (float32, detached):
        the summed cross-entropy of each head.
    """
    has_KM = targets_KM != IGNORE
    scale_K = scale_K.to(device=features_KMD.device, dtype=torch.float32)
    sums_K = torch.zeros(len(projections), device=features_KMD.device)
    loss = features_KMD.new_zeros((), dtype=torch.float32)
    for heads in _groups(projections):
        has_GM = has_KM[heads]
        head_R = torch.tensor(heads, device=has_GM.device)[:, None].expand_as(has_GM)[has_GM]
        projection = projections[heads[0]]
        part, entropies_R = projected_cross_entropy(
            features_KMD[heads][has_GM], targets_KM[heads][has_GM], scale_K[head_R], projection, chunk_rows
        )
        loss = loss + part
        sums_K.index_add_(0, head_R, entropies_R)
    return loss, sums_K


def _groups(projections: Sequence[Projection]) -> list[list[int]]:
    groups: dict[int, list[int]] = {}
    for k, projection in enumerate(projections):
        groups.setdefault(id(projection), []).append(k)
    return list(groups.values())


def projected_cross_entropy(
    features_RD: Tensor, targets_R: Tensor, scale_R: Tensor, projection: Projection, chunk_rows: int | None = None
) -> tuple[Tensor, Tensor]:
    """Sum over rows of scale * cross-entropy(projection(features), target), chunked over rows.

    Returns:
        The scaled sum (float32, differentiable in the features and, on the fast path, in the projection's weight), and
        the unscaled entropies_R (float32, detached).
    """
    if projection.weight_VD is None:
        return _GenericEntropy.apply(features_RD, targets_R, scale_R, projection.project, chunk_rows)
    return _LinearEntropy.apply(features_RD, targets_R, scale_R, projection.weight_VD, chunk_rows)


class _LinearEntropy(torch.autograd.Function):
    """Cross-entropy behind a plain matrix. Products in the narrower of the two dtypes, log-sum-exp in float32."""

    @staticmethod
    def forward(ctx, features_RD, targets_R, scale_R, weight_VD, chunk_rows):  # type: ignore[no-untyped-def]
        dtype = min(features_RD.dtype, weight_VD.dtype, key=lambda kind: kind.itemsize)
        compute_VD = weight_VD.detach().to(dtype)
        num_rows, vocab_size = features_RD.shape[0], compute_VD.shape[0]
        chunk, cache = _chunk_sizes(features_RD.device, vocab_size, chunk_rows)
        grad_RD = torch.empty_like(features_RD)
        grad_VD = torch.zeros_like(weight_VD, dtype=torch.float32) if ctx.needs_input_grad[3] else None
        entropies_R = torch.empty(num_rows, device=features_RD.device)
        logits = torch.empty(min(chunk, num_rows), vocab_size, dtype=dtype, device=features_RD.device)
        wide = torch.empty(min(cache, num_rows), vocab_size, device=features_RD.device)
        for start in range(0, num_rows, chunk):
            rows = slice(start, min(start + chunk, num_rows))
            features_CD, targets_C, scale_C1 = (
                features_RD[rows].detach().to(dtype),
                targets_R[rows],
                scale_R[rows, None],
            )
            logits_CV = logits[: features_CD.shape[0]]
            torch.mm(features_CD, compute_VD.t(), out=logits_CV)
            entropies_R[rows], total_C1 = _to_exponentials(logits_CV, targets_C, wide)
            # d entropy / d features = sum_v softmax_v * weight_v - weight_target; the exponentials stay unnormalised
            # in the product and are divided after it, and the target's row is subtracted exactly, in float32.
            factor_C1 = scale_C1 / total_C1
            grad_CD = torch.mm(logits_CV, compute_VD).float() * factor_C1
            grad_RD[rows] = (grad_CD - compute_VD[targets_C].float() * scale_C1).to(grad_RD.dtype)
            if grad_VD is not None:
                scaled_CD = (features_CD.float() * factor_C1).to(dtype)
                grad_VD += torch.mm(logits_CV.t(), scaled_CD)
                grad_VD.index_add_(0, targets_C, features_CD.float() * -scale_C1)
        ctx.save_for_backward(grad_RD, grad_VD)
        ctx.weight_dtype = weight_VD.dtype
        ctx.mark_non_differentiable(entropies_R)
        return (entropies_R * scale_R).sum(), entropies_R

    @staticmethod
    def backward(ctx, grad_loss, _grad_entropies):  # type: ignore[no-untyped-def]
        grad_RD, grad_VD = ctx.saved_tensors
        weight_grad = None if grad_VD is None else (grad_VD * grad_loss).to(ctx.weight_dtype)
        return (grad_RD * grad_loss).to(grad_RD.dtype), None, None, weight_grad, None


def _to_exponentials(logits_CV: Tensor, targets_C: Tensor, wide: Tensor) -> tuple[Tensor, Tensor]:
    """Replaces logits by exp(logit - row maximum) in place, in pieces that stay in the cache of a CPU.

    Returns:
        entropies_C (float32) and the row sums total_C1 (float32) of the exponentials.
    """
    entropies, totals = [], []
    for start in range(0, logits_CV.shape[0], wide.shape[0]):
        piece = logits_CV[start : start + wide.shape[0]]
        top = piece.amax(-1, keepdim=True).float()
        hit = piece.gather(1, targets_C[start : start + wide.shape[0], None]).float()
        exp = wide[: piece.shape[0]]
        exp.copy_(piece).sub_(top).exp_()
        total = exp.sum(-1, keepdim=True)
        piece.copy_(exp)
        entropies.append((total.log() + top - hit)[:, 0])
        totals.append(total)
    return torch.cat(entropies), torch.cat(totals)


class _GenericEntropy(torch.autograd.Function):
    """Cross-entropy behind any frozen projection (bias, cap, scale, quantised): differentiated chunk by chunk."""

    @staticmethod
    def forward(ctx, features_RD, targets_R, scale_R, project, chunk_rows):  # type: ignore[no-untyped-def]
        num_rows = features_RD.shape[0]
        chunk = chunk_rows or _CPU_CHUNK_ROWS
        grad_RD = torch.empty_like(features_RD)
        entropies_R = torch.empty(num_rows, device=features_RD.device)
        for start in range(0, num_rows, chunk):
            rows = slice(start, min(start + chunk, num_rows))
            with torch.enable_grad():
                features_CD = features_RD[rows].detach().requires_grad_(True)
                logits_CV = project(features_CD).float()
                entropies_C = functional.cross_entropy(logits_CV, targets_R[rows], reduction="none")
                (grad_CD,) = torch.autograd.grad(entropies_C.sum(), features_CD)
            grad_RD[rows] = grad_CD * scale_R[rows, None]  # scaled last: small scales would vanish in float16
            entropies_R[rows] = entropies_C.detach()
        ctx.save_for_backward(grad_RD)
        ctx.mark_non_differentiable(entropies_R)
        return (entropies_R * scale_R).sum(), entropies_R

    @staticmethod
    def backward(ctx, grad_loss, _grad_entropies):  # type: ignore[no-untyped-def]
        (grad_RD,) = ctx.saved_tensors
        return (grad_RD * grad_loss).to(grad_RD.dtype), None, None, None, None


def _chunk_sizes(device: torch.device, vocab_size: int, chunk_rows: int | None) -> tuple[int, int]:
    """Rows of one product, and rows of one pass in float32."""
    if device.type == "cpu":
        chunk = chunk_rows or _CPU_CHUNK_ROWS
        return chunk, min(chunk, _CPU_CACHE_ROWS)
    chunk = chunk_rows or max(64, _GPU_CHUNK_BYTES // (4 * vocab_size))
    return chunk, chunk
