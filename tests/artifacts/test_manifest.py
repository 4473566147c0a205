"""lasd.json is read strictly: every way it can be off is one line that names the place."""

import json
from dataclasses import replace
from typing import Any

import pytest

from lasd.artifacts import SCHEMA_VERSION, BaseModelInfo, Manifest

from .conftest import tiny_target


def test_a_manifest_comes_back_as_it_was(manifest: Manifest) -> None:
    assert Manifest.from_json(manifest.to_json()) == manifest


def test_the_base_model_is_described_from_the_target(target: Any) -> None:
    base = BaseModelInfo.of(target)
    assert (base.id, base.revision, base.architecture) == ("org/tiny", "abc123", "LlamaForCausalLM")
    assert (base.hidden_size, base.vocab_size, base.num_layers) == (16, 40, 2)


def test_a_short_name_is_recorded_as_its_hub_id() -> None:
    assert BaseModelInfo.of(tiny_target(name="Llama-2-7B")).id == "meta-llama/Llama-2-7b-hf"


def test_a_newer_schema_asks_for_a_newer_lasd(manifest: Manifest, refusal: Any) -> None:
    text = replace(manifest, schema_version=SCHEMA_VERSION + 1).to_json()
    line = refusal(Manifest.from_json, text, "x/lasd.json")
    assert line.startswith(f"x/lasd.json has schema version {SCHEMA_VERSION + 1}; expected at most {SCHEMA_VERSION}")
    assert "newer lasd" in line


def test_an_unknown_kind_lists_the_known_ones(manifest: Manifest, refusal: Any) -> None:
    text = manifest.to_json().replace('"medusa"', '"medusae"', 1)
    line = refusal(Manifest.from_json, text)
    assert "'medusae'" in line
    assert "'medusa'" in line


def test_an_unknown_kind_is_not_written(manifest: Manifest, refusal: Any) -> None:
    assert "'nothing'" in refusal(replace(manifest, kind="nothing").to_json)


CHANGES: dict[str, tuple[Any, str]] = {
    "missing field": (lambda r: r.pop("settings"), "no settings"),
    "unknown field": (lambda r: r.update(notes="hi"), "unknown notes"),
    "wrong type": (lambda r: r.update(measured=[]), "measured = []"),
    "missing model field": (lambda r: r["base_model"].pop("hidden_size"), "base_model has no hidden_size"),
    "text for a number": (lambda r: r["base_model"].update(num_layers="2"), "num_layers = '2'; expected int"),
    "true for a number": (lambda r: r["base_model"].update(num_layers=True), "num_layers = True"),
    "null where it may not be": (lambda r: r["base_model"].update(id=None), "id = None; expected str"),
}


@pytest.mark.parametrize("case", CHANGES)
def test_a_changed_manifest_is_refused(case: str, manifest: Manifest, refusal: Any) -> None:
    change, expected = CHANGES[case]
    record = json.loads(manifest.to_json())
    change(record)
    assert expected in refusal(Manifest.from_json, json.dumps(record))


@pytest.mark.parametrize("text", ['{"kind": "med', "[]", ""])
def test_text_that_is_no_json_object_is_refused(text: str, refusal: Any) -> None:
    assert refusal(Manifest.from_json, text, "a/lasd.json").startswith("a/lasd.json")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), {1, 2}, {3: 4}, object()])
def test_what_json_cannot_hold_is_named_with_its_place(value: Any, manifest: Manifest, refusal: Any) -> None:
    line = refusal(replace(manifest, measured={"run": [{"loss": value}]}).to_json)
    assert "measured.run[0].loss" in line
