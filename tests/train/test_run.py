"""Whole runs: what they write, how they resume, and what they refuse."""

import json

import pytest
import torch

from lasd.artifacts import load_artifact
from lasd.conversations import load_distilled
from lasd.drafters import load_drafter
from lasd.errors import LasdError
from tests.train.tiny_runs import config_of, make_model, record, write_distilled
from train import run as run_module
from train.evaluator import HeldOutEvaluator
from train.run import train_heads

COMMAND = ["train/medusa.py", "--config", "x.yaml"]


@pytest.fixture(scope="module")
def finished(model_dir, distilled_dir, tmp_path_factory):
    """One run to its end."""
    output = tmp_path_factory.mktemp("runs") / "heads"
    train_heads(config_of(model_dir, distilled_dir, output, eval_steps=4), COMMAND)
    return output


@pytest.fixture(scope="module")
def finished_lines(finished):
    return [json.loads(line) for line in (finished / "metrics.jsonl").read_text().splitlines()]


class TestArtifact:
    def test_it_loads_and_fits_the_model(self, finished, target):
        drafter = load_drafter(load_artifact(finished), target)
        assert drafter.heads.num_heads == 3

    def test_settings_hold_the_resolved_configuration(self, finished):
        settings = load_artifact(finished).manifest.settings
        assert (settings["num_heads"], settings["projection"], settings["num_layers"]) == (3, "shared", 1)
        assert settings["training"]["positions_per_batch"] == 96
        assert settings["training"]["backbone_dtype"] == "float32"
        assert settings["tree"][0] == [0]

    def test_provenance_names_data_command_and_counts(self, finished, distilled_dir):
        provenance = load_artifact(finished).manifest.provenance
        assert provenance["data_fingerprint"] == load_distilled(distilled_dir).fingerprint()
        assert provenance["command"][0] == "train/medusa.py"
        assert provenance["records"] + provenance["held_out_records"] == 40

    def test_measured_holds_the_last_evaluation_and_the_curve(self, finished):
        measured = load_artifact(finished).manifest.measured
        assert {"head1_top1", "head3_top5", "tokens_per_step_chain", "tokens_per_step_tree"} <= set(
            measured["held_out"]
        )
        assert [point["step"] for point in measured["curve"]] == [4, 8, 12, 16]

    def test_tensors_have_the_asked_type(self, finished):
        assert {tensor.dtype for tensor in load_artifact(finished).tensors().values()} == {torch.float32}

    def test_heads_have_moved_from_their_start(self, finished):
        assert load_artifact(finished).tensors()["blocks.0.weight"].abs().max() > 0


def test_the_loss_falls(finished_lines):
    losses = [line["loss"] for line in finished_lines if "loss" in line]
    assert sum(losses[-4:]) < sum(losses[:4])


def test_every_evaluation_predicts_and_measures(finished_lines):
    evaluations = [line for line in finished_lines if "eval_head1_top1" in line]
    assert len(evaluations) == 4
    for line in evaluations:
        for name in ("chain", "tree"):
            measured = line[f"eval_tokens_per_step_{name}"]
            assert line[f"eval_predicted_tokens_per_step_{name}"] == pytest.approx(measured)


def test_a_gap_between_prediction_and_decoder_is_reported(model_dir, distilled_dir, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("train.held_out.predicted_tokens_per_step", lambda *_: 9.0)
    train_heads(config_of(model_dir, distilled_dir, tmp_path / "out", max_steps=1), COMMAND)
    assert "9.00 predicted from the held-out answers" in caplog.text


def test_a_finished_run_is_not_repeated(finished, model_dir, distilled_dir):
    before = (finished / "lasd.json").stat().st_mtime_ns
    train_heads(config_of(model_dir, distilled_dir, finished, eval_steps=4), COMMAND)
    assert (finished / "lasd.json").stat().st_mtime_ns == before


def test_another_run_in_the_same_folder_is_refused(finished, model_dir, distilled_dir):
    with pytest.raises(LasdError, match="num_heads 3 there, 2 now"):
        train_heads(config_of(model_dir, distilled_dir, finished, eval_steps=4, num_heads=2), COMMAND)


@pytest.mark.parametrize("cached", [False, True])
def test_a_run_that_broke_ends_with_the_same_bits(model_dir, distilled_dir, tmp_path, monkeypatch, cached):
    settings = {"eval_prompts": 0, "eval_steps": 6, "save_steps": 5, "cache_hidden_states": cached}
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    train_heads(config_of(model_dir, distilled_dir, whole, **settings), COMMAND)
    evaluate = HeldOutEvaluator.__call__
    calls = []

    def break_at_the_second(self, heads):
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("broken off")
        return evaluate(self, heads)

    with monkeypatch.context() as patch:
        patch.setattr(HeldOutEvaluator, "__call__", break_at_the_second)
        with pytest.raises(RuntimeError, match="broken off"):
            train_heads(config_of(model_dir, distilled_dir, broken, **settings), COMMAND)
    assert not (broken / "lasd.json").exists()
    resumed = resumed_from(monkeypatch)
    train_heads(config_of(model_dir, distilled_dir, broken, **settings), COMMAND)
    assert resumed == [str(broken / "checkpoints" / "checkpoint-10")]
    assert_same_heads(whole, broken)
    assert [line["step"] for line in losses(broken)] == [line["step"] for line in losses(whole)]


def resumed_from(monkeypatch):
    """The checkpoints that later runs resume from, as they come."""
    resumed = []
    train = run_module.MedusaTrainer.train

    def spy(self, resume_from_checkpoint):
        resumed.append(resume_from_checkpoint)
        return train(self, resume_from_checkpoint=resume_from_checkpoint)

    monkeypatch.setattr(run_module.MedusaTrainer, "train", spy)
    return resumed


def losses(output):
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "loss" in line]


def assert_same_heads(first, second):
    tensors = [load_artifact(path).tensors() for path in (first, second)]
    assert tensors[0].keys() == tensors[1].keys()
    assert all(torch.equal(tensors[0][name], tensors[1][name]) for name in tensors[0])


def test_a_half_written_checkpoint_is_not_resumed_from(model_dir, distilled_dir, tmp_path, monkeypatch):
    settings = {"eval_prompts": 0, "eval_steps": 6, "save_steps": 4}
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    train_heads(config_of(model_dir, distilled_dir, whole, **settings), COMMAND)
    with monkeypatch.context() as patch:

        def stop(*_args):
            raise RuntimeError("killed between the files and the mark")

        patch.setattr("train.trainer.mark_complete", stop)
        with pytest.raises(RuntimeError, match="killed"):
            train_heads(config_of(model_dir, distilled_dir, broken, **settings), COMMAND)
    assert (broken / "checkpoints" / "checkpoint-4" / "model.safetensors").is_file()
    resumed = resumed_from(monkeypatch)
    train_heads(config_of(model_dir, distilled_dir, broken, **settings), COMMAND)
    assert resumed == [None]
    assert_same_heads(whole, broken)


def test_own_projections_and_deeper_heads_train(model_dir, distilled_dir, tmp_path):
    config = config_of(
        model_dir, distilled_dir, tmp_path / "own", projection="own", num_layers=2, max_steps=2, eval_prompts=0
    )
    train_heads(config, COMMAND)
    tensors = load_artifact(tmp_path / "own").tensors()
    assert {"blocks.0.weight", "blocks.1.weight", "projection_weight"} <= set(tensors)


@pytest.mark.parametrize("draft_vocab", [4, 20])
def test_few_tokens_are_predicted_as_they_are_measured(model_dir, distilled_dir, tmp_path, draft_vocab):
    output = tmp_path / "few"
    train_heads(config_of(model_dir, distilled_dir, output, draft_vocab=draft_vocab, epochs=1.0), COMMAND)
    artifact = load_artifact(output)
    assert artifact.tensors()["token_map"].shape == (draft_vocab,)
    last = artifact.manifest.measured["held_out"]
    assert last["tokens_per_step_chain"] == pytest.approx(last["predicted_tokens_per_step_chain"], abs=1e-3)


class TestBadInput:
    def error(self, *arguments, **changes):
        with pytest.raises(LasdError) as caught:
            train_heads(config_of(*arguments, **changes), COMMAND)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    def test_a_missing_data_folder(self, model_dir, tmp_path):
        assert "holds no distill.json" in self.error(model_dir, tmp_path / "none", tmp_path / "out")
        assert not (tmp_path / "out").exists()

    def test_an_unknown_model(self, distilled_dir, tmp_path):
        assert "no-such-model" in self.error("no-such-model", distilled_dir, tmp_path / "out")

    def test_data_of_another_tokenizer(self, model_dir, target, tmp_path):
        folder = tmp_path / "data"
        folder.mkdir()
        write_distilled(folder, target, [record("a", [1, 2, 3], [0, 1, 1])], tokenizer_fingerprint="sha256:other")
        line = self.error(model_dir, folder, tmp_path / "out")
        assert "tokenizer_fingerprint sha256:other (data)" in line
        assert not (tmp_path / "out").exists()

    def test_data_of_another_model_trains_with_a_warning(self, distilled_dir, tmp_path, caplog):
        (tmp_path / "model").mkdir()
        other = make_model(tmp_path / "model", seed=5)
        config = config_of(other, distilled_dir, tmp_path / "out", max_steps=1, eval_prompts=0)
        train_heads(config, COMMAND)
        assert "holds the answers of" in caplog.text

    def test_all_masked_data(self, model_dir, target, tmp_path):
        folder = tmp_path / "data"
        folder.mkdir()
        write_distilled(folder, target, [record(f"r{i}", [1, 2, 3], [0, 0, 0]) for i in range(3)])
        assert "3 without a labelled token" in self.error(model_dir, folder, tmp_path / "out")

    def test_mostly_useless_data(self, model_dir, target, tmp_path):
        folder = tmp_path / "data"
        folder.mkdir()
        records = [record(f"r{i}", [1, 2, 3], [0, 0, 0]) for i in range(6)]
        write_distilled(folder, target, [*records, record("a", [1, 2, 3], [0, 1, 1])])
        assert "expected at most 50%" in self.error(model_dir, folder, tmp_path / "out", held_out_share=0.0)
