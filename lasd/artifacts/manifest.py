"""`lasd.json`: what an artifact is, which model it is for, how it was made and what was measured with it."""

import json
import math
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any, NoReturn

from lasd.artifacts.fingerprint import template_fingerprint, tokenizer_fingerprint, weights_fingerprint
from lasd.errors import LasdError

if TYPE_CHECKING:
    from lasd.decoding.target import TargetModel

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class Kind:
    """A kind of artifact: its title, and its safetensors file if it has one."""

    title: str
    weights_file: str | None


KINDS: dict[str, Kind] = {
    "medusa": Kind("Medusa heads", "heads.safetensors"),
}


@dataclass(frozen=True)
class BaseModelInfo:
    """The model that an artifact (or a distilled data set) belongs to.

    `id` and `revision` say where it was loaded from; the other fields say which model it is, wherever it is loaded
    from.
    """

    id: str
    revision: str | None
    weights_fingerprint: str
    tokenizer_fingerprint: str
    template_fingerprint: str | None
    architecture: str
    hidden_size: int
    vocab_size: int
    num_layers: int

    @classmethod
    def of(cls, target: "TargetModel") -> "BaseModelInfo":
        """Describes a loaded target. Reads a sample of the weights; the target is not changed."""
        from lasd.zoo import canonical

        model = target.model
        inner = model.get_base_model() if hasattr(model, "get_base_model") else model
        return cls(
            id=canonical(target.name),
            revision=target.revision,
            weights_fingerprint=weights_fingerprint(model),
            tokenizer_fingerprint=tokenizer_fingerprint(target.tokenizer),
            template_fingerprint=template_fingerprint(target.tokenizer),
            architecture=type(inner).__name__,
            hidden_size=target.hidden_size,
            vocab_size=target.vocab_size,
            num_layers=target.num_layers,
        )

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields as a plain dictionary."""
        return asdict(self)

    @classmethod
    def from_dict(cls, record: Any, where: str = "base_model") -> "BaseModelInfo":
        """Reads `to_dict`'s output back; `where` names the place in error lines. Raises LasdError."""
        return cls(**_checked(record, _MODEL_FIELDS, where))


@dataclass(frozen=True)
class Manifest:
    """The contents of `lasd.json`. `measured` and `provenance` hold plain JSON values only."""

    kind: str
    base_model: BaseModelInfo
    settings: dict[str, Any]
    measured: dict[str, Any] = field(default_factory=dict)
    provenance: dict[str, Any] = field(default_factory=dict)
    schema_version: int = SCHEMA_VERSION

    def to_json(self) -> str:
        """Returns the manifest as JSON text. Raises LasdError for a value that JSON cannot hold, such as NaN."""
        _check_kind(self.kind, "the manifest")
        record = {name: getattr(self, name) for name in _MANIFEST_FIELDS} | {"base_model": self.base_model.to_dict()}
        return to_json_text(record, "the manifest")

    @classmethod
    def from_json(cls, text: str, where: str = "lasd.json") -> "Manifest":
        """Reads a manifest strictly; `where` names the file in error lines. Raises LasdError."""
        record = from_json_text(text, where)
        version = record.get("schema_version")
        if isinstance(version, int) and version > SCHEMA_VERSION:
            _fail(
                where,
                f"schema version {version}",
                f"at most {SCHEMA_VERSION}",
                "install a newer lasd to read this artifact",
            )
        _check_kind(record.get("kind"), where)
        checked = _checked(record, _MANIFEST_FIELDS, where)
        checked["base_model"] = BaseModelInfo.from_dict(checked["base_model"], f"{where}: base_model")
        return cls(**checked)


_MODEL_FIELDS: dict[str, tuple[type, ...]] = {
    f.name: (str, type(None))
    if f.name in ("revision", "template_fingerprint")
    else (int if f.type in (int, "int") else str,)
    for f in fields(BaseModelInfo)
}
_MANIFEST_FIELDS: dict[str, tuple[type, ...]] = {
    "kind": (str,),
    "schema_version": (int,),
    "base_model": (dict,),
    "settings": (dict,),
    "measured": (dict,),
    "provenance": (dict,),
}


def _fail(where: str, came: str, expected: str, action: str) -> NoReturn:
    raise LasdError(f"{where} has {came}; expected {expected}: {action}")


def _check_kind(kind: Any, where: str) -> None:
    if kind not in KINDS:
        _fail(where, f"the kind {kind!r}", " or ".join(map(repr, KINDS)), "install the lasd version that wrote it")


def _checked(record: Any, types: dict[str, tuple[type, ...]], where: str) -> dict[str, Any]:
    """Returns the record if it is an object with exactly these fields of these types; else raises LasdError."""
    action = "restore the file from where it came from, or make the artifact again"
    if not isinstance(record, dict):
        _fail(where, f"a {type(record).__name__}", "an object", action)
    missing, unknown = sorted(types.keys() - record.keys()), sorted(record.keys() - types.keys())
    if missing or unknown:
        came = [f"no {', '.join(missing)}"] * bool(missing) + [f"the unknown {', '.join(unknown)}"] * bool(unknown)
        _fail(where, " and ".join(came), f"exactly {', '.join(types)}", action)
    for name, kinds in types.items():
        value = record[name]
        if not isinstance(value, kinds) or isinstance(value, bool):
            expected = " or ".join("null" if kind is type(None) else kind.__name__ for kind in kinds)
            _fail(where, f"{name} = {value!r:.60}", expected, action)
    return dict(record)


def to_json_text(record: dict[str, Any], what: str) -> str:
    """Returns indented JSON text ending in a newline; raises LasdError naming a value that JSON cannot hold."""
    problem = _not_json(record, "")
    if problem:
        raise LasdError(
            f"{what} holds {problem}, which JSON cannot hold: pass plain numbers, strings, lists and dictionaries"
        )
    return json.dumps(record, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def _not_json(value: Any, path: str) -> str | None:
    if isinstance(value, dict):
        bad_keys = [key for key in value if not isinstance(key, str)]
        if bad_keys:
            return f"the key {bad_keys[0]!r} in {path or 'its top level'}"
        return next(filter(None, (_not_json(item, f"{path}.{key}".lstrip(".")) for key, item in value.items())), None)
    if isinstance(value, list | tuple):
        return next(filter(None, (_not_json(item, f"{path}[{i}]") for i, item in enumerate(value))), None)
    if value is None or isinstance(value, str | int) or (isinstance(value, float) and math.isfinite(value)):
        return None
    return f"{path} = {value!r:.60}"


def from_json_text(text: str, where: str) -> dict[str, Any]:
    """Parses a JSON object; `where` names the file in error lines. Raises LasdError for anything else."""
    try:
        record = json.loads(text)
    except json.JSONDecodeError as error:
        raise LasdError(
            f"{where} is not valid JSON ({error}); expected what lasd wrote: restore it, or make the artifact again"
        ) from error
    if not isinstance(record, dict):
        raise LasdError(f"{where} holds a {type(record).__name__}; expected a JSON object: restore the file")
    return record
