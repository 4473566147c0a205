"""`distill.json`: what makes a run the same run, its state and its counts. Written whole or not at all."""

import hashlib
import json
import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from distill.filters import is_loop
from lasd.conversations import DistilledData
from lasd.conversations.distilled import DATA_DIR, KIND, MANIFEST_NAME, SCHEMA_VERSION, read_manifest
from lasd.errors import LasdError


def file_sha256(path: str | Path) -> str:
    """The file's SHA-256 in hexadecimal."""
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_atomically(path: Path, text: str) -> None:
    """Replaces the file as a whole: readers see the old text or the new one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def open_manifest(output: Path, identity: Mapping[str, Any], extra: Mapping[str, Any]) -> dict[str, Any]:
    """Begins the output's manifest, or checks that the folder was begun by the same command.

    Args:
        output: the folder.
        identity: "base_model", "settings" and "prompts": what must not change between start and resume.
        extra: stored beside it when the manifest is new.

    Raises:
        LasdError: the folder was begun with something else (each differing field, both values).
    """
    path = output / MANIFEST_NAME
    if path.exists():
        manifest = read_manifest(path)
        differing = _differences(manifest, identity)
        if differing:
            raise LasdError(
                f"{output} was begun with {'; '.join(differing)}: "
                "give another --output, or the settings it was begun with"
            )
        return manifest
    if any((output / DATA_DIR).glob("shard-*.jsonl")):
        raise LasdError(f"{output} holds shards but no {MANIFEST_NAME}: give another --output, or move the folder away")
    output.mkdir(parents=True, exist_ok=True)
    manifest = {
        "kind": KIND,
        "schema_version": SCHEMA_VERSION,
        "state": "partial",
        **identity,
        "counts": {},
        **extra,
    }
    save_manifest(output, manifest)
    return manifest


def save_manifest(output: Path, manifest: Mapping[str, Any]) -> None:
    """Writes the manifest atomically."""
    write_atomically(output / MANIFEST_NAME, json.dumps(manifest, indent=2, ensure_ascii=False) + "\n")


def _differences(begun: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Fields of the identity that differ, as "name old, this command says new"."""
    out: list[str] = []
    for section, values in now.items():
        for name in sorted({*values, *begun[section]} - _NOT_COMPARED[section]):
            old, new = begun[section].get(name), values.get(name)
            if old != new:
                out.append(f"{section}.{name} {old}, this command says {new}")
    return out


_NOT_COMPARED: dict[str, set[str]] = {
    "base_model": {"id", "revision"},
    "settings": set(),
    "prompts": {"path", "exclude_paths"},
}


def count_records(output: Path) -> dict[str, Any]:
    """Totals over all stored records, for the manifest. Labelled tokens are those that training can use."""
    counts: Counter[str] = Counter()
    finish: Counter[str] = Counter()
    categories: Counter[str] = Counter()
    for record in DistilledData(output, {"state": "partial"}):
        counts["records"] += 1
        counts["turns"] += record.turns
        counts["tokens"] += len(record.input_ids)
        counts["labelled_tokens"] += sum(record.loss_mask)
        counts["last_answer_loops"] += is_loop(record.input_ids)
        finish.update(record.finish)
        categories[record.category or "none"] += 1
    return {**counts, "finish": dict(sorted(finish.items())), "records_by_category": dict(sorted(categories.items()))}
