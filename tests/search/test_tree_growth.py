"""Growing a tree: always the best node next."""

import itertools
import random

import pytest

from lasd.errors import LasdError
from search.rank_counts import IndependentValues, RankCounts
from search.tree_growth import Growth, grow, replay


def random_counts(seed, heads=3, ranks=4, places=400):
    """Counts in which lower ranks are right more often, and heads that are right together."""
    draw = random.Random(seed)
    counts = RankCounts(heads, ranks)
    for _ in range(places):
        ease = draw.random()
        counts.add([[min(int(draw.expovariate(0.3 + 2 * ease)), ranks) for _ in range(heads)]])
    return counts


def grown_by_neighbours(value, heads, ranks, nodes):
    """The Medusa paper's search, word by word: start with (0,), then add the best neighbour again and again."""
    tree = [(0,)]
    while len(tree) < nodes - 1:
        neighbours = {(*path[:-1], path[-1] + 1) for path in tree if path[-1] + 1 < ranks}
        neighbours |= {(*path, 0) for path in tree if len(path) < heads}
        tree.append(min(neighbours - set(tree), key=lambda path: (-value(path), len(path), path)))
    return tree


@pytest.mark.parametrize("seed", range(5))
def test_it_is_the_papers_search_where_lower_ranks_are_better(seed):
    value = IndependentValues(random_counts(seed))
    assert list(grow(value, 3, 4, 20).paths) == grown_by_neighbours(value, 3, 4, 20)


@pytest.mark.parametrize("seed", range(5))
def test_every_prefix_is_the_best_tree_of_its_size(seed):
    value = random_counts(seed, heads=2, ranks=3).values()
    nodes = [path for depth in (1, 2) for path in itertools.product(range(3), repeat=depth)]
    growth = grow(value, 2, 3, 6)
    for size in range(2, 7):
        trees = (set(tree) for tree in itertools.combinations(nodes, size - 1))
        whole = (tree for tree in trees if all(path[:-1] in tree or len(path) == 1 for path in tree))
        best = max(1 + sum(value(path) for path in tree) for tree in whole)
        assert growth.expected_tokens(size) == pytest.approx(best)


def test_expected_tokens_are_what_the_counted_places_would_have_kept():
    """Replays the tree on the places that were counted: with many places the prediction is that number."""
    draw = random.Random(3)
    places = [[min(int(draw.expovariate(0.8)), 4) for _ in range(2)] for _ in range(20_000)]
    counts = RankCounts(2, 4)
    counts.add(places)
    growth = grow(counts.values(), 2, 4, 9)
    tree = set(growth.paths)
    kept = [1 + ((a,) in tree) + ((a, b) in tree) for a, b in places]
    assert growth.expected_tokens(9) == pytest.approx(sum(kept) / len(kept), abs=5e-3)


def test_the_curve_rises_by_ever_less():
    curve = grow(random_counts(0).values(), 3, 4, 30).curve()
    gains = [b - a for a, b in itertools.pairwise(curve)]
    assert curve[0] == 1
    assert gains == sorted(gains, reverse=True)


def test_a_parent_comes_before_its_children():
    paths = grow(random_counts(1).values(), 3, 4, 30).paths
    assert all(path[:-1] in paths[:place] for place, path in enumerate(paths) if len(path) > 1)


def test_the_shape_has_the_size_asked_for():
    growth = grow(random_counts(2).values(), 3, 4, 12)
    assert [growth.shape(size).num_nodes for size in (1, 2, 7, 12)] == [1, 2, 7, 12]
    assert growth.shape(12).max_depth == growth.depth(12)


def test_nodes_that_are_never_accepted_are_left_out():
    counts = RankCounts(2, 3)
    counts.add([[0], [0], [1]] * 10)
    assert set(grow(counts.values(), 2, 3, 64).paths) == {(0,), (1,)}


def test_heads_that_are_never_right_are_an_error():
    counts = RankCounts(2, 3)
    counts.add([[3, 3]])
    with pytest.raises(LasdError, match="no head was ever right"):
        grow(counts.values(), 2, 3, 8)


def test_a_larger_tree_than_grew_is_refused():
    with pytest.raises(LasdError, match="grew to 5"):
        grow(random_counts(0).values(), 3, 4, 5).shape(6)


CHAIN = Growth(((0,), (0, 0), (1,)), (0.5, 0.3, 0.1))


def test_a_replay_steps_over_what_it_accepts():
    # roots at places 0 ... 4; with (0,) and (0, 0): two accepted and one more, then a miss, and the run ends
    run = [[0, 0], [1, 1], [0, 9], [9], []]
    assert replay(CHAIN, [run])[2] == pytest.approx((3 + 1) / 2)


def test_a_replay_of_the_root_alone_is_plain_decoding():
    assert replay(CHAIN, [[[0, 0], [0], []]])[0] == 1


def test_a_replay_keeps_no_token_behind_the_end():
    assert replay(CHAIN, [[[0, 0], [0], []]])[3] == pytest.approx(2)


def test_each_size_is_replayed_with_its_own_nodes():
    run = [[1, 0], [0], [0], []]
    # (0,) and (0, 0) never start at the first place, (1,) does
    assert replay(CHAIN, [run]) == pytest.approx([1, 3 / 2, 3 / 2, 3 / 2])
    assert replay(CHAIN, [[[1, 0], [9, 0], [9], []]]) == pytest.approx([1, 1, 1, 3 / 2])
