"""Which drafted tokens are kept. Pure functions of (trees, what the target picked).

Legend: B sequences, N tree nodes, V vocabulary.
"""

import torch
from torch import Tensor

from lasd.decoding.tree import TreeBatch


def accept_picked(trees: TreeBatch, picks_BN: Tensor) -> Tensor:
    """The picked rule: from the root, go to the child that holds the token the target picked, until there is none.

    With picks = argmax this is greedy decoding. With one draw x ~ p at each node it is exact for every draft that was made
    before the draws: the emitted tokens are the draws themselves, whatever was drafted (SpecInfer's acceptance for
    candidates without probabilities, Miao et al. 2024, is the same law).

    Args:
        picks_BN: int64; for each node the target's token after it.

    Returns:
        int64 [B]; the last accepted node. The path from the root to it is accepted, and the node's own pick follows it.
    """
    matches_BN = trees.tokens_BN == picks_BN.gather(1, trees.parents_BN)
    if trees.node_mask_BN is not None:
        matches_BN = matches_BN & trees.node_mask_BN
    matches_BN = matches_BN.clone()
    matches_BN[:, 0] = True
    reached_BN = ~(trees.ancestors_BNN & ~matches_BN.unsqueeze(1)).any(-1)
    return torch.where(reached_BN, trees.depths_BN, -1).argmax(1)
