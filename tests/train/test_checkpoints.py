"""Half-written checkpoints are not trusted, and a folder belongs to one run."""

import json

import pytest

from lasd.errors import LasdError
from train.checkpoints import (
    CONFIG_NAME,
    METRICS_NAME,
    claim_output,
    cut_metrics,
    discard_after,
    mark_complete,
    newest_complete,
    step_of,
)


def checkpoint(folder, step, complete=True):
    path = folder / f"checkpoint-{step}"
    path.mkdir()
    (path / "model.safetensors").write_bytes(b"x" * 100)
    (path / "optimizer.pt").write_bytes(b"y" * 50)
    if complete:
        mark_complete(folder, step)
    return path


def test_the_newest_is_by_number_not_by_name(tmp_path):
    for step in (9, 10, 2):
        checkpoint(tmp_path, step)
    assert step_of(newest_complete(tmp_path)) == 10


def test_a_checkpoint_without_its_mark_is_passed_over(tmp_path):
    checkpoint(tmp_path, 5)
    checkpoint(tmp_path, 6, complete=False)
    assert step_of(newest_complete(tmp_path)) == 5


@pytest.mark.parametrize("damage", ["cut", "gone"])
def test_a_checkpoint_with_a_damaged_file_is_passed_over(tmp_path, damage):
    checkpoint(tmp_path, 5)
    file = checkpoint(tmp_path, 6) / "optimizer.pt"
    file.write_bytes(b"y" * 49) if damage == "cut" else file.unlink()
    assert step_of(newest_complete(tmp_path)) == 5


def test_a_torn_mark_is_passed_over(tmp_path):
    (checkpoint(tmp_path, 6) / "complete.json").write_text('{"model.safe')
    assert newest_complete(tmp_path) is None


def test_no_folder_means_no_checkpoint(tmp_path):
    assert newest_complete(tmp_path / "none") is None
    assert step_of(None) == 0


def test_later_checkpoints_are_discarded(tmp_path):
    for step in (5, 6, 10):
        checkpoint(tmp_path, step)
    discard_after(tmp_path, 5)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-5"]


class TestClaimOutput:
    free = frozenset({"logging_steps"})

    def test_a_new_folder_becomes_the_runs_own(self, tmp_path):
        claim_output(tmp_path / "a" / "b", {"seed": 0}, self.free)
        assert json.loads((tmp_path / "a" / "b" / CONFIG_NAME).read_text()) == {"seed": 0}

    def test_the_same_run_may_come_again(self, tmp_path):
        for _ in range(2):
            claim_output(tmp_path / "run", {"seed": 0}, self.free)

    def test_another_run_is_refused_with_each_differing_field(self, tmp_path):
        claim_output(tmp_path, {"seed": 0, "epochs": 2, "num_heads": 4}, self.free)
        with pytest.raises(LasdError, match=r"epochs 2 there, 3 now; seed 0 there, 1 now") as caught:
            claim_output(tmp_path, {"seed": 1, "epochs": 3, "num_heads": 4}, self.free)
        assert "num_heads" not in str(caught.value)

    def test_free_fields_may_change(self, tmp_path):
        claim_output(tmp_path, {"logging_steps": 1}, self.free)
        claim_output(tmp_path, {"logging_steps": 2}, self.free)

    def test_a_kept_cache_of_hidden_states_is_no_other_run(self, tmp_path):
        (tmp_path / "hidden").mkdir()
        claim_output(tmp_path, {"seed": 1}, self.free)

    def test_a_run_from_before_a_field_existed_has_its_default(self, tmp_path):
        claim_output(tmp_path, {"seed": 0}, self.free)
        claim_output(tmp_path, {"seed": 0, "draft_vocab": 0}, self.free, {"seed": 9, "draft_vocab": 0})
        with pytest.raises(LasdError, match="draft_vocab 0 there, 5 now"):
            claim_output(tmp_path, {"seed": 0, "draft_vocab": 5}, self.free, {"seed": 9, "draft_vocab": 0})

    def test_a_folder_of_something_else_is_refused(self, tmp_path):
        (tmp_path / "notes.txt").write_text("mine")
        with pytest.raises(LasdError, match="not empty and is not a training run"):
            claim_output(tmp_path, {}, self.free)


def test_metrics_of_later_steps_and_torn_lines_are_cut(tmp_path):
    path = tmp_path / METRICS_NAME
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"st')
    cut_metrics(tmp_path, 2)
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n'
