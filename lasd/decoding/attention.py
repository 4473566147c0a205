"""Attention for a prefix plus a block of rows with a mask of its own, behind transformers' AttentionInterface.

Legend: B sequences, N rows of the pass, S visible cache slots, H query heads, J key-value heads, G = H / J, D head
size.

The query heads of one key-value head are folded into rows, so the cache is never copied to all query heads.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from lasd.devices import on_device
from lasd.errors import LasdError

NAME = "lasd"


@dataclass
class StepRows:
    """What one forward pass is told, for B sequences of N rows.

    Row i of sequence b sees the first `visible_prefix_BN[b, i]` cached tokens and those rows j of the pass for which
    `block_mask_BNN[b, i, j]` is true; it always sees itself. `block_mask_BNN` None stands for the causal mask.
    """

    tokens_BN: Tensor
    """int64."""
    positions_BN: Tensor
    """int64; absolute positions."""
    visible_prefix_BN: Tensor | None = None
    """int64; None: each row sees its sequence's whole cached prefix."""
    block_mask_BNN: Tensor | None = None
    """bool."""


def step_mask(
    rows: StepRows, starts: list[int], visible: int, window: int | None, groups: int, dtype: torch.dtype
) -> Tensor:
    """The additive mask of one pass: 0 where a row sees a slot, -inf elsewhere.

    Args:
        starts: for each sequence, cached tokens = slot of the pass's first row.
        visible: slots that the pass reads.
        window: a row sees only keys less than `window` positions before its own; None is no limit. Positions count, not
            slots: two nodes of one depth are at the same distance from the prefix.
        groups: query heads of one key-value head.

    Returns:
        [B, 1, groups * N, visible] of `dtype`.
    """
    device = rows.tokens_BN.device
    size, num_rows = rows.tokens_BN.shape
    slots_S = torch.arange(visible, device=device)
    starts_B11 = on_device(starts, device)[:, None, None]
    limit_BN1 = starts_B11 if rows.visible_prefix_BN is None else rows.visible_prefix_BN[:, :, None]
    seen_BNS = (slots_S < limit_BN1).expand(size, num_rows, visible)
    block_BNN = rows.block_mask_BNN
    if block_BNN is None:
        block_BNN = torch.ones(num_rows, num_rows, dtype=torch.bool, device=device).tril().expand(size, -1, -1)
    place_B1S = slots_S - starts_B11
    inside_B1S = (place_B1S >= 0) & (place_B1S < num_rows)
    place_B1S = place_B1S.clamp(0, num_rows - 1)
    seen_BNS = torch.where(inside_B1S, block_BNN.gather(2, place_B1S.expand(-1, num_rows, -1)), seen_BNS)
    if window is not None:
        key_position_BS = torch.where(inside_B1S, rows.positions_BN[:, None].gather(2, place_B1S), slots_S)
        seen_BNS = seen_BNS & (rows.positions_BN[:, :, None] - key_position_BS < window)
    mask_BNS = torch.zeros(size, num_rows, visible, dtype=dtype, device=device).masked_fill_(~seen_BNS, -torch.inf)
    return mask_BNS.repeat(1, groups, 1).unsqueeze(1)


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    dropout: float = 0.0,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """The attention function that transformers calls in each layer.

    Args:
        query: [B, H, N, D].
        key: [B, J, S, D], like value.
        attention_mask: what `step_mask` made, or None: all rows see all keys before them (causal; S == N or N == 1).

    Returns:
        [B, N, H, D], and None for the weights.
    """
    if kwargs.get("s_aux") is not None:
        raise LasdError(
            f"{type(module).__name__} uses attention sinks, which lasd does not support yet; use another model"
        )
    size, heads, num_rows, head_size = query.shape
    kv_heads = key.shape[1]
    groups = heads // kv_heads
    if attention_mask is None and num_rows > 1:
        if softcap is not None:
            attention_mask = _causal(num_rows, key.shape[2], groups, query)
        else:
            out = nn.functional.scaled_dot_product_attention(
                query, key, value, is_causal=True, scale=scaling, enable_gqa=groups > 1
            )
            return out.transpose(1, 2), None
    if attention_mask is not None:  # latent caches have fewer heads than the keys made of them, hence fewer groups here
        attention_mask = attention_mask[:, :, : groups * num_rows]
    folded = query.reshape(size, kv_heads, groups * num_rows, head_size)
    if softcap is None:
        mask = (
            attention_mask
            if attention_mask is None or attention_mask.dtype == query.dtype
            else attention_mask.to(query.dtype)
        )
        out = nn.functional.scaled_dot_product_attention(folded, key, value, attn_mask=mask, scale=scaling)
    else:
        out = _softcapped(folded, key, value, attention_mask, scaling, softcap)
    return out.reshape(size, heads, num_rows, -1).transpose(1, 2), None


def _softcapped(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None, softcap: float
) -> Tensor:
    scores = query @ key.transpose(2, 3) * (scaling if scaling is not None else query.shape[-1] ** -0.5)
    scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        scores = scores + mask
    return scores.softmax(-1, dtype=torch.float32).to(query.dtype) @ value


def _causal(num_rows: int, num_keys: int, groups: int, like: Tensor) -> Tensor:
    seen = torch.ones(num_rows, num_keys, dtype=torch.bool, device=like.device).tril(num_keys - num_rows)
    mask = torch.zeros(num_rows, num_keys, dtype=like.dtype, device=like.device).masked_fill_(~seen, -torch.inf)
    return mask.repeat(groups, 1)[None, None]


AttentionInterface.register(NAME, attention)
