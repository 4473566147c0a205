"""Which drafted tokens are kept. Pure functions of (trees, what the target picked).

Legend: B sequences, N tree nodes, V vocabulary.
"""

import torch
from torch import Tensor

from lasd.decoding.tree import TreeBatch


def accept_picked(trees: TreeBatch, picks_BN: Tensor) -> Tensor:
    """The picked rule: from the root, go to the child that holds the token the target picked, until there is none.

    With picks = argmax this is greedy decoding. With one draw x ~ p at each node it is exact for every draft that was
    made before the draws: the emitted tokens are the draws themselves, whatever was drafted (SpecInfer's acceptance for
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


def accept_typical(trees: TreeBatch, b: int, probs_NV: Tensor, epsilon: float, delta: float) -> Tensor:
    """Typical acceptance, LOSSY (Medusa, section 2.3.1): a drafted token is kept if it is not unlikely.

    Token x after a node is accepted if p(x) > min(epsilon, delta * exp(-H(p))), H the entropy of the target's
    distribution p at that node. The longest accepted path wins, among equals the likeliest. The output does not follow
    the target's law.

    Args:
        b: which of the batch's trees.
        probs_NV: the target's probabilities after each node of it.

    Returns:
        int64 scalar; the last accepted node.
    """
    tokens_N, parents_N = trees.tokens_BN[b], trees.parents_BN[b]
    entropy_N = -torch.special.xlogy(probs_NV, probs_NV).sum(-1)
    threshold_N = torch.clamp(delta * torch.exp(-entropy_N), max=epsilon)
    chance_N = probs_NV[parents_N].gather(1, tokens_N[:, None]).squeeze(1)
    kept_N = chance_N > threshold_N[parents_N]
    if trees.node_mask_BN is not None:
        kept_N = kept_N & trees.node_mask_BN[b]
    kept_N[0], chance_N[0] = True, 1.0
    reached_N = ~(trees.ancestors_BNN[b] & ~kept_N).any(-1)
    likelihood_N = torch.where(trees.ancestors_BNN[b], chance_N.clamp_min(1e-30).log(), 0.0).sum(-1)
    depth_N = torch.where(reached_N, trees.depths_BN[b], -1)
    return torch.where(depth_N == depth_N.max(), likelihood_N, -torch.inf).argmax()
