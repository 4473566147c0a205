"""Distilled data is loaded only if it is whole and its ids mean the same to the model."""

import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lasd.conversations import distilled, load_distilled
from lasd.conversations.split import held_out, part_id
from lasd.errors import LasdError

BASE = {
    "id": "org/tiny",
    "weights_fingerprint": "sha256:aa-bb",
    "tokenizer_fingerprint": "sha256:tt",
    "template_fingerprint": "sha256:cc",
    "vocab_size": 50,
}


def record(name: str, ids: list[int], mask: list[int]) -> dict[str, Any]:
    return {"id": name, "input_ids": ids, "loss_mask": mask, "turns": 1, "category": None, "finish": ["eos"]}


RECORDS = [record("b", [1, 2, 3], [0, 1, 1]), record("a", [4, 5], [0, 1])]


def write(folder: Path, *shards: list[dict[str, Any]], **changes: Any) -> Path:
    manifest = {"kind": "distilled", "schema_version": 1, "state": "complete", "base_model": BASE}
    manifest |= {"settings": {}, "prompts": {}, "counts": {}, **changes}
    (folder / "data").mkdir()
    for number, shard in enumerate(shards):
        text = "".join(json.dumps(row) + "\n" for row in shard)
        (folder / "data" / f"shard-00000-{number:05d}.jsonl").write_text(text)
    (folder / "distill.json").write_text(json.dumps(manifest))
    return folder


def model(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> Any:
    """A target whose description is BASE with changes."""
    monkeypatch.setattr(distilled.BaseModelInfo, "of", lambda target: SimpleNamespace(**{**BASE, **changes}))
    return object()


def test_records_are_streamed_shard_by_shard(tmp_path: Path) -> None:
    data = load_distilled(write(tmp_path, RECORDS[:1], RECORDS[1:]))
    assert [(r.id, r.input_ids, r.loss_mask, r.finish) for r in data] == [
        ("b", [1, 2, 3], [0, 1, 1], ["eos"]),
        ("a", [4, 5], [0, 1], ["eos"]),
    ]


def test_load_sorts_by_id(tmp_path: Path) -> None:
    assert [r.id for r in load_distilled(write(tmp_path, RECORDS)).load()] == ["a", "b"]


def test_the_fingerprint_is_of_the_set(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in "xyz"]
    for folder in folders:
        folder.mkdir()
    changed = [RECORDS[0], {**RECORDS[1], "loss_mask": [1, 1]}]
    prints = [
        load_distilled(write(folders[0], RECORDS)).fingerprint(),
        load_distilled(write(folders[1], RECORDS[1:], RECORDS[:1])).fingerprint(),
        load_distilled(write(folders[2], changed)).fingerprint(),
    ]
    assert prints[0] == prints[1] != prints[2]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"state": "partial"}, "unfinished"),
        ({"schema_version": 9}, "schema version 9"),
        ({"kind": "medusa"}, "not a manifest of distilled data"),
        ({"state": "odd"}, "known state"),
    ],
)
def test_what_is_not_whole_is_refused(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(LasdError, match=words):
        load_distilled(write(tmp_path, RECORDS, **changes))


def test_partial_data_can_be_asked_for_and_its_torn_end_is_ignored(tmp_path: Path) -> None:
    write(tmp_path, RECORDS, state="partial")
    shard = tmp_path / "data" / "shard-00000-00000.jsonl"
    shard.write_text(shard.read_text() + '{"id": "c", "inp')
    assert [r.id for r in load_distilled(tmp_path, allow_partial=True)] == ["b", "a"]


def test_a_torn_line_in_complete_data_is_an_error(tmp_path: Path) -> None:
    write(tmp_path, RECORDS)
    shard = tmp_path / "data" / "shard-00000-00000.jsonl"
    shard.write_text(shard.read_text()[:-5])
    with pytest.raises(LasdError, match="line 2"):
        list(load_distilled(tmp_path))


@pytest.mark.parametrize("bad", [record("c", [1, 2], [1]), record("c", [1, 2], [0, 2]), {"id": "c"}])
def test_a_malformed_record_is_named_by_its_line(tmp_path: Path, bad: dict[str, Any]) -> None:
    with pytest.raises(LasdError, match="line 3"):
        list(load_distilled(write(tmp_path, [*RECORDS, bad])))


def test_a_folder_without_manifest_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LasdError, match=r"holds no distill\.json"):
        load_distilled(tmp_path)


def test_the_same_model_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load_distilled(write(tmp_path, RECORDS)).check_against(model(monkeypatch))


@pytest.mark.parametrize("name", ["tokenizer_fingerprint", "template_fingerprint"])
def test_another_tokenizer_or_template_is_refused_with_both_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    with pytest.raises(LasdError, match=f"{name} {BASE[name]} .data. against sha256:new"):
        load_distilled(write(tmp_path, RECORDS)).check_against(model(monkeypatch, **{name: "sha256:new"}))


def test_other_weights_are_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    data = load_distilled(write(tmp_path, RECORDS))
    with caplog.at_level(logging.WARNING):
        data.check_against(model(monkeypatch, weights_fingerprint="sha256:aa-zz"))
    assert "sha256:aa-zz" in caplog.text


def test_datasets_opens_the_shards(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    write(tmp_path, RECORDS)
    files = str(tmp_path / "data" / "*.jsonl")
    loaded = datasets.load_dataset("json", data_files=files, split="train", cache_dir=str(tmp_path / "cache"))
    assert loaded[0]["input_ids"] == [1, 2, 3]


def test_all_parts_of_a_conversation_are_held_out_together() -> None:
    for number in range(200):
        name = f"c/{number}"
        assert held_out(part_id(name, 0), 0.3) == held_out(part_id(name, 1), 0.3) == held_out(part_id(name, 11), 0.3)


def test_the_held_out_share_is_about_what_was_asked() -> None:
    assert 0.05 < sum(held_out(f"c{number}", 0.1) for number in range(1000)) / 1000 < 0.15
