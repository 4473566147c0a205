"""Tree shapes."""

import pytest
import torch

from lasd.decoding.tree import DraftTree, TreeShape, batch_trees
from lasd.errors import LasdError


def test_paths_round_trip_and_missing_prefixes_are_added():
    shape = TreeShape.from_paths([(0, 1, 2), (1,)])
    assert shape.paths() == [(0,), (1,), (0, 1), (0, 1, 2)]
    assert TreeShape.from_paths(shape.paths()) == shape
    assert shape.parents == (-1, 0, 0, 1, 3)


def test_dense_spec_is_the_cartesian_product():
    shape = TreeShape.from_dense([3, 2])
    assert shape.num_nodes == 1 + 3 + 6
    assert shape.depths.count(2) == 6


def test_counts_name_children_node_by_node():
    assert TreeShape.from_counts([[2], [1, 2]]).paths() == [(0,), (1,), (0, 0), (1, 0), (1, 1)]


def test_ancestors_are_what_a_node_sees():
    seen = TreeShape.from_paths([(0,), (1,), (1, 0)]).on(torch.device("cpu")).ancestors_NN
    assert seen.int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]]


@pytest.mark.parametrize(
    ("heads", "max_rank", "message"),
    [(1, 10, "the tree is 2 deep, but there are 1 heads"), (4, 1, "asks for rank 1, but a head offers ranks 0 to 0")],
)
def test_a_tree_that_heads_cannot_fill_is_refused(heads, max_rank, message):
    with pytest.raises(LasdError, match=message):
        TreeShape.from_paths([(1, 0)]).validate(heads, max_rank)


@pytest.mark.parametrize("parents", [[0], [-1, 1], [-1, 0, 5], []])
def test_a_parent_must_come_first(parents):
    with pytest.raises(LasdError, match="tree"):
        TreeShape(parents)


def test_limited_keeps_parents_of_what_it_keeps():
    shape = TreeShape.from_dense([2, 2, 2])
    small = shape.limited(6, 2)
    assert (small.num_nodes, small.max_depth) == (6, 2)
    assert set(small.paths()) <= set(shape.paths())
    assert shape.limited(1, 5).num_nodes == 1
    assert shape.limited(99, 99) is shape


def test_padding_nodes_of_a_mixed_batch_see_only_themselves():
    shapes = [TreeShape.chain(1), TreeShape.from_dense([2, 1])]
    batch = batch_trees([DraftTree(s, torch.arange(s.num_nodes)) for s in shapes], torch.device("cpu"))
    assert batch.tokens_BN.shape == (2, 5)
    assert batch.node_mask_BN.tolist() == [[True, True, False, False, False], [True] * 5]
    assert batch.ancestors_BNN[0, 3].nonzero().flatten().tolist() == [3]
