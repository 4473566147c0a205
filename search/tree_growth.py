"""Grows a draft tree node by node, the one that is accepted most often next: each prefix is the best of its size."""

import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from lasd.decoding.tree import TreeShape
from lasd.errors import LasdError
from search.rank_counts import RankPath, Run


@dataclass(frozen=True)
class Growth:
    """A tree in the order in which it grew.

    Attributes:
        paths: nodes without the root, best first; a parent comes before its children.
        values: for each node the probability that a step accepts it.
    """

    paths: tuple[RankPath, ...]
    values: tuple[float, ...]

    @property
    def max_nodes(self) -> int:
        """Nodes of the whole tree, the root included."""
        return len(self.paths) + 1

    def shape(self, num_nodes: int) -> TreeShape:
        """The best tree of `num_nodes` nodes, the root included."""
        if not 1 <= num_nodes <= self.max_nodes:
            raise LasdError(f"a tree of {num_nodes} nodes was asked for; this one grew to {self.max_nodes}")
        return TreeShape.from_paths(self.paths[: num_nodes - 1]) if num_nodes > 1 else TreeShape.root()

    def expected_tokens(self, num_nodes: int) -> float:
        """Tokens that a step keeps on average with the first `num_nodes` nodes: 1 + the sum of their values."""
        return 1.0 + sum(self.values[: num_nodes - 1])

    def depth(self, num_nodes: int) -> int:
        """Depth of the tree of `num_nodes` nodes."""
        return max((len(path) for path in self.paths[: num_nodes - 1]), default=0)

    def curve(self) -> list[float]:
        """Expected tokens a step for 1, 2, ... nodes, the root included."""
        curve = [1.0]
        for value in self.values:
            curve.append(curve[-1] + value)
        return curve


def grow(value: Callable[[RankPath], float], num_heads: int, max_rank: int, max_nodes: int) -> Growth:
    """Grows the tree of largest expected length.

    A node is never accepted more often than its parent, so taking the best node at the tree's edge gives, at every
    size, the best tree of all. Where lower ranks are right more often, the next node is always "a node's last rank
    plus one" or "a node with rank 0 of the next head appended": the rule of the Medusa paper's search.

    Args:
        value: path -> probability that a step accepts it; at most its parent's.
        num_heads: deepest depth of the tree.
        max_rank: candidates of each head.
        max_nodes: largest tree, the root included.

    Returns:
        The tree in the order in which it grew; shorter than `max_nodes` where no further node is ever accepted.
    """
    if num_heads < 1 or max_rank < 1 or max_nodes < 2:
        raise LasdError(
            f"a tree of {max_nodes} nodes over {num_heads} heads and {max_rank} ranks was asked for; "
            "it needs at least 2 nodes, 1 head and 1 rank"
        )
    edge: list[tuple[float, int, RankPath]] = []

    def open_children(path: RankPath) -> None:
        if len(path) < num_heads:
            for rank in range(max_rank):
                child = (*path, rank)
                heapq.heappush(edge, (-value(child), len(child), child))  # ties: the shallower, then the lower ranks

    open_children(())
    paths: list[RankPath] = []
    values: list[float] = []
    while edge and len(paths) < max_nodes - 1 and edge[0][0] < 0:
        negative, _, path = heapq.heappop(edge)
        paths.append(path)
        values.append(-negative)
        open_children(path)
    if not paths:
        raise LasdError(
            "no head was ever right on the calibration answers; train the heads longer, or check whose they are"
        )
    return Growth(tuple(paths), tuple(values))


def replay(growth: Growth, runs: Iterable[Run]) -> list[float]:
    """Tokens a step that the tree would have kept on counted answers, for every size.

    Walks along the answers as the decoder does: from a root along the longest path whose ranks are the true tokens',
    one token of the model's own behind it, and on from there. Easy places are stepped over, hard ones are stepped on,
    so this is less than `expected_tokens`, which gives every place the same weight.

    Returns:
        Tokens a step for 1, 2, ... nodes, the root included (1.0 for the root alone).
    """
    order = {path: place for place, path in enumerate(growth.paths, start=1)}
    never = growth.max_nodes
    joined = [[_joined(ranks, order, never) for ranks in run] for run in runs]
    return [1.0] + [_tokens_per_step(joined, nodes) for nodes in range(2, growth.max_nodes + 1)]


def _joined(ranks: list[int], order: dict[RankPath, int], never: int) -> list[int]:
    """For each depth the number of nodes from which on the tree accepts that far."""
    return [order.get(tuple(ranks[: depth + 1]), never) for depth in range(len(ranks))]


def _tokens_per_step(runs: list[list[list[int]]], nodes: int) -> float:
    kept = steps = 0
    for run in runs:
        place, last = 0, len(run) - 1
        while place < last:
            accepted = 0
            for needed in run[place]:
                if needed >= nodes:
                    break
                accepted += 1
            gained = min(accepted + 1, last - place)
            kept, steps, place = kept + gained, steps + 1, place + gained
    return kept / steps if steps else 1.0
