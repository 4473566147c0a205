"""Artifacts on disk: save, load and update, each all or nothing.

    heads/
      lasd.json                     the manifest; written last, so a folder without it was never finished
      heads.safetensors             weights, for kinds that have some
      profiles/<device>-<dtype>-<quantization>.json      settings sized on one machine
      README.md                     the card, rendered from the manifest

A new folder is written beside its place and renamed into it. In a folder that exists, every file is written beside its
place first and renamed at the end, the manifest last; files that are not the artifact's (checkpoints, logs) stay.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from lasd.artifacts.card import render_card
from lasd.artifacts.compatibility import check_compatible
from lasd.artifacts.disk import Writer, one_line_disk_errors, replace_files, staged_folder
from lasd.artifacts.manifest import KINDS, Manifest, from_json_text, to_json_text
from lasd.artifacts.provenance import profile_key
from lasd.errors import LasdError

if TYPE_CHECKING:
    from lasd.decoding.target import TargetModel

MANIFEST = "lasd.json"
CARD = "README.md"
PROFILES = "profiles"


@dataclass(frozen=True)
class Artifact:
    """A loaded artifact. The weights stay on disk until `tensors()`."""

    path: Path
    manifest: Manifest
    profiles: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def weights_path(self) -> Path | None:
        """The safetensors file, None for kinds without weights."""
        name = KINDS[self.manifest.kind].weights_file
        return self.path / name if name else None

    def tensors(self) -> dict[str, Tensor]:
        """Reads the weights to the CPU: name -> tensor; empty for kinds without weights. Raises LasdError."""
        if self.weights_path is None:
            return {}
        with _open_weights(self.weights_path) as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (safe_open is no mapping)

    def check_compatible(self, target: "TargetModel") -> None:
        """Raises LasdError naming each field in which the target is not the model this artifact was made for."""
        check_compatible(self.manifest.base_model, target, f"the {KINDS[self.manifest.kind].title} in {self.path}")

    def profile_for(self, target: "TargetModel") -> dict[str, Any] | None:
        """Returns the settings sized for the target's device, dtype and quantisation, None if there are none."""
        return self.profiles.get(profile_key(target))


def load_artifact(path: str | Path) -> Artifact:
    """Opens an artifact folder and checks all of it but the values of the weights. Raises LasdError."""
    path = Path(path)
    if not path.is_dir():
        came = "is not a folder" if path.exists() else "does not exist"
        raise LasdError(
            f"artifact {path} {came}; expected a folder with {MANIFEST}: check the path, or make one (see README.md)"
        )
    if not (path / MANIFEST).is_file():
        is_model = (path / "config.json").is_file()
        hint = "it holds a model, pass that as --model" if is_model else "it was never finished, make it again"
        raise LasdError(f"{path} has no {MANIFEST}; expected an artifact folder: {hint}")
    manifest = Manifest.from_json(_read_text(path / MANIFEST), str(path / MANIFEST))
    files = sorted((path / PROFILES).glob("*.json"))
    artifact = Artifact(path, manifest, {file.stem: from_json_text(_read_text(file), str(file)) for file in files})
    if artifact.weights_path is not None:
        with _open_weights(artifact.weights_path):  # the header is checked against the file's length
            pass
    return artifact


def save_artifact(
    path: str | Path,
    manifest: Manifest,
    tensors: Mapping[str, Tensor] | None = None,
    profiles: Mapping[str, Mapping[str, Any]] | None = None,
) -> Artifact:
    """Writes an artifact folder, all or nothing, and returns it as it loads. Raises LasdError.

    An artifact that is there already is replaced, its profiles too; other files in the folder stay.
    """
    path = Path(path)
    weights_file = KINDS[manifest.kind].weights_file if manifest.kind in KINDS else None
    text = manifest.to_json()  # first: it checks the kind and the values
    if bool(tensors) != bool(weights_file):
        came, expected = ("tensors", "none") if tensors else ("no tensors", weights_file)
        raise LasdError(f"saving the kind {manifest.kind!r} with {came}; expected {expected}: pass what the kind holds")
    files: dict[str, Writer] = {}
    if tensors and weights_file:
        files[weights_file] = _weights_writer(tensors, manifest.kind)
    for key, profile in (profiles or {}).items():
        files[_profile_name(key)] = _text_writer(to_json_text(dict(profile), f"profile {key}"))
    files[CARD] = _text_writer(render_card(manifest))
    files[MANIFEST] = _text_writer(text)
    if path.exists() and not path.is_dir():
        raise LasdError(
            f"cannot save an artifact as {path}, which is a file; expected a new or existing folder: pass another path"
        )
    with one_line_disk_errors(path):
        if path.is_dir():
            replace_files(path, files, first=lambda: _retire(path, keep=files))
        else:
            with staged_folder(path) as staging:
                for name, write in files.items():
                    (staging / name).parent.mkdir(exist_ok=True)
                    write(staging / name)
    return load_artifact(path)


def _retire(path: Path, keep: Mapping[str, Writer]) -> None:
    """Takes the old profiles away, and the old manifest: old and new parts are never taken for one artifact."""
    (path / MANIFEST).unlink(missing_ok=True)
    for profile in (path / PROFILES).glob("*.json"):
        if f"{PROFILES}/{profile.name}" not in keep:
            profile.unlink()


def update_artifact(
    path: str | Path,
    *,
    measured: Mapping[str, Any] | None = None,
    profile: tuple[str, Mapping[str, Any]] | None = None,
) -> Artifact:
    """Adds results or a machine profile to an artifact and renders its card again. Raises LasdError.

    Args:
        path: the artifact's folder.
        measured: results by name; a name that is there already is replaced.
        profile: (key from `profile_key`, settings); a profile of that key is replaced.
    """
    artifact = load_artifact(path)
    manifest = replace(artifact.manifest, measured={**artifact.manifest.measured, **(measured or {})})
    files: dict[str, Writer] = {}
    if profile is not None:
        files[_profile_name(profile[0])] = _text_writer(to_json_text(dict(profile[1]), f"profile {profile[0]}"))
    files[CARD] = _text_writer(render_card(manifest))
    files[MANIFEST] = _text_writer(manifest.to_json())
    with one_line_disk_errors(artifact.path):
        replace_files(artifact.path, files)
    return load_artifact(artifact.path)


def _profile_name(key: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", key):
        raise LasdError(
            f"{key!r} is no profile key; expected letters, digits, dots and dashes: use profile_key(target)"
        )
    return f"{PROFILES}/{key}.json"


def _text_writer(text: str) -> Writer:
    def write(path: Path) -> None:
        path.write_text(text, encoding="utf-8", newline="\n")

    return write


def _weights_writer(tensors: Mapping[str, Tensor], kind: str) -> Writer:
    def write(path: Path) -> None:
        contiguous = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        save_file(contiguous, path, metadata={"format": "pt", "lasd_kind": kind})

    return write


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise LasdError(f"cannot read {path}: {error}; expected a readable JSON file: restore it") from error


@contextmanager
def _open_weights(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            yield file
    except FileNotFoundError as error:
        raise LasdError(
            f"{path} is missing; expected the artifact's weights there: copy the whole folder again"
        ) from error
    except (SafetensorError, OSError) as error:
        raise LasdError(
            f"{path} ({path.stat().st_size} bytes) is cut off or damaged ({error}); expected a whole safetensors file: "
            "copy it again, or make the artifact again"
        ) from error
