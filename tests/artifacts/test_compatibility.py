"""A wrong artifact for a model: every differing field is named, with both values."""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lasd.artifacts import BaseModelInfo, Manifest, check_compatible, save_artifact

from .conftest import tiny_model, tiny_target, tiny_tokenizer


def test_its_own_model_is_accepted(tmp_path: Path, manifest: Manifest, tensors: Any, target: Any) -> None:
    save_artifact(tmp_path / "a", manifest, tensors).check_compatible(target)


def test_the_same_model_from_elsewhere_in_another_dtype_is_accepted(target: Any) -> None:
    stored = tiny_target(tiny_model().to(torch.bfloat16))
    moved = tiny_target(tiny_model().to(torch.bfloat16).float(), name="./copy", revision=None)
    check_compatible(BaseModelInfo.of(stored), moved, "the heads")


def test_each_differing_field_is_named_with_both_values(
    tmp_path: Path, manifest: Manifest, tensors: Any, refusal: Any
) -> None:
    artifact = save_artifact(tmp_path / "a", manifest, tensors)
    wider = tiny_target(
        tiny_model(hidden_size=32, num_hidden_layers=3), tokenizer=tiny_tokenizer("y"), name="org/wider"
    )
    line = refusal(artifact.check_compatible, wider)
    assert "hidden_size 16 against 32" in line
    assert "num_layers 2 against 3" in line
    found = BaseModelInfo.of(wider)
    for name in ("weights_fingerprint", "tokenizer_fingerprint"):
        assert f"{name} {getattr(manifest.base_model, name)} against {getattr(found, name)}" in line
    assert "vocab_size" not in line
    assert "made for org/tiny at revision abc123, not for org/wider" in line


@pytest.mark.parametrize("name", ["architecture", "vocab_size", "weights_fingerprint", "tokenizer_fingerprint"])
def test_one_differing_field_is_enough(manifest: Manifest, target: Any, refusal: Any, name: str) -> None:
    other = replace(manifest.base_model, **{name: 41 if name == "vocab_size" else "other"})
    assert f"{name} {getattr(other, name)} against" in refusal(check_compatible, other, target, "the heads")


def test_another_chat_template_alone_is_a_warning(manifest: Manifest, target: Any, caplog) -> None:
    other = replace(manifest.base_model, template_fingerprint="sha256:other")
    with caplog.at_level(logging.WARNING):
        check_compatible(other, target, "the heads")
    assert "another chat template" in caplog.text
    assert "sha256:other" in caplog.text
