"""Distilled data on disk: its layout and schema, and the loader that training and search use.

```
distill.json                       manifest: schema, base model, settings, prompt file, counts, report, state
data/shard-<rank>-<n>.jsonl        one record a line; `datasets.load_dataset("json", data_files=...)` opens them
sharegpt/shard-<rank>-<n>.jsonl    readable copy, one conversation a line
set_aside/shard-<rank>-<n>.jsonl   conversations without a usable answer, with the reason
```
"""

import hashlib
import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lasd.artifacts import BaseModelInfo, same_weights
from lasd.errors import LasdError

if TYPE_CHECKING:
    from lasd.decoding.target import TargetModel

logger = logging.getLogger(__name__)

SCHEMA_VERSION = 1
KIND = "distilled"
MANIFEST_NAME = "distill.json"
DATA_DIR, READABLE_DIR, ASIDE_DIR = "data", "sharegpt", "set_aside"
STATES = ("partial", "complete")


@dataclass(slots=True)
class DistilledRecord:
    """One record. `loss_mask[i]` is 1 where the model itself produced `input_ids[i]` (its end token included).

    `turns` counts the labelled turns; `finish` says for each how it ended: "eos", "length", "stop" or "context".
    """

    id: str
    input_ids: list[int]
    loss_mask: list[int]
    turns: int
    category: str | None
    finish: list[str]

    def to_dict(self) -> dict[str, Any]:
        """The record as it stands in a shard (lists are shared, not copied)."""
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass
class DistilledData:
    """An opened folder of distilled data. Iterating streams the records shard by shard."""

    path: Path
    manifest: dict[str, Any]

    @property
    def state(self) -> str:
        """ "complete" if every prompt is answered or set aside, else "partial"."""
        return str(self.manifest["state"])

    @property
    def data_files(self) -> list[Path]:
        """The data shards in the order of their names."""
        return sorted((self.path / DATA_DIR).glob("shard-*.jsonl"))

    def __iter__(self) -> Iterator[DistilledRecord]:
        for file in self.data_files:
            yield from _iter_shard(file, tolerate_torn=self.state == "partial")

    def load(self) -> list[DistilledRecord]:
        """All records sorted by id, so that the order does not depend on when each was written."""
        return sorted(self, key=lambda record: record.id)

    def fingerprint(self) -> str:
        """A hash of the set of records, whatever their order and shards. Reads all of them."""
        lines: list[bytes] = []
        for record in self:
            content = json.dumps([record.id, record.input_ids, record.loss_mask], separators=(",", ":"))
            lines.append(hashlib.sha256(content.encode()).digest())
        return "sha256:" + hashlib.sha256(b"".join(sorted(lines))).hexdigest()[:32]

    def check_against(self, target: "TargetModel") -> None:
        """Checks that the ids mean the same to this target.

        Raises:
            LasdError: tokenizer or chat template differ from those the data was made with (both values are named).
        """
        made_with: dict[str, Any] = self.manifest["base_model"]
        here = BaseModelInfo.of(target)
        differing = [
            f"{name} {made_with.get(name)} (data) against {getattr(here, name)} (model)"
            for name in ("tokenizer_fingerprint", "template_fingerprint", "vocab_size")
            if made_with.get(name) != getattr(here, name)
        ]
        if differing:
            raise LasdError(
                f"distilled data {self.path} was made with {made_with.get('id')}, whose token ids do not fit "
                f"{here.id}: {'; '.join(differing)}; distil again with this model"
            )
        if not same_weights(str(made_with.get("weights_fingerprint")), here.weights_fingerprint):
            logger.warning(
                "distilled data %s holds the answers of %s (weights %s), not of %s (weights %s)",
                self.path,
                made_with.get("id"),
                made_with.get("weights_fingerprint"),
                here.id,
                here.weights_fingerprint,
            )


def load_distilled(path: str | Path, *, allow_partial: bool = False) -> DistilledData:
    """Opens a folder that `distill/self_distill.py` wrote.

    Raises:
        LasdError: no such folder, no or another manifest, a newer schema, an unfinished run (unless `allow_partial`).
    """
    path = Path(path)
    manifest_path = path / MANIFEST_NAME
    if not manifest_path.is_file():
        raise LasdError(f"{path} holds no {MANIFEST_NAME}: expected a folder written by distill/self_distill.py")
    manifest = read_manifest(manifest_path)
    if manifest["state"] == "partial" and not allow_partial:
        raise LasdError(
            f"distilled data {path} is unfinished (state partial): run the same distill command again to finish it"
        )
    data = DistilledData(path, manifest)
    if not data.data_files:
        raise LasdError(f"distilled data {path} holds no shard in {DATA_DIR}/: distil again")
    return data


def read_manifest(path: Path) -> dict[str, Any]:
    """Reads and validates a manifest.

    Raises:
        LasdError: unreadable, of another kind, of an unknown schema or state, or with a field missing.
    """
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise LasdError(f"{path} is not readable as JSON ({error}): distil again into a new folder") from error
    if not isinstance(manifest, dict) or manifest.get("kind") != KIND:
        raise LasdError(f"{path} is not a manifest of distilled data (kind {KIND!r} expected)")
    if manifest.get("schema_version") != SCHEMA_VERSION:
        raise LasdError(
            f"{path} has schema version {manifest.get('schema_version')}, this lasd reads {SCHEMA_VERSION}: "
            "use the lasd that wrote it, or distil again"
        )
    missing = [name for name in ("state", "base_model", "settings", "prompts", "counts") if name not in manifest]
    if missing or manifest["state"] not in STATES:
        raise LasdError(f"{path} lacks {', '.join(missing) or 'a known state'}: distil again into a new folder")
    return manifest


def _iter_shard(path: Path, tolerate_torn: bool) -> Iterator[DistilledRecord]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n") and tolerate_torn:
                return
            try:
                yield parse_record(json.loads(line))
            except (ValueError, KeyError, TypeError) as error:
                raise LasdError(f"{path} line {number} is not a distilled record ({error}): distil again") from error


def parse_record(raw: dict[str, Any]) -> DistilledRecord:
    """A record from its JSON form.

    Raises:
        KeyError, TypeError, ValueError: a field is missing, or ids and mask do not fit each other.
    """
    record = DistilledRecord(
        raw["id"], raw["input_ids"], raw["loss_mask"], raw["turns"], raw.get("category"), raw["finish"]
    )
    if len(record.input_ids) != len(record.loss_mask):
        raise ValueError(f"{len(record.input_ids)} ids but {len(record.loss_mask)} mask values")
    if not set(record.loss_mask) <= {0, 1}:
        raise ValueError("loss_mask holds values other than 0 and 1")
    return record
