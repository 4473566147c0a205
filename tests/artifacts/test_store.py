"""Artifacts on disk: what is saved comes back; what is half there, damaged or full is never trusted."""

import errno
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from lasd.artifacts import Manifest, load_artifact, profile_key, save_artifact, store, update_artifact

from .conftest import tiny_target

PROFILE = {"device": "a cpu", "tree": [[0]], "step_time_ms": {"1": 2.5}}


def test_an_artifact_comes_back_as_it_was_saved(tmp_path: Path, manifest: Manifest, tensors: Any) -> None:
    save_artifact(tmp_path / "new" / "heads", manifest, tensors, {"cpu-x-float32-none": PROFILE})
    loaded = load_artifact(tmp_path / "new" / "heads")
    assert loaded.manifest == manifest
    assert loaded.profiles == {"cpu-x-float32-none": PROFILE}
    assert {name: tensor.tolist() for name, tensor in loaded.tensors().items()} == {
        name: tensor.tolist() for name, tensor in tensors.items()
    }


def test_tensors_of_any_strides_and_views_of_one_storage_can_be_saved(tmp_path: Path, manifest: Manifest) -> None:
    whole = torch.randn(4, 6)
    saved = save_artifact(tmp_path / "a", manifest, {"left": whole[:, :3], "right": whole[:, 3:], "turned": whole.T})
    assert torch.equal(saved.tensors()["right"], whole[:, 3:])
    assert torch.equal(saved.tensors()["turned"], whole.T)


def test_nothing_but_the_artifact_is_left_beside_it(tmp_path: Path, manifest: Manifest, tensors: Any) -> None:
    save_artifact(tmp_path / "a", manifest, tensors, {"k": PROFILE})
    save_artifact(tmp_path / "a", manifest, tensors, {"k": PROFILE})
    found = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file())
    assert found == ["a/README.md", "a/heads.safetensors", "a/lasd.json", "a/profiles/k.json"]


def test_saving_again_replaces_weights_and_profiles_and_keeps_other_files(
    tmp_path: Path, manifest: Manifest, tensors: Any
) -> None:
    save_artifact(tmp_path / "a", manifest, tensors, {"old": PROFILE})
    (tmp_path / "a" / "checkpoint.txt").write_text("kept")
    again = save_artifact(tmp_path / "a", manifest, {"other": torch.ones(1)}, {"new": PROFILE})
    assert set(again.profiles) == {"new"}
    assert set(again.tensors()) == {"other"}
    assert (tmp_path / "a" / "checkpoint.txt").read_text() == "kept"


@pytest.mark.parametrize("exists", [False, True])
def test_a_failed_save_leaves_no_trace(
    tmp_path: Path, manifest: Manifest, tensors: Any, monkeypatch, exists: bool
) -> None:
    if exists:
        save_artifact(tmp_path / "a", manifest, tensors)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    monkeypatch.setattr(store, "render_card", lambda _: "\ud800")  # cannot be encoded: fails after the weights
    with pytest.raises(UnicodeEncodeError):
        save_artifact(tmp_path / "a", manifest, {"other": torch.ones(1)})
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_a_process_killed_between_the_renames_leaves_an_artifact_that_is_refused(
    tmp_path: Path, manifest: Manifest, tensors: Any, monkeypatch, refusal: Any
) -> None:
    save_artifact(tmp_path / "a", manifest, tensors)
    rename = Path.replace

    def killed(self: Path, target: Path) -> Path:
        if target.name == "README.md":
            raise KeyboardInterrupt
        return rename(self, target)

    monkeypatch.setattr(Path, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        save_artifact(tmp_path / "a", manifest, {"other": torch.ones(1)})
    assert "never finished" in refusal(load_artifact, tmp_path / "a")


def test_a_full_disk_is_one_line(tmp_path: Path, manifest: Manifest, tensors: Any, monkeypatch, refusal: Any) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(store, "save_file", full)
    line = refusal(save_artifact, tmp_path / "a", manifest, tensors)
    assert "No space left" in line
    assert "free some space" in line
    assert list(tmp_path.iterdir()) == []


def test_updating_adds_results_and_a_profile_and_keeps_the_rest(
    tmp_path: Path, manifest: Manifest, tensors: Any
) -> None:
    save_artifact(tmp_path / "a", manifest, tensors, {"first": PROFILE})
    weights = (tmp_path / "a" / "heads.safetensors").read_bytes()
    updated = update_artifact(tmp_path / "a", measured={"prove": {"equal": 80}}, profile=("second", PROFILE))
    assert set(updated.profiles) == {"first", "second"}
    assert set(updated.manifest.measured) == {"mtbench", "curve", "prove"}
    assert (tmp_path / "a" / "heads.safetensors").read_bytes() == weights
    assert "| equal | 80 |" in (tmp_path / "a" / "README.md").read_text()


@pytest.mark.parametrize("key", ["../evil", "", "a/b", ".hidden"])
def test_a_profile_key_cannot_leave_the_folder(
    tmp_path: Path, manifest: Manifest, tensors: Any, refusal: Any, key: str
) -> None:
    assert "profile key" in refusal(save_artifact, tmp_path / "a", manifest, tensors, {key: PROFILE})


def test_weights_must_come_with_a_kind_that_has_some(tmp_path: Path, manifest: Manifest, refusal: Any) -> None:
    assert "no tensors" in refusal(save_artifact, tmp_path / "a", manifest)


def test_a_missing_folder_is_named(tmp_path: Path, refusal: Any) -> None:
    assert "nowhere does not exist" in refusal(load_artifact, tmp_path / "nowhere")


def test_a_file_is_no_artifact(tmp_path: Path, manifest: Manifest, tensors: Any, refusal: Any) -> None:
    (tmp_path / "file").write_text("x")
    assert "is not a folder" in refusal(load_artifact, tmp_path / "file")
    assert "which is a file" in refusal(save_artifact, tmp_path / "file", manifest, tensors)


def test_a_model_folder_is_told_apart(tmp_path: Path, refusal: Any) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert "--model" in refusal(load_artifact, tmp_path)


@pytest.mark.parametrize("keep", [0, 5, 60, -1])
def test_cut_off_weights_are_refused_on_loading(
    tmp_path: Path, manifest: Manifest, tensors: Any, refusal: Any, keep: int
) -> None:
    save_artifact(tmp_path / "a", manifest, tensors)
    weights = tmp_path / "a" / "heads.safetensors"
    weights.write_bytes(weights.read_bytes()[:keep])
    assert "heads.safetensors" in refusal(load_artifact, tmp_path / "a")


def test_missing_weights_are_refused_on_loading(tmp_path: Path, manifest: Manifest, tensors: Any, refusal: Any) -> None:
    save_artifact(tmp_path / "a", manifest, tensors)
    (tmp_path / "a" / "heads.safetensors").unlink()
    assert "is missing" in refusal(load_artifact, tmp_path / "a")


def test_a_damaged_profile_is_refused_on_loading(
    tmp_path: Path, manifest: Manifest, tensors: Any, refusal: Any
) -> None:
    save_artifact(tmp_path / "a", manifest, tensors, {"k": PROFILE})
    (tmp_path / "a" / "profiles" / "k.json").write_text("{")
    assert "k.json is not valid JSON" in refusal(load_artifact, tmp_path / "a")


def test_the_profile_of_this_machine_is_found(tmp_path: Path, manifest: Manifest, tensors: Any, target: Any) -> None:
    artifact = save_artifact(tmp_path / "a", manifest, tensors, {profile_key(target): PROFILE})
    assert artifact.profile_for(target) == PROFILE
    assert artifact.profile_for(tiny_target(dtype=torch.bfloat16)) is None


def test_a_profile_key_names_device_dtype_and_quantisation(target: Any) -> None:
    assert profile_key(target).startswith("cpu-")
    assert profile_key(target).endswith("-float32-none")
    assert profile_key(tiny_target(quantization="nf4")).endswith("-float32-nf4")


def test_files_are_readable_by_others(tmp_path: Path, manifest: Manifest, tensors: Any) -> None:
    save_artifact(tmp_path / "a", manifest, tensors)
    modes = {path.name: oct(path.stat().st_mode & 0o777) for path in [tmp_path / "a", *(tmp_path / "a").iterdir()]}
    assert modes.pop("a") == "0o755"
    assert set(modes.values()) == {"0o644"}


def test_the_manifest_on_disk_is_plain_json(tmp_path: Path, manifest: Manifest, tensors: Any) -> None:
    save_artifact(tmp_path / "a", manifest, tensors)
    assert json.loads((tmp_path / "a" / "lasd.json").read_text())["kind"] == "medusa"
