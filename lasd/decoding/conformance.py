"""The self-check of families that lasd's own tests do not cover: its forward passes against the model's own.

Legend: B branches of the draft tree, L tokens of a branch's text, N rows of a pass, V vocabulary.
"""

import logging
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lasd.decoding.attention import StepRows
from lasd.decoding.rows import verify_rows
from lasd.decoding.target import TargetModel
from lasd.decoding.tree import DraftTree, TreeShape, batch_trees
from lasd.decoding.view import model_view
from lasd.errors import LasdError

log = logging.getLogger(__name__)

TESTED = (
    "llama",
    "qwen2",
    "mistral",
    "qwen3",
    "gemma2",
    "gemma3_text",
    "phi3",
    "gpt_neox",
    "gpt2",
    "opt",
    "mixtral",
    "granite",
    "smollm3",
    "olmo2",
)
"""Model types that the tests decode with every drafter; all others are checked when they are loaded."""

PREFIX, DEPTH, WINDOW = 6, 4, 4
TREE = TreeShape([-1, 0, 1, 2, 3, 0, 5, 6, 7])
"""Two branches of DEPTH nodes below the root. Behind a whole foreign branch a wrong mask shows well above rounding."""
BRANCH_B = [0, 5, 6, 7, 8]
LIMITS = {torch.float32: 2e-3, torch.float16: 0.05, torch.bfloat16: 0.1}
QUANTIZED_LIMIT = 0.1


def check_conformance(target: TargetModel) -> float:
    """Compares a prefill, a step with a tree of two branches, and the step after one of them was committed with the
    model's own forward over the same texts. A sliding window is made shorter than the text for it.

    Returns:
        The largest deviation: distance of a row's logits from the model's own, over the spread of these.

    Raises:
        LasdError: a deviation is above what rounding explains, or the family cannot be run at all.
    """
    model_type = target.model.config.model_type
    try:
        deviations = _deviations(TargetModel(_with_short_window(target.model)))
    except LasdError:
        raise
    except Exception as error:
        raise LasdError(
            f"{model_type} is not among the families that lasd is tested with, and its self-check failed "
            f"({type(error).__name__}: {' '.join(str(error).split())[:200]}); decode it with transformers' generate"
        ) from error
    limit = _limit(target)
    for part, deviation in deviations.items():
        if not deviation <= limit:
            raise LasdError(
                f"{model_type} is not among the families that lasd is tested with, and in its self-check the logits of "
                f"{part} differ from the model's own forward by {deviation:.2g} of their spread (limit {limit:g}): "
                "lasd would change its answers; decode it with transformers' generate"
            )
    worst = max(deviations.values())
    log.info("%s is not among the tested families; its self-check passed (deviation %.2g)", model_type, worst)
    return worst


def _limit(target: TargetModel) -> float:
    limit = LIMITS.get(target.dtype, max(LIMITS.values()))
    return max(limit, QUANTIZED_LIMIT) if getattr(target.model, "is_quantized", False) else limit


def _with_short_window(model: PreTrainedModel) -> PreTrainedModel:
    """A view of the model whose sliding window, if it has one, is shorter than the check's text."""
    view = model_view(model)
    config = view.config.get_text_config()
    window = getattr(config, "sliding_window", None)
    if isinstance(window, int) and window > WINDOW:
        config.sliding_window = WINDOW
        for module in view.modules():
            if module.__dict__.get("sliding_window") == window:
                module.__dict__["sliding_window"] = WINDOW
    return view


@torch.inference_mode()
def _deviations(target: TargetModel) -> dict[str, float]:
    """Part of the check -> how far its logits are from the model's own."""
    prefix, root, branch_a, branch_b, after = _tokens(target)
    texts_BL = torch.tensor([prefix + root + branch + after for branch in (branch_a, branch_b)], device=target.device)
    own_BLV = target.model(input_ids=texts_BL, use_cache=False).logits.to(target.device)
    cache = target.new_cache(1, 16)

    ids_1N = texts_BL[:1, :PREFIX]
    prefill = target.forward(StepRows(ids_1N, torch.arange(PREFIX, device=target.device)[None]), cache)[0][0]
    cache.advance(0, [PREFIX])
    nodes = torch.tensor(root + branch_a + branch_b, device=target.device)
    step = _step(target, cache, DraftTree(TREE, nodes))
    cache.commit(0, [BRANCH_B])
    following = _step(target, cache, DraftTree(TreeShape.root(), torch.tensor(after, device=target.device)))

    own_a, own_b = own_BLV[:, PREFIX:]
    exact = target.dtype == torch.float32 and not getattr(target.model, "is_quantized", False)
    pairs = {
        "a prefill": (prefill, own_BLV[0, :PREFIX]),
        "a draft tree": (step, torch.cat([own_a[: DEPTH + 1], own_b[1 : DEPTH + 1]])),
        "the step after a draft tree": (following, own_b[DEPTH + 1 :]),
    }
    return {part: _deviation(ours, own, exact) for part, (ours, own) in pairs.items()}


def _step(target: TargetModel, cache: Any, tree: DraftTree) -> Tensor:
    """Logits [N, V] of a tree's nodes."""
    rows = verify_rows(batch_trees([tree], target.device), [tree], cache.lengths[:1])
    return target.forward(rows, cache)[0][0]


def _tokens(target: TargetModel) -> tuple[list[int], ...]:
    """Prefix, root, branches a and b, and one token more: all different where the vocabulary has as many."""
    sizes = (PREFIX, 1, DEPTH, DEPTH, 1)
    count = min(target.vocab_size, target.model.get_input_embeddings().num_embeddings)
    tokens = [(index + 1) * count // (sum(sizes) + 2) for index in range(sum(sizes))]
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return tuple(tokens[start : start + size] for start, size in zip(starts, sizes, strict=True))


def _deviation(ours_NV: Tensor, own_NV: Tensor, exact: bool) -> float:
    """Distance over spread: of the worst row where arithmetic is exact enough, else of the one behind it (in a mixture
    of experts rounding may send a single row to other experts)."""
    ours_NV, own_NV = ours_NV.float(), own_NV.float()
    same_NV = ours_NV == own_NV  # masked tokens are -inf in both
    distance_N = (ours_NV - own_NV).masked_fill(same_NV, 0).norm(dim=-1)
    finite_NV = own_NV.masked_fill(own_NV.isinf(), 0)
    spread_N = (finite_NV - finite_NV.mean(-1, keepdim=True)).norm(dim=-1).clamp_min(1e-6)
    ordered_N = (distance_N / spread_N).sort(descending=True).values
    return float(ordered_N[0 if exact or len(ordered_N) == 1 else 1])
