"""From draft trees to the rows of one verify pass.

Legend: B sequences, N tree nodes, M scratch rows, W = N + M rows of the pass.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from lasd.decoding.attention import StepRows
from lasd.decoding.tree import DraftTree, TreeBatch
from lasd.devices import on_device


def verify_rows(batch: TreeBatch, trees: Sequence[DraftTree], lengths: Sequence[int]) -> StepRows:
    """The rows of a verify pass: each sequence's tree nodes (padded to N), then its scratch rows (padded to M).

    Args:
        batch: the trees, stacked.
        trees: the same trees, for their scratch rows.
        lengths: cached tokens of each sequence = position of its root.
    """
    starts_B1 = on_device(lengths, batch.tokens_BN.device).unsqueeze(1)
    positions_BN = batch.depths_BN + starts_B1
    nodes = batch.tokens_BN.shape[1]
    if nodes == 1 and not any(tree.scratch for tree in trees):
        return StepRows(batch.tokens_BN, positions_BN)
    if not any(tree.scratch for tree in trees):
        return StepRows(batch.tokens_BN, positions_BN, None, batch.ancestors_BNN)
    return _with_scratch(batch, trees, positions_BN, starts_B1)


def _with_scratch(batch: TreeBatch, trees: Sequence[DraftTree], positions_BN: Tensor, starts_B1: Tensor) -> StepRows:
    nodes = batch.tokens_BN.shape[1]
    width = max(len(tree.scratch.tokens_M) if tree.scratch else 0 for tree in trees)
    tokens_BW, positions_BW = pad(batch.tokens_BN, (0, width)), pad(positions_BN, (0, width))
    positions_BW[:, nodes:] = starts_B1  # padding rows stand at the root's position
    mask_BWW = torch.eye(nodes + width, dtype=torch.bool, device=tokens_BW.device).repeat(len(trees), 1, 1)
    mask_BWW[:, :nodes, :nodes] = batch.ancestors_BNN
    for b, tree in enumerate(trees):
        if tree.scratch is None:
            continue
        own, extra = tree.shape.num_nodes, len(tree.scratch.tokens_M)
        rows = slice(nodes, nodes + extra)
        tokens_BW[b, rows] = tree.scratch.tokens_M
        positions_BW[b, rows] = starts_B1[b] + tree.scratch.offsets_M
        mask_BWW[b, rows, :own] = tree.scratch.visible[:, :own]
        mask_BWW[b, rows, rows] = tree.scratch.visible[:, own:]
    return StepRows(tokens_BW, positions_BW, None, mask_BWW)
