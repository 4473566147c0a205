"""Draft trees: their shape, what one forward pass needs of it, and batches of trees of different shapes.

Legend: B rows (sequences), N tree nodes, M scratch rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from lasd.devices import on_device, upload
from lasd.errors import LasdError


class TreeShape:
    """Which node hangs below which. Immutable and hashable; node 0 is the root (the last committed token).

    Args:
        parents: parent of each node; `parents[0] == -1`, and a parent comes before its children.
        ranks: for each node, its place among the candidates of its depth (0 = likeliest; the root has -1). Drafters
            that choose "the rank-th token of head d" read it; by default a node's rank is its place among its siblings.
    """

    def __init__(self, parents: Sequence[int], ranks: Sequence[int] | None = None):
        parents = tuple(int(p) for p in parents)
        if not parents or parents[0] != -1:
            raise LasdError(f"a tree got parents {list(parents[:3])}...; node 0 must be the root with parent -1")
        for node, parent in enumerate(parents[1:], start=1):
            if not 0 <= parent < node:
                raise LasdError(
                    f"tree node {node} has parent {parent}; a parent must be an earlier node (0 to {node - 1})"
                )
        self.parents = parents
        self.ranks = tuple(int(r) for r in ranks) if ranks is not None else _sibling_ranks(parents)
        if len(self.ranks) != len(parents):
            raise LasdError(f"a tree of {len(parents)} nodes got {len(self.ranks)} ranks; it needs one for each node")

    @classmethod
    def root(cls) -> "TreeShape":
        """The tree that drafts nothing: plain decoding."""
        return cls.chain(0)

    @classmethod
    def chain(cls, num_drafted: int) -> "TreeShape":
        """`num_drafted` nodes one below the other, each the likeliest of its depth."""
        return cls(list(range(-1, num_drafted)), [-1] + [0] * num_drafted)

    @classmethod
    def from_paths(cls, paths: Sequence[Sequence[int]]) -> "TreeShape":
        """A Medusa path list: path (i1, ..., id) is the rank-i1 token of head 1, then the rank-i2 token of head 2, and
        so on.

        Prefixes that the list leaves out are added. Source: Medusa (Cai et al. 2024), section 2.1.2, tree attention.
        """
        full: set[tuple[int, ...]] = set()
        for path in paths:
            ranks = tuple(int(r) for r in path)
            if not ranks or min(ranks) < 0:
                raise LasdError(f"tree path {list(path)} is not usable; a path is a non-empty list of ranks from 0")
            full.update(ranks[: d + 1] for d in range(len(ranks)))
        ordered = sorted(full, key=lambda path: (len(path), path))
        index = {(): 0} | {path: node for node, path in enumerate(ordered, start=1)}
        return cls([-1] + [index[path[:-1]] for path in ordered], [-1] + [path[-1] for path in ordered])

    @classmethod
    def from_dense(cls, counts: Sequence[int]) -> "TreeShape":
        """The Cartesian tree: every node of depth d - 1 has the `counts[d - 1]` likeliest tokens of head d as
        children."""
        paths: list[tuple[int, ...]] = [()]
        level: list[tuple[int, ...]] = [()]
        for depth, count in enumerate(counts, start=1):
            if count < 1:
                raise LasdError(
                    f"dense tree {list(counts)} has {count} children at depth {depth}; every depth needs at least 1"
                )
            level = [path + (rank,) for path in level for rank in range(count)]
            paths += level
        return cls.from_paths(paths[1:]) if counts else cls.root()

    @classmethod
    def from_counts(cls, children: Sequence[Sequence[int]]) -> "TreeShape":
        """Per-depth child counts: `children[d][i]` is how many children the i-th node of depth d has (depth 0 is the
        root).

        Nodes of a depth are counted in path order; counts that are left out at the end of a depth are 0.
        """
        level: list[tuple[int, ...]] = [()]
        paths: list[tuple[int, ...]] = []
        for depth, counts in enumerate(children):
            if len(counts) > len(level):
                raise LasdError(f"tree counts name {len(counts)} nodes at depth {depth}; there are {len(level)}")
            level = [node + (rank,) for node, count in zip(level, counts, strict=False) for rank in range(count)]
            paths += level
        return cls.from_paths(paths) if paths else cls.root()

    @property
    def num_nodes(self) -> int:
        """Nodes, the root included."""
        return len(self.parents)

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Depth of each node; the root has 0."""
        depths = [0]
        for parent in self.parents[1:]:
            depths.append(depths[parent] + 1)
        return tuple(depths)

    @cached_property
    def max_depth(self) -> int:
        """Depth of the deepest node = most draft tokens that one step can accept."""
        return max(self.depths)

    def ancestry(self, node: int) -> list[int]:
        """Nodes from the root down to `node`, both included."""
        path = [node]
        while path[-1] != 0:
            path.append(self.parents[path[-1]])
        return path[::-1]

    def paths(self) -> list[tuple[int, ...]]:
        """The Medusa path list of this tree, one path a node, without the root."""
        return [tuple(self.ranks[n] for n in self.ancestry(node)[1:]) for node in range(1, self.num_nodes)]

    def validate(self, num_heads: int, max_rank: int) -> None:
        """Checks the tree against what the heads can fill, before any work on a device.

        Args:
            num_heads: heads there are = deepest depth that can be filled.
            max_rank: candidates a head has (at most the vocabulary size).
        """
        if self.max_depth > num_heads:
            raise LasdError(
                f"the tree is {self.max_depth} deep, but there are {num_heads} heads; cut the tree to depth "
                f"{num_heads} or train more heads"
            )
        if max(self.ranks) >= max_rank:
            raise LasdError(
                f"the tree asks for rank {max(self.ranks)}, but a head offers ranks 0 to {max_rank - 1}; use a "
                "narrower tree"
            )

    def limited(self, max_nodes: int, max_depth: int) -> "TreeShape":
        """This tree without what is deeper than `max_depth`, and then without the last nodes beyond `max_nodes`."""
        if self.num_nodes <= max_nodes and self.max_depth <= max_depth:
            return self
        return _limited(self, max(1, max_nodes), max(0, max_depth))

    def on(self, device: torch.device) -> "ShapeTensors":
        """The shape as tensors on `device`; made once a device."""
        return _shape_tensors(self, device)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TreeShape) and self.parents == other.parents and self.ranks == other.ranks

    def __hash__(self) -> int:
        return hash((self.parents, self.ranks))

    def __repr__(self) -> str:
        return f"TreeShape({self.num_nodes} nodes, depth {self.max_depth})"


@dataclass(frozen=True)
class ShapeTensors:
    """A TreeShape as tensors."""

    parents_N: Tensor
    """int64; the root's parent is 0, itself."""
    depths_N: Tensor
    """int64."""
    ancestors_NN: Tensor
    """bool; [i, j] is true when j is i or an ancestor of i: exactly what node i may see of the tree."""


@dataclass
class ScratchRows:
    """Rows that ride in the verify pass with their own mask and positions, and are never accepted (a lookahead
    window)."""

    tokens_M: Tensor
    """int64."""
    offsets_M: Tensor
    """int64; position of each row, counted from the root's position."""
    visible: Tensor
    """bool [M, N + M]; which tree nodes and scratch rows each scratch row sees (itself included)."""


@dataclass
class DraftTree:
    """What a drafter proposes for one sequence."""

    shape: TreeShape
    tokens_N: Tensor
    """int64 on the target's device; `tokens_N[0]` is the root."""
    scratch: ScratchRows | None = None

    @property
    def num_rows(self) -> int:
        """Rows that this tree adds to a forward pass."""
        return self.shape.num_nodes + (len(self.scratch.tokens_M) if self.scratch else 0)


@dataclass
class TreeBatch:
    """Trees of B sequences, padded to one width. Padding nodes see themselves, and their parent is themselves."""

    shapes: list[TreeShape]
    tokens_BN: Tensor
    parents_BN: Tensor
    depths_BN: Tensor
    ancestors_BNN: Tensor
    node_mask_BN: Tensor | None
    """bool, false for padding nodes; None when there are none."""


def batch_trees(trees: Sequence[DraftTree], device: torch.device) -> TreeBatch:
    """Stacks trees (without their scratch rows) into one TreeBatch."""
    shapes = [tree.shape for tree in trees]
    if all(shape == shapes[0] for shape in shapes[1:]):
        one = shapes[0].on(device)
        tokens_BN = (
            trees[0].tokens_N.unsqueeze(0) if len(trees) == 1 else torch.stack([tree.tokens_N for tree in trees])
        )
        size = len(trees)
        return TreeBatch(
            shapes,
            tokens_BN,
            one.parents_N.expand(size, -1),
            one.depths_N.expand(size, -1),
            one.ancestors_NN.expand(size, -1, -1),
            None,
        )
    nodes = max(shape.num_nodes for shape in shapes)
    stack = _stacked_shapes(shapes, nodes, device)
    tokens_BN = torch.stack([torch.nn.functional.pad(t.tokens_N, (0, nodes - t.shape.num_nodes)) for t in trees])
    return TreeBatch(shapes, tokens_BN, *stack)


def _stacked_shapes(shapes: Sequence[TreeShape], nodes: int, device: torch.device) -> tuple[Tensor, ...]:
    size = len(shapes)
    itself = torch.arange(nodes)
    parents = itself.repeat(size, 1)
    depths = torch.zeros(size, nodes, dtype=torch.int64)
    ancestors = torch.eye(nodes, dtype=torch.bool).repeat(size, 1, 1)
    mask = torch.zeros(size, nodes, dtype=torch.bool)
    cpu = torch.device("cpu")
    for b, shape in enumerate(shapes):
        one, n = shape.on(cpu), shape.num_nodes
        parents[b, :n], depths[b, :n], mask[b, :n] = one.parents_N, one.depths_N, True
        ancestors[b, :n, :n] = one.ancestors_NN
    return tuple(upload(t, device) for t in (parents, depths, ancestors, mask))


def _sibling_ranks(parents: tuple[int, ...]) -> tuple[int, ...]:
    seen: dict[int, int] = {}
    ranks = [-1]
    for parent in parents[1:]:
        ranks.append(seen.get(parent, 0))
        seen[parent] = ranks[-1] + 1
    return tuple(ranks)


@lru_cache(maxsize=512)
def _limited(shape: TreeShape, max_nodes: int, max_depth: int) -> TreeShape:
    kept = [node for node in range(shape.num_nodes) if shape.depths[node] <= max_depth][:max_nodes]
    index = {
        node: place for place, node in enumerate(kept)
    }  # a parent comes first, so it is kept whenever its child is
    return TreeShape([-1] + [index[shape.parents[n]] for n in kept[1:]], [shape.ranks[n] for n in kept])


@lru_cache(maxsize=512)
def _shape_tensors(shape: TreeShape, device: torch.device) -> ShapeTensors:
    nodes = range(shape.num_nodes)
    seen = [set(shape.ancestry(node)) for node in nodes]
    ancestors = [[other in seen[node] for other in nodes] for node in nodes]
    return ShapeTensors(
        on_device((0,) + shape.parents[1:], device), on_device(shape.depths, device), on_device(ancestors, device)
    )
