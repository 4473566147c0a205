"""Prompts into the cache: one padded batch, long ones in chunks.

Legend: B prompts, N tokens of a chunk, V vocabulary, D hidden size.
"""

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from lasd.decoding.attention import StepRows
from lasd.decoding.cache import KVCache
from lasd.decoding.target import TargetModel
from lasd.devices import on_device

PREFILL_TOKENS = 4096
"""Most tokens of one pass, padding included."""


def prefill(target: TargetModel, cache: KVCache, first: int, prompts: list[list[int]]) -> tuple[Tensor, Tensor]:
    """Caches prompts as sequences first ... first + B - 1, over whatever stood there.

    Returns:
        Logits [B, V] and hidden states [B, D] of each prompt's last token; no other position's logits are computed.
    """
    device, lengths = target.device, [len(prompt) for prompt in prompts]
    rows = slice(first, first + len(prompts))
    cache.lengths[rows] = [0] * len(prompts)
    ids_BL = pad_sequence([torch.tensor(prompt) for prompt in prompts], batch_first=True).to(device)
    last_B = on_device(lengths, device) - 1
    which_B = torch.arange(len(prompts), device=device)
    chunk = max(1, PREFILL_TOKENS // len(prompts))
    logits: dict[int, Tensor] = {}
    hidden: dict[int, Tensor] = {}
    for start in range(0, max(lengths), chunk):
        ids_BN = ids_BL[:, start : start + chunk]
        width = ids_BN.shape[1]
        ending = [b for b, length in enumerate(lengths) if start < length <= start + width]
        place_B = (last_B - start).clamp(0, width - 1)
        positions_BN = torch.arange(start, start + width, device=device).expand(len(prompts), -1)
        chunk_rows = StepRows(ids_BN, positions_BN)
        logits_B1V, hidden_BND = target.forward(chunk_rows, cache, place_B if ending else "none", first)
        cache.advance(first, [width] * len(prompts))
        hidden_BD = hidden_BND[which_B, place_B]
        logits |= {b: logits_B1V[b, 0] for b in ending}
        hidden |= {b: hidden_BD[b] for b in ending}
    cache.lengths[rows] = lengths
    order = range(len(prompts))
    return torch.stack([logits[b] for b in order]), torch.stack([hidden[b] for b in order])
