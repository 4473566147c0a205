"""The drafters that the contract runs for each family. A new drafter is one more line in DRAFTERS."""

from collections.abc import Callable, Sequence

import torch

from lasd.decoding.target import TargetModel
from lasd.decoding.tree import DraftTree, ScratchRows, TreeShape
from lasd.devices import on_device, upload
from lasd.drafters.base import Budget, DraftContext, Drafter, StepOutcome
from lasd.drafters.medusa import MedusaDrafter, MedusaHeads

CPU = torch.device("cpu")
Answers = dict[tuple[int, ...], list[int]]
"""Prompt -> the tokens that plain decoding gives."""


class Scripted:
    """Drafts a fixed tree from known answers: its first path is the answer (or, when wrong, never is), other nodes are
    decoys."""

    def __init__(
        self,
        answers: Answers,
        vocab: int,
        paths: Sequence[Sequence[int]],
        right: bool,
        scratch: int = 0,
        device: torch.device = CPU,
    ):
        self.answers, self.vocab, self.right, self.scratch, self.device = answers, vocab, right, scratch, device
        self.shape = TreeShape.from_paths(paths)
        self.max_nodes = self.shape.num_nodes + scratch
        self.started: list[int] = []
        self.outcomes: list[StepOutcome] = []

    def start(self, context: DraftContext) -> None:
        self.started.append(context.slot)

    def propose(self, contexts: Sequence[DraftContext], budgets: Sequence[Budget]) -> list[DraftTree]:
        return [self._tree(context, budget) for context, budget in zip(contexts, budgets, strict=True)]

    def observe(self, outcomes: Sequence[StepOutcome]) -> None:
        self.outcomes += outcomes

    def _tree(self, context: DraftContext, budget: Budget) -> DraftTree:
        shape = self.shape.limited(budget.max_nodes - self.scratch, budget.max_depth)
        answer = self.answers[tuple(context.tokens[: context.num_prompt])]
        following = answer[len(context.tokens) - context.num_prompt :] + [0] * shape.max_depth
        tokens = [context.root]
        for node in range(1, shape.num_nodes):
            rank, true = shape.ranks[node], following[shape.depths[node] - 1]
            # rank 0 holds the answer when right; every other node holds a token that is neither it nor a sibling's
            tokens.append((true + rank + (0 if self.right else 1)) % self.vocab)
        return DraftTree(shape, on_device(tokens, self.device), self._scratch_rows(shape) if self.scratch else None)

    def _scratch_rows(self, shape: TreeShape) -> ScratchRows:
        """Rows with tokens and places of their own that see the root and one another: they must change nothing."""
        count = self.scratch
        sees = torch.zeros(count, shape.num_nodes + count, dtype=torch.bool)
        sees[:, 0] = True
        sees[:, shape.num_nodes :] = torch.ones(count, count).tril().bool()
        parts = (torch.arange(3, 3 + count), torch.arange(1, 1 + count), sees)
        return ScratchRows(*(upload(part, self.device) for part in parts))


CHAIN = [(0,) * depth for depth in range(1, 5)]
TREE = [(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 1), (0, 0, 0, 0)]


def medusa(target: TargetModel, answers: Answers) -> MedusaDrafter:
    """Random heads: mostly wrong, now and then right."""
    torch.manual_seed(7)
    heads = MedusaHeads(target.hidden_size, 3)
    for parameter in heads.parameters():
        parameter.data.normal_(0, 0.2)
    return MedusaDrafter(heads, TreeShape.from_dense([4, 2, 2]), target)


def medusa_of_few_tokens(target: TargetModel, answers: Answers) -> Drafter:
    """The same heads, allowed to propose every second token only."""
    drafter = medusa(target, answers)
    drafter.heads.token_map = torch.arange(0, target.vocab_size, 2)
    return drafter


DRAFTERS: dict[str, Callable[[TargetModel, Answers], Drafter]] = {
    "right_chain": lambda target, answers: Scripted(answers, target.vocab_size, CHAIN, right=True),
    "right_tree": lambda target, answers: Scripted(answers, target.vocab_size, TREE, right=True),
    "right_scratch": lambda target, answers: Scripted(answers, target.vocab_size, TREE, right=True, scratch=5),
    "wrong_tree": lambda target, answers: Scripted(answers, target.vocab_size, TREE, right=False),
    "medusa": medusa,
    "medusa_token_map": medusa_of_few_tokens,
}
ALWAYS_RIGHT = {"right_chain", "right_tree", "right_scratch"}
ALWAYS_WRONG = {"wrong_tree"}
