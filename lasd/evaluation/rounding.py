"""Rounding or a bug? What a first divergence is checked against.

Floating-point sums depend on how many rows a pass has, so in bf16 two exact decoders may part where two tokens are
nearly tied. Whether that is what happened is measured, not assumed. Along the reference's own text two more passes are
made:

    stock    the user's model in transformers' own code, one pass over the whole text
    shaped   plain decoding in the shape of verification: as many sequences and rows a pass as the one that
             decided, but the drafted rows hold unrelated tokens, are never accepted, and must change nothing

A divergence is *rounding* if the two tokens' logits lie no further apart than the number of rows moves logits here, if
that is no more than rounding can, and if other tokens in the drafted rows move nothing. Otherwise it is *unexplained*.

Legend: B sequences, N rows of each, P tokens decided so far (the one that differs included), V vocabulary.
"""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lasd.decoding.attention import StepRows
from lasd.decoding.cache import KVCache
from lasd.decoding.rows import verify_rows
from lasd.decoding.target import TargetModel
from lasd.decoding.tree import DraftTree, TreeShape, batch_trees
from lasd.drafters.base import Budget, DraftContext, Drafter, StepOutcome

ROUNDING = "rounding"
UNEXPLAINED = "unexplained"
TOP = 10
"""Logits whose change counts: the largest of each place. Those far below decide nothing."""
MOST_ULPS = 32
"""What rounding may move a logit by, in units of the dtype's spacing at the largest logit. Random models in bf16 show 2
where they are dense, and up to 20 where rounding changes which experts are chosen."""
LEAK_ULPS = 4
"""What drafted rows may move the root's logits by: nothing, but for experts whose batches they change."""


@dataclass(frozen=True)
class PassShape:
    """How large a forward pass was: sequences x rows of each."""

    sequences: int
    rows: int


@dataclass(frozen=True)
class Diagnosis:
    """Why an answer may have left the reference."""

    sequences: int
    rows: int
    token_gap: float | None
    """Distance of the two tokens' logits in the stock model; None where one answer just ends."""
    noise: float | None
    """The largest change of a leading logit between the stock model and plain decoding in that shape."""
    bound: float | None
    """How far apart two tokens may be for rounding to swap them."""
    leak: float | None
    """The largest change of a leading logit when the drafted rows hold other tokens; 0 where rows are independent."""
    same_shape_token: int | None
    """What plain decoding picks in that shape."""
    same_shape_differs: bool
    """Whether that is another token than the reference's."""
    verdict: str


def diagnose(
    target: TargetModel,
    prompt: Sequence[int],
    expected: Sequence[int],
    got: Sequence[int],
    position: int,
    shape: PassShape,
    prefill_width: int,
) -> Diagnosis:
    """Tells whether the first divergence of `got` from `expected`, at `position`, is rounding.

    Args:
        shape: of the pass that decided the token (of the prefill, for position 0).
        prefill_width: tokens of the longest prompt of the batch.
    """
    if position >= min(len(expected), len(got)):
        return Diagnosis(shape.sequences, shape.rows, None, None, None, None, None, False, UNEXPLAINED)
    before = list(expected[:position])
    stock_PV = stock_logits(target, [*prompt, *before], position + 1)
    shaped_PV, leak = _plain_in_shape(target, list(prompt), before, shape, prefill_width)
    leading = stock_PV.topk(min(TOP, stock_PV.shape[-1]), dim=-1)
    noise = float((leading.values - shaped_PV.gather(-1, leading.indices)).abs().max())
    token_gap = float((stock_PV[-1, expected[position]] - stock_PV[-1, got[position]]).abs())
    ulp = torch.finfo(target.dtype).eps * float(leading.values.abs().max())
    bound = max(2 * noise, ulp)
    explained = token_gap <= bound and noise <= MOST_ULPS * ulp and leak <= LEAK_ULPS * ulp
    picked = int(shaped_PV[-1].argmax())
    verdict = ROUNDING if explained else UNEXPLAINED
    differs = picked != expected[position]
    return Diagnosis(shape.sequences, shape.rows, token_gap, noise, bound, leak, picked, differs, verdict)


@torch.inference_mode()
def stock_logits(target: TargetModel, ids: Sequence[int], last: int) -> Tensor:
    """Logits [last, V] (float32) after the last tokens of `ids`: the user's model, its own attention, no cache."""
    return stock_logits_of_batch(target, torch.tensor([list(ids)], device=target.device), last)[0]


@torch.inference_mode()
def stock_logits_of_batch(target: TargetModel, ids_BN: Tensor, last: int) -> Tensor:
    """The same for texts of one length: [B, last, V]."""
    wanted: dict[str, Any] = {"use_cache": False}
    if "logits_to_keep" in inspect.signature(target.model.forward).parameters:
        wanted["logits_to_keep"] = last
    logits_BNV = target.model(input_ids=ids_BN, attention_mask=torch.ones_like(ids_BN), **wanted).logits
    return logits_BNV[:, -last:].float()


@torch.inference_mode()
def _plain_in_shape(
    target: TargetModel, prompt: list[int], answer: list[int], shape: PassShape, prefill_width: int
) -> tuple[Tensor, float]:
    """Logits [P, V] of plain decoding along `answer` in passes of `shape`, and how much other drafted rows move the
    last ones."""
    size = shape.sequences
    cache = target.new_cache(size, max(prefill_width, len(prompt)) + len(answer) + shape.rows)
    decided = [_prefill(target, cache, prompt, size, prefill_width, filler=0)]
    if not answer:
        other_V = _prefill(target, cache, prompt, size, prefill_width, filler=1)
        return torch.stack(decided), _moved(decided[-1], other_V)
    other_V = decided[0]
    for place, root in enumerate(answer):
        rows, others = (_step_rows(target, cache, root, shape, filler=2 * place + side) for side in (1, 0))
        if place == len(answer) - 1:
            other_V = target.forward(others, cache, "all")[0][0, 0].float()
        decided.append(target.forward(rows, cache, "all")[0][0, 0].float())
        cache.commit(0, [[0]] * size)
    return torch.stack(decided), _moved(decided[-1], other_V)


def _moved(one_V: Tensor, other_V: Tensor) -> float:
    leading = one_V.topk(min(TOP, len(one_V))).indices
    return float((one_V[leading] - other_V[leading]).abs().max())


def _prefill(target: TargetModel, cache: KVCache, prompt: list[int], size: int, width: int, filler: int) -> Tensor:
    """Caches the prompt in row 0 and unrelated ones of the same length in the others; logits [V] after the prompt."""
    ids_BN = _unrelated(target, (size, max(width, len(prompt))), seed=filler)
    ids_BN[0, : len(prompt)] = torch.tensor(prompt)
    ids_BN = ids_BN.to(target.device)
    positions_BN = torch.arange(ids_BN.shape[1], device=target.device).expand_as(ids_BN)
    last_B = torch.full((size,), len(prompt) - 1, device=target.device)
    cache.lengths[:] = [0] * size
    logits_B1V, _ = target.forward(StepRows(ids_BN, positions_BN), cache, last_B)
    cache.lengths[:] = [len(prompt)] * size
    return logits_B1V[0, 0].float()


def _step_rows(target: TargetModel, cache: KVCache, root: int, shape: PassShape, filler: int) -> StepRows:
    """A verify pass whose only related token is the root of sequence 0; drafted rows are its children."""
    tokens_BN = _unrelated(target, (shape.sequences, shape.rows), seed=filler)
    tokens_BN[0, 0] = root
    star = TreeShape([-1] + [0] * (shape.rows - 1))
    trees = [DraftTree(star, tokens_N) for tokens_N in tokens_BN.to(target.device)]
    return verify_rows(batch_trees(trees, target.device), trees, cache.lengths)


def _unrelated(target: TargetModel, size: tuple[int, int], seed: int) -> Tensor:
    return torch.randint(target.vocab_size, size, generator=torch.Generator().manual_seed(seed))


class WatchedDrafter:
    """A drafter whose verify passes are noted, so that a divergence is looked at in the shape that it happened in."""

    def __init__(self, inner: Drafter) -> None:
        self.inner = inner
        self.max_nodes = inner.max_nodes
        self._passes: dict[tuple[int, ...], list[tuple[int, PassShape]]] = {}

    def start(self, context: DraftContext) -> None:
        """See `Drafter`."""
        self._passes[_prompt(context)] = []
        self.inner.start(context)

    def propose(self, contexts: Sequence[DraftContext], budgets: Sequence[Budget]) -> list[DraftTree]:
        """See `Drafter`."""
        trees = self.inner.propose(contexts, budgets)
        nodes = max(tree.shape.num_nodes for tree in trees)
        scratch = max(tree.num_rows - tree.shape.num_nodes for tree in trees)
        for context in contexts:
            answered = len(context.tokens) - context.num_prompt
            self._passes[_prompt(context)].append((answered, PassShape(len(trees), nodes + scratch)))
        return trees

    def observe(self, outcomes: Sequence[StepOutcome]) -> None:
        """See `Drafter`."""
        self.inner.observe(outcomes)

    def shape_at(self, prompt: Sequence[int], position: int) -> PassShape | None:
        """The pass that decided the answer token at `position`; None if it was the prefill."""
        before = [shape for answered, shape in self._passes.get(tuple(prompt), []) if answered <= position]
        return before[-1] if before and position > 0 else None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def _prompt(context: DraftContext) -> tuple[int, ...]:
    return tuple(context.tokens[: context.num_prompt])
