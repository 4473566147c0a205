"""Rank counts: what is judged, what a path is worth."""

import random

import pytest

from lasd.errors import LasdError
from search.rank_counts import IndependentValues, RankCounts, answer_runs


def counted(places, heads=2, ranks=3):
    counts = RankCounts(heads, ranks)
    counts.add(places)
    return counts


def test_hits_and_trials_are_by_head():
    counts = counted([[0, 1], [2, 0], [1]])
    assert counts.trials == [3, 2]
    assert counts.hits == [[1, 1, 1], [1, 1, 0]]


def test_a_miss_is_a_trial_without_a_hit():
    counts = counted([[3, 0]])
    assert counts.trials == [1, 1]
    assert counts.hits == [[0, 0, 0], [1, 0, 0]]


def test_a_path_behind_a_miss_is_not_counted():
    assert set(counted([[3, 0], [0, 3]]).paths) == {(), (0,)}


def test_a_path_knows_how_often_it_could_go_on():
    assert counted([[0, 1], [0], [0, 3], []]).paths == {(): [4, 3], (0,): [3, 2], (0, 1): [1, 0]}


def test_counts_survive_json_form():
    counts = counted([[0, 1], [2, 0], [1], [3, 1]])
    again = RankCounts.from_dict(counts.to_dict())
    assert again.to_dict() == counts.to_dict()
    assert again.paths == counts.paths


def test_top_sums_the_first_ranks():
    assert counted([[0], [1], [2], [3]], heads=1).top(2) == [0.5]


def test_often_seen_paths_are_worth_what_was_measured():
    # head 2 is right exactly where head 1's rank is 0: a product of the heads' own rates would say 1/4
    counts = counted([[0, 0], [1, 3]] * 50_000)
    assert counts.values()((0, 0)) == pytest.approx(0.5, abs=2e-3)
    assert IndependentValues(counts)((0, 0)) == pytest.approx(0.25)


def test_never_seen_paths_fall_back_to_the_product():
    counts = counted([[0], [1]] * 10 + [[2, 1]] * 20, heads=2)
    expected = counts.values()((0,)) * counts.rate(1, 1)  # no place let path (0,) go on
    assert counts.values()((0, 1)) == pytest.approx(expected)


def test_a_node_is_never_worth_more_than_its_parent():
    draw = random.Random(0)
    counts = counted([[draw.randrange(4) for _ in range(draw.randrange(4))] for _ in range(200)], heads=3)
    values = counts.values()
    paths = [(a, b, c) for a in range(3) for b in range(3) for c in range(3)]
    assert all(values(path) <= values(path[:2]) <= values(path[:1]) <= 1 for path in paths)


def test_children_are_worth_at_most_their_parent_together():
    draw = random.Random(1)
    values = counted([[draw.randrange(4), draw.randrange(4)] for _ in range(500)]).values()
    assert sum(values((0, rank)) for rank in range(3)) <= values((0,)) + 1e-12


def test_counts_of_nothing_are_refused():
    with pytest.raises(LasdError, match="0 heads"):
        RankCounts(0, 3)


def test_heads_are_judged_only_where_the_answer_goes_on():
    # the answer is tokens 2 to 4; the root is token t + 1, head d guesses token t + 1 + d
    judged = [False, False, True, True, True, False]
    ranks = [[10 * t + head for head in range(1, 4)] for t in range(6)]
    assert answer_runs(judged, ranks) == [[[11, 12], [21], []]]


def test_two_answers_do_not_run_into_each_other():
    judged = [False, True, True, False, True, True]
    ranks = [[t] for t in range(6)]
    assert answer_runs(judged, ranks) == [[[0], []], [[3], []]]


def test_the_first_token_of_a_text_is_no_root():
    assert answer_runs([True, True], [[7], [8]]) == [[[]]]
