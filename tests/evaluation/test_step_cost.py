"""What a step costs: the same pass is compared with itself, and what is asked for is what is run."""

import json

import pytest

from lasd.decoding.target import TargetModel
from lasd.errors import LasdError
from lasd.evaluation import step_cost
from lasd.evaluation.step_cost import attention_cost, batch_cost
from tests.families import tiny_model


@pytest.fixture(scope="module", params=["llama", "gemma3", "gpt2"])
def target(request) -> TargetModel:
    return TargetModel(tiny_model(request.param), name="tiny")


def test_our_attention_is_compared_with_a_step_that_gives_the_same_logits(target):
    result = attention_cost(target, rows=6, context=30, repeats=1)
    assert result["largest_difference"] < 1e-4
    assert result["speedup"] == result["ms"]["own_model"] / result["ms"]["ours"]


def test_steps_behind_different_tokens_do_not_pass_as_the_same(target, monkeypatch):
    fill = step_cost._fill

    def fill_differently(target, context, ours, dynamic):
        fill(target, context, ours, dynamic)
        for keys in ours._keys:
            keys.neg_()

    monkeypatch.setattr(step_cost, "_fill", fill_differently)
    assert attention_cost(target, rows=6, context=30, repeats=1)["largest_difference"] > 1e-2


def test_the_own_model_starts_each_round_with_the_same_tokens(target, monkeypatch):
    seen = []
    forward = TargetModel.own_forward

    def spy(self, rows, cache, starts):
        seen.append((type(cache).__name__, cache.get_seq_length()))
        return forward(self, rows, cache, starts)

    monkeypatch.setattr(TargetModel, "own_forward", spy)
    attention_cost(target, rows=4, context=20, repeats=3)
    assert set(seen) == {("DynamicCache", 20), ("KVCache", 20)}


def test_a_batch_is_compared_with_its_own_number_of_rows(monkeypatch):
    target, passes = TargetModel(tiny_model("llama"), name="tiny"), set()
    forward = TargetModel.forward

    def spy(self, rows, cache, *args, **kwargs):
        passes.add((tuple(rows.tokens_BN.shape), len(set(cache.lengths)) > 1))
        return forward(self, rows, cache, *args, **kwargs)

    monkeypatch.setattr(TargetModel, "forward", spy)
    cost = batch_cost(target, size=3, nodes=4, context=20, repeats=2)
    assert {((1, 4), False), ((1, 12), False), ((3, 4), True)} <= passes
    assert cost["pass"]["predicted"] == cost["ms"]["single_pass_of_all_rows"] / (3 * cost["ms"]["single_pass"])
    assert cost["step"]["measured"] == cost["ms"]["batch_step"] / (3 * cost["ms"]["single_step"])


def test_no_sequence_ends_while_it_is_timed(monkeypatch):
    target, live = TargetModel(tiny_model("llama"), name="tiny"), []
    step = step_cost.Decoder.step

    def spy(self):
        step(self)
        live.append((len(self.live_slots), self.max_slots))

    monkeypatch.setattr(step_cost.Decoder, "step", spy)
    batch_cost(target, size=3, nodes=4, context=20, repeats=6)
    assert live
    assert all(now == slots for now, slots in live)


def test_more_tokens_than_the_model_has_is_one_line(target):
    with pytest.raises(LasdError, match="tiny has 192 positions"):
        attention_cost(target, rows=32, context=2048)


def test_the_command_prints_and_writes_both_answers(target, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(step_cost, "load_target", lambda *args, **kwargs: target)
    sizes = "--batch-size 2 --nodes 1 4 --batch-context 16 --rows 4 --context 24 --repeats 1"
    step_cost.main(["--model", "tiny", *sizes.split(), "--output", str(tmp_path / "cost.json")])
    result = json.loads((tmp_path / "cost.json").read_text())
    assert [cost["nodes"] for cost in result["batch"]] == [1, 4]
    assert "t(rows) predicts" in capsys.readouterr().out
