"""Fixtures of the search tests: a tiny model, untrained heads for it, and distilled answers of its own."""

import json
from pathlib import Path

import pytest

from lasd.artifacts import BaseModelInfo
from lasd.conversations.distilled import DATA_DIR, KIND, MANIFEST_NAME, SCHEMA_VERSION
from lasd.decoding.decoder import Decoder
from lasd.decoding.sampling import SamplingParams
from lasd.decoding.target import TargetModel
from tests.evaluation.tiny import load_tiny, save_heads, save_model

NUM_RECORDS = 12


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="session")
def target(model_folder: Path) -> TargetModel:
    return load_tiny(model_folder)


@pytest.fixture
def heads_folder(tmp_path: Path, target: TargetModel) -> Path:
    return save_heads(tmp_path / "heads", target)


@pytest.fixture(scope="session")
def distilled_folder(tmp_path_factory: pytest.TempPathFactory, target: TargetModel) -> Path:
    """Greedy answers of the tiny model, as `distill/self_distill.py` lays them out."""
    folder = tmp_path_factory.mktemp("distilled") / "data"
    prompts = [target.encode_chat([{"role": "user", "content": f"say {n} words"}]) for n in range(NUM_RECORDS)]
    results = Decoder(target, max_slots=4).generate(prompts, SamplingParams(max_new_tokens=24))
    (folder / DATA_DIR).mkdir(parents=True)
    with open(folder / DATA_DIR / "shard-0-0.jsonl", "w") as file:
        for number, (prompt, result) in enumerate(zip(prompts, results, strict=True)):
            mask = [0] * len(prompt) + [1] * len(result.tokens)
            record = {"id": f"r{number}", "input_ids": prompt + result.tokens, "loss_mask": mask, "turns": 1}
            file.write(json.dumps({**record, "category": None, "finish": [result.finish_reason]}) + "\n")
    manifest = {"kind": KIND, "schema_version": SCHEMA_VERSION, "state": "complete", "settings": {}, "prompts": {}}
    manifest |= {"counts": {"records": NUM_RECORDS}, "base_model": BaseModelInfo.of(target).to_dict()}
    (folder / MANIFEST_NAME).write_text(json.dumps(manifest))
    return folder
