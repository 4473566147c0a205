"""What a drafter is: three methods, and what they are told.

Legend: D hidden size.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from lasd.decoding.tree import DraftTree


@dataclass(frozen=True)
class Budget:
    """How large a draft may be in this step: what is left of the answer, the cache and the model's positions."""

    max_nodes: int
    """Tree nodes (root included) plus scratch rows."""
    max_depth: int
    """Deepest node; 0 leaves the root alone."""


@dataclass
class DraftContext:
    """One live sequence, as a drafter sees it. The same object from `start` until the sequence ends."""

    slot: int
    """Names the sequence; never used again after it."""
    tokens: list[int]
    """Prompt and answer so far. The last one is the root: committed, not yet in the cache. Read only."""
    num_prompt: int
    hidden_D: Tensor
    """The hidden state from which the root was picked (the position before it), on the target's device."""
    row: int = 0
    """The sequence's row in the target's cache now."""

    @property
    def root(self) -> int:
        """The last committed token."""
        return self.tokens[-1]


@dataclass
class StepOutcome:
    """What a step did to one sequence."""

    context: DraftContext
    tree: DraftTree
    path: list[int]
    """Accepted nodes, root first. The cache keeps exactly these."""
    tokens: list[int]
    """Committed tokens: the accepted nodes' tokens, then the target's own next one (cut where the answer ends)."""
    picks: list[int]
    """For each tree node and then each scratch row: the target's token after it."""
    finished: bool


class Drafter(Protocol):
    """Proposes what may come next. State belongs to one sequence and is kept by `DraftContext.slot`.

    A draft must be made before the target's draw: it may depend on anything committed, never on the step's random
    numbers.
    """

    max_nodes: int
    """Most rows (nodes and scratch rows) that one tree may have; the cache keeps this much room behind each
    sequence."""

    def start(self, context: DraftContext) -> None:
        """A sequence was admitted: its prompt is cached and its first token is committed."""

    def propose(self, contexts: Sequence[DraftContext], budgets: Sequence[Budget]) -> list[DraftTree]:
        """Drafts for all live sequences at once, in order; each tree within its budget, its root the context's root."""

    def observe(self, outcomes: Sequence[StepOutcome]) -> None:
        """What the step committed. A finished sequence is seen here for the last time."""
