"""Sizing: what is predicted, what is worth measuring, and what the decoder is given."""

import pytest

from lasd.decoding.step_time import StepTimes
from lasd.decoding.tree import TreeShape
from lasd.drafters.medusa import MedusaHeads
from search.answers import Answer
from search.tree_growth import Growth
from search.tree_sizing import Prediction, StepCosts, finalists, measure_trees, predict, prompts_at

GROWTH = Growth(((0,), (0, 0), (1,)), (0.5, 0.3, 0.1))
WHERE = {"device": "test", "dtype": "float32", "quantization": None, "threads": 1, "model": "tiny"}
TIMES = StepTimes((1, 4), (0, 100), ((10.0, 13.0), (20.0, 23.0)), {}, 1, **WHERE)
COSTS = StepCosts(TIMES, {0: 0.0, 1: 2.0, 2: 3.0}, overhead_ms=1.0)


def test_a_prediction_adds_pass_drafting_and_overhead():
    plain, two, three, four = predict(GROWTH, [1.0, 1.5, 1.8, 1.9], COSTS, 0)
    assert (plain.step_ms, two.step_ms, three.step_ms, four.step_ms) == pytest.approx((11, 14, 16, 17))
    assert four.tokens_per_s == pytest.approx(1e3 * 1.9 / 17)


def test_more_cached_tokens_cost_more():
    assert predict(GROWTH, [1.0] * 4, COSTS, 100)[3].step_ms == pytest.approx(27)


def said(speeds):
    return [Prediction(0, nodes, 1, speed, 1e3) for nodes, speed in enumerate(speeds, start=1)]


def test_the_best_prediction_is_always_measured():
    assert 5 in finalists(said([9, 1, 2, 3, 7, 4]), sizes=(1, 2, 4), count=2)


def test_neighbours_are_not_measured_both():
    speeds = [0.0] * 40
    speeds[31], speeds[32], speeds[33], speeds[15] = 9, 8, 7, 1
    assert finalists(said(speeds), sizes=(16, 33, 34), count=2) == [16, 32]


def test_plain_decoding_is_no_tree_to_measure():
    assert finalists(said([9, 1]), sizes=(1, 2), count=3) == [2]


def test_prompts_end_before_the_last_answer():
    answers = [Answer([1, 2, 3, 4], [0, 0, 1, 1]), Answer([5, 6, 7], [0, 1, 1])]
    assert prompts_at(4, answers, 4, count=2) == [[1, 2], [5]]


def test_other_conversations_fill_the_context():
    answers = [Answer([n, n, n, n], [0, 0, 1, 1]) for n in range(6)]
    (prompt,) = prompts_at(20, answers, 8, count=1)
    assert len(prompt) == 14  # room for 20 - 8 / 2 = 16: two of its own, three others of four
    assert prompt[-2:] == [0, 0]


def test_trees_are_measured_on_the_same_tokens(target):
    heads = MedusaHeads(target.hidden_size, num_heads=2)
    prompts = [target.tokenizer("hello there")["input_ids"], target.tokenizer("and so on")["input_ids"]]
    shapes = {"plain": None, "chain": TreeShape.chain(2)}
    seen = []
    did = measure_trees(target, heads, shapes, prompts, 12, repeats=2, progress=seen.append)
    assert did["plain"].tokens == did["chain"].tokens
    assert did["plain"].steps >= did["chain"].steps
    assert seen == list(range(1, 9))
    assert [len(rounds) for rounds in did["chain"].rounds_s] == [2, 2]
