"""Fixtures of the evaluation tests: one tiny model a session."""

from pathlib import Path

import pytest

from lasd.decoding.target import TargetModel
from tests.evaluation.tiny import load_tiny, save_heads, save_model, write_prompts


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="session")
def target(model_folder: Path) -> TargetModel:
    return load_tiny(model_folder)


@pytest.fixture(scope="session")
def heads_folder(tmp_path_factory: pytest.TempPathFactory, target: TargetModel) -> Path:
    return save_heads(tmp_path_factory.mktemp("heads") / "heads", target)


@pytest.fixture
def prompts_file(tmp_path: Path) -> Path:
    return write_prompts(tmp_path / "prompts.jsonl")
