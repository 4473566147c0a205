"""Artifacts: folders that hold what a pipeline made for one model, and everything needed to trust it."""

from lasd.artifacts.card import describe, render_card
from lasd.artifacts.compatibility import check_compatible, differences
from lasd.artifacts.fingerprint import (
    data_fingerprint,
    same_weights,
    template_fingerprint,
    tokenizer_fingerprint,
    weights_fingerprint,
)
from lasd.artifacts.manifest import KINDS, SCHEMA_VERSION, BaseModelInfo, Kind, Manifest
from lasd.artifacts.provenance import device_description, profile_key, provenance
from lasd.artifacts.store import Artifact, load_artifact, save_artifact, update_artifact

__all__ = [
    "KINDS",
    "SCHEMA_VERSION",
    "Artifact",
    "BaseModelInfo",
    "Kind",
    "Manifest",
    "check_compatible",
    "data_fingerprint",
    "describe",
    "device_description",
    "differences",
    "load_artifact",
    "profile_key",
    "provenance",
    "render_card",
    "same_weights",
    "save_artifact",
    "template_fingerprint",
    "tokenizer_fingerprint",
    "update_artifact",
    "weights_fingerprint",
]
