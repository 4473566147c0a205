"""The whole tree search on a tiny model, by the entry's own function and by its command."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from lasd.artifacts import BaseModelInfo, Manifest, load_artifact, profile_key, save_artifact
from lasd.decoding.tree import TreeShape
from lasd.drafters import load_drafter
from lasd.errors import LasdError, entry
from search.medusa_tree import main, search_tree
from search.tree_config import MedusaTreeConfig
from tests.evaluation.tiny import save_heads, save_model

REPOSITORY = Path(__file__).resolve().parents[2]
SMALL = {
    "max_nodes": 6,
    "max_rank": 3,
    "contexts": [16, 64],
    "step_repeats": 1,
    "finalists": 2,
    "measure_prompts": 2,
    "measure_tokens": 8,
    "measure_repeats": 1,
    "held_out_share": 1.0,
    "device": "cpu",
}


@pytest.fixture
def config(model_folder, heads_folder, distilled_folder):
    folders = {"model": str(model_folder), "artifact": str(heads_folder), "data": str(distilled_folder)}
    return MedusaTreeConfig(**folders, **SMALL)


@pytest.fixture(scope="module")
def found(tmp_path_factory, model_folder, distilled_folder, target):
    """One whole search: (artifact before, profile, artifact after)."""
    heads = save_heads(tmp_path_factory.mktemp("found") / "heads", target)
    before = load_artifact(heads)
    folders = {"model": str(model_folder), "artifact": str(heads), "data": str(distilled_folder)}
    profile = search_tree(MedusaTreeConfig(**folders, **SMALL), ["medusa_tree.py"])
    return before, profile, load_artifact(heads)


def test_the_profile_is_what_the_drafter_decodes_with(found, target):
    _, profile, artifact = found
    assert artifact.profiles[profile_key(target)] == profile
    assert load_drafter(artifact, target).shape == TreeShape.from_paths(profile["tree"])


def test_a_choice_is_kept_for_each_number_of_cached_tokens(found):
    _, profile, _ = found
    assert set(profile["trees"]) == set(profile["predicted"]) == set(profile["measured"]) == {"16", "64"}
    assert profile["trees"]["16"] == profile["tree"]


def test_plain_decoding_and_the_chain_are_measured_beside_the_trees(found):
    measured = found[1]["measured"]["16"]
    assert {"plain", "chain"} < set(measured)
    assert measured["plain"]["tokens_per_step"] == 1


def test_the_counts_are_in_the_profile(found):
    calibration, growth = found[1]["calibration"], found[1]["growth"]
    assert len(calibration["trials"]) == len(calibration["hits"]) == 2
    assert calibration["own_share"] == 1  # greedy answers in fp32
    assert len(growth["paths"]) == len(growth["values"]) <= 5


def test_the_rest_of_the_artifact_stays(found):
    before, _, after = found
    assert after.manifest.settings == before.manifest.settings
    assert set(after.tensors()) == set(before.tensors())


def test_counts_are_reused_while_nothing_changed(config, monkeypatch):
    config = replace(config, contexts=[16], finalists=1)
    search_tree(config, ["medusa_tree.py"])
    monkeypatch.setattr("search.calibrate_heads._count", lambda *_: pytest.fail("counted again"))
    search_tree(config, ["medusa_tree.py"])


def test_prompts_can_stand_in_for_distilled_data(model_folder, heads_folder, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"turns": [f"tell me {n}"]}) + "\n" for n in range(5)))
    folders = {"model": str(model_folder), "artifact": str(heads_folder), "prompts": str(prompts)}
    profile = search_tree(MedusaTreeConfig(**folders, **SMALL, answer_tokens=12), ["medusa_tree.py"])
    assert profile["calibration"]["answers"] == 5


def test_a_context_beyond_the_model_is_lowered(config):
    profile = search_tree(replace(config, contexts=[16, 4096], finalists=1), ["medusa_tree.py"])
    assert set(profile["trees"]) == {"16", "248"}  # 256 positions less 8 measured tokens


@pytest.mark.slow
def test_the_command_runs_by_path_from_anywhere(config, tmp_path):
    flags = {**SMALL, "contexts": "16", "model": config.model, "artifact": config.artifact, "data": config.data}
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    command = [sys.executable, str(REPOSITORY / "search" / "medusa_tree.py"), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "cached tokens" in done.stdout
    assert len(load_artifact(config.artifact).profiles) == 1


def error_of(config, **changes):
    with pytest.raises(LasdError) as error:
        search_tree(replace(config, **changes), ["medusa_tree.py"])
    return str(error.value)


def test_a_tree_deeper_than_the_heads_is_one_line(config):
    assert "--max_depth 3 is deeper than the 2 heads" in error_of(config, max_depth=3)


def test_heads_of_another_model_are_refused(config, tmp_path):
    other = save_model(tmp_path / "other", seed=1)
    assert "weights_fingerprint" in error_of(config, model=str(other))


def test_a_missing_artifact_is_one_line(config, tmp_path):
    assert "does not exist" in error_of(config, artifact=str(tmp_path / "nothing"))


def test_no_held_out_answer_is_one_line(config):
    assert "no held-out answer for a share of 1e-09" in error_of(config, held_out_share=1e-9)


def test_heads_that_have_seen_all_answers_are_not_judged_on_them(config, target):
    training = {"held_out_share": 0.0}
    settings = {"num_heads": 2, "num_layers": 1, "projection": "shared", "training": training}
    heads = load_artifact(config.artifact).tensors()
    save_artifact(config.artifact, Manifest("medusa", BaseModelInfo.of(target), settings), heads)
    assert "held nothing out" in error_of(config, held_out_share=0.0)


def test_a_work_folder_that_cannot_be_made_is_one_line(config, tmp_path):
    (tmp_path / "file").write_text("")
    assert "give another --work_dir" in error_of(config, work_dir=str(tmp_path / "file" / "work"))


def test_a_missing_prompt_file_is_one_line(config, tmp_path):
    assert "nothing.jsonl" in error_of(config, data="", prompts=str(tmp_path / "nothing.jsonl"))


def test_a_user_error_ends_the_command_with_one_line_and_code_2(tmp_path, monkeypatch, capsys):
    arguments = ["--model", str(tmp_path), "--artifact", str(tmp_path / "nothing"), "--data", str(tmp_path)]
    monkeypatch.setattr("sys.argv", ["search/medusa_tree.py", *arguments])
    with pytest.raises(SystemExit) as end:
        entry(main)
    assert end.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: artifact")
