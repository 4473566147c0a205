"""Logits processors, applied along each path of a tree with that path's own prefix.

Legend: N tree nodes, V vocabulary, M nodes of one depth, L prefix tokens.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lasd.decoding.tree import TreeShape
from lasd.devices import on_device
from lasd.errors import LasdError

WHOLE_BATCH = {
    "UnbatchedClassifierFreeGuidanceLogitsProcessor": "it runs the model itself, one token after the other",
    "HammingDiversityLogitsProcessor": "it compares beams",
    "SynthIDTextWatermarkLogitsProcessor": "it keeps a state that rejected drafts would change",
}
"""Processors whose result depends on more than the prefix, and why they are refused."""


def refuse_whole_batch(processors: Sequence[Any]) -> None:
    """Refuses processors that are no function of one prefix.

    Raises:
        LasdError: with the processor's name and the reason.
    """
    for processor in processors:
        reason = WHOLE_BATCH.get(type(processor).__name__)
        if reason:
            raise LasdError(
                f"{type(processor).__name__} cannot be applied along the paths of a draft: {reason}; leave it out "
                "or decode with "
                "transformers' generate"
            )


def shaped(
    logits_NV: Tensor, tokens_N: Tensor, shape: TreeShape, prefix: Sequence[int], processors: Sequence[Any]
) -> Tensor:
    """The logits of one sequence's tree after its processors.

    A node's prefix is the text so far (the root is its last token) and the tokens of the node's own path. Nodes of one
    depth have prefixes of one length, so each depth is one call.

    Args:
        logits_NV: of the tree's nodes.
        tokens_N: the tree's tokens.
        prefix: the text up to and with the root.
        processors: transformers' LogitsProcessor or any function of (input_ids [M, L], scores [M, V]).

    Returns:
        [N, V]; float32.
    """
    out_NV = logits_NV.float()
    prefix_L = on_device(list(prefix), logits_NV.device)
    by_depth: dict[int, list[int]] = {}
    for node, depth in enumerate(shape.depths):
        by_depth.setdefault(depth, []).append(node)
    for nodes in by_depth.values():
        paths = on_device([shape.ancestry(node)[1:] for node in nodes], logits_NV.device).long()
        ids_ML = torch.cat([prefix_L.expand(len(nodes), -1), tokens_N[paths]], 1)
        nodes_M = on_device(nodes, logits_NV.device)
        scores_MV = out_NV[nodes_M]
        for processor in processors:
            scores_MV = processor(ids_ML, scores_MV)
        out_NV[nodes_M] = scores_MV
    return out_NV
