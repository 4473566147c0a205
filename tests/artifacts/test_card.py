"""The card and `lasd show`: everything from the manifest, nothing else."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from lasd.artifacts import Manifest, describe, render_card, save_artifact
from lasd.artifacts.tabulate import cell, tables


def numbers(value: Any) -> set[str]:
    """Every number in a JSON value, as the card writes it, and every number inside its strings."""
    if isinstance(value, dict):
        return {n for key, item in value.items() for n in numbers(key) | numbers(item)}
    if isinstance(value, list):
        return {n for item in value for n in numbers(item)}
    return set(re.findall(r"\d+(?:\.\d+)?", value if isinstance(value, str) else cell(value)))


def test_every_number_on_the_card_stands_in_the_manifest(manifest: Manifest) -> None:
    card = re.sub(r"\bfp32\b|sha256:", "", render_card(manifest))
    written = numbers(card) - numbers(json.loads(manifest.to_json()))
    assert written == set()


def test_the_front_matter_is_what_the_hub_reads(manifest: Manifest) -> None:
    _, front, _ = render_card(manifest).split("---\n", 2)
    assert yaml.safe_load(front) == {
        "base_model": "org/tiny",
        "library_name": "lasd",
        "pipeline_tag": "text-generation",
        "tags": ["lasd", "speculative-decoding", "medusa"],
        "license": "apache-2.0",
    }


def test_the_demo_model_links_to_the_model_it_came_from(manifest: Manifest) -> None:
    demo = replace(manifest, base_model=replace(manifest.base_model, id="demo"))
    assert 'base_model: "HuggingFaceTB/SmolLM2-135M-Instruct"' in render_card(demo)
    assert "--model demo" in render_card(demo)


def test_a_local_base_model_is_not_named_to_the_hub(manifest: Manifest, tmp_path: Path) -> None:
    local = replace(manifest, base_model=replace(manifest.base_model, id=str(tmp_path)), provenance={})
    _, front, _ = render_card(local).split("---\n", 2)
    assert not yaml.safe_load(front).keys() & {"base_model", "license"}


def test_results_by_method_become_one_table(manifest: Manifest) -> None:
    card = render_card(manifest)
    assert "|  | tokens_per_s | tokens_per_step | accept_at_pos |" in card
    assert "| medusa | 47.12 | 1.81 | 0.5 / 0.25 |" in card
    assert "| generate | 31.25 | 1 | – |" in card


def test_an_artifact_without_results_says_so(manifest: Manifest) -> None:
    assert "Nothing has been measured" in render_card(replace(manifest, measured={}))


def test_show_tells_what_it_is_for_which_model_with_which_results_and_how_to_use_it(
    tmp_path: Path, manifest: Manifest, tensors: Any
) -> None:
    artifact = save_artifact(tmp_path / "a", manifest, tensors, {"cpu-x": {"dtype": "float32", "tree": [[0]]}})
    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(describe(artifact))
    shown = console.export_text()
    for expected in ("Medusa heads for org/tiny", "47.12", "cpu-x", f"--artifact {tmp_path / 'a'}", "train/medusa.py"):
        assert expected in shown


def test_a_long_list_of_records_is_thinned_with_both_ends() -> None:
    (table,) = tables({"curve": [{"step": step, "loss": 1.5} for step in range(100)]})
    assert len(table.rows) == 12
    assert (table.rows[0][0], table.rows[-1][0]) == ("0", "99")


def test_a_pipe_in_a_value_does_not_break_the_table(manifest: Manifest) -> None:
    assert "a\\|b" in render_card(replace(manifest, settings={"note": "a|b"}))


def test_records_side_by_side_share_a_table_beside_plain_values() -> None:
    found = tables({"chosen": "tree", "plain": {"nodes": 1}, "tree": {"nodes": 8, "extra": 2.5}})
    assert [(table.header, table.rows) for table in found] == [
        (("", "value"), (("chosen", "tree"),)),
        (("", "nodes", "extra"), (("plain", "1", "–"), ("tree", "8", "2.5"))),
    ]


def test_a_curve_comes_last_with_its_steps_as_the_first_column(manifest: Manifest) -> None:
    found = tables({"curve": [{"step": 5, "loss": 2.0}], "run": {"seconds": 3}}, "results")
    assert [table.title for table in found] == ["results: run", "results: curve"]
    assert (found[1].header, found[1].rows) == (("step", "loss"), (("5", "2"),))
