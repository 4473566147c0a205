"""Names of models: short names, folders, Hub ids, and what is said about a name that is none of them."""

from pathlib import Path

import pytest

from lasd import zoo
from lasd.errors import LasdError


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("llama-2-7b", "meta-llama/Llama-2-7b-hf"),
        ("llama-2-13b", "meta-llama/Llama-2-13b-hf"),
        ("llama-2-70b-chat", "meta-llama/Llama-2-70b-chat-hf"),
        ("vicuna-7b-v1.3", "lmsys/vicuna-7b-v1.3"),
        ("vicuna-13b-v1.5", "lmsys/vicuna-13b-v1.5"),
        ("llama-3-8b-instruct", "meta-llama/Meta-Llama-3-8B-Instruct"),
        ("llama-3.1-8b-instruct", "meta-llama/Llama-3.1-8B-Instruct"),
        ("llama-3.2-1b", "meta-llama/Llama-3.2-1B"),
        ("mistral-7b-instruct-v0.3", "mistralai/Mistral-7B-Instruct-v0.3"),
        ("zephyr-7b-beta", "HuggingFaceH4/zephyr-7b-beta"),
        ("qwen2.5-0.5b-instruct", "Qwen/Qwen2.5-0.5B-Instruct"),
        ("qwen3-8b", "Qwen/Qwen3-8B"),
        ("gemma-2-9b-it", "google/gemma-2-9b-it"),
        ("gemma-3-270m", "google/gemma-3-270m"),
        ("smollm2-1.7b-instruct", "HuggingFaceTB/SmolLM2-1.7B-Instruct"),
    ],
)
def test_a_short_name_stands_for_a_hub_id(name: str, source: str) -> None:
    assert zoo.resolve(name) == zoo.ResolvedModel(name, source, None, local=False)


def test_short_names_are_lower_case_and_point_to_well_formed_hub_ids() -> None:
    assert all(name == name.lower() and zoo.hub_id(source) == source for name, source in zoo.ZOO.items())


def test_case_does_not_matter_and_the_revision_is_kept() -> None:
    resolved = zoo.resolve("Llama-2-7B", revision="abc")
    assert (resolved.source, resolved.revision) == ("meta-llama/Llama-2-7b-hf", "abc")


def test_a_hub_id_is_taken_as_it_is() -> None:
    assert zoo.resolve("some-org/Some.Model_1").source == "some-org/Some.Model_1"


def test_a_model_folder_is_local_and_comes_before_a_short_name(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("llama-2-7b").mkdir()
    Path("llama-2-7b/config.json").write_text("{}")
    assert zoo.resolve("llama-2-7b") == zoo.ResolvedModel("llama-2-7b", "llama-2-7b", None, local=True)


def test_a_folder_named_like_a_short_name_but_without_a_model_does_not_hide_it(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("llama-2-7b").mkdir()
    assert zoo.resolve("llama-2-7b").source == "meta-llama/Llama-2-7b-hf"


@pytest.mark.parametrize(
    ("name", "suggested"),
    [
        ("llama-2-7", "llama-2-7b"),
        ("lama2-13b", "llama-2-13b"),
        ("qwen25-7b", "qwen2.5-7b"),
        ("vicuna-7b", "vicuna-7b-v1.3"),
        ("smollm2_135m", "smollm2-135m"),
    ],
)
def test_an_unknown_name_gets_the_nearest_ones(name: str, suggested: str) -> None:
    with pytest.raises(LasdError, match=f"unknown model '{name}'.*did you mean.*{suggested}"):
        zoo.resolve(name)


@pytest.mark.parametrize("name", ["./missing", "/missing/folder", "~/missing", "a/b/c", "", "org/", "/x"])
def test_a_path_that_is_not_there_is_not_taken_for_a_hub_id(name: str) -> None:
    with pytest.raises(LasdError, match="unknown model") as caught:
        zoo.resolve(name)
    assert "\n" not in str(caught.value)


def test_a_folder_without_a_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(LasdError, match=r"has no config\.json"):
        zoo.resolve(str(tmp_path))


def test_an_artifact_given_as_model_is_told_apart(tmp_path: Path) -> None:
    (tmp_path / "lasd.json").write_text("{}")
    with pytest.raises(LasdError, match="--artifact"):
        zoo.resolve(str(tmp_path))


def test_demo_is_prepared_on_first_use(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr("lasd.demo_model.prepare_demo", lambda: tmp_path / "m")
    assert zoo.resolve("demo") == zoo.ResolvedModel("demo", str(tmp_path / "m"), None, local=True)


def test_hub_ids_of_what_the_hub_knows(tmp_path: Path) -> None:
    assert zoo.hub_id("demo") == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert zoo.hub_id("zephyr-7b-beta") == "HuggingFaceH4/zephyr-7b-beta"
    assert zoo.hub_id(str(tmp_path)) is None
    assert zoo.canonical("demo") == "demo"
