"""Settings of a pipeline: one dataclass, read as flag > `--config` YAML > default, and strict about names and types."""

import dataclasses
import difflib
import types
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from lasd.errors import LasdError

Settings = TypeVar("Settings")


def setting(default: Any, text: str, choices: tuple[str, ...] | None = None) -> Any:
    """A dataclass field with its help text and, where only some words are allowed, those words."""
    metadata: dict[str, Any] = {"help": text}
    if choices:
        metadata["choices"] = list(choices)
    if isinstance(default, list):
        return dataclasses.field(default_factory=lambda: list(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def parse_settings(kind: type[Settings], arguments: Sequence[str], *, program: str, extra: str) -> Settings:
    """Reads flags and the `--config` file into a dataclass.

    Args:
        kind: the dataclass; its fields are the settings.
        arguments: the command line's words.
        program: the command, for help texts.
        extra: the extra of lasd that brings trl, whose parser this is.

    Raises:
        LasdError: trl is not installed; the file is missing or no YAML mapping; a name is unknown (the nearest one is
            named); a value has the wrong type or is none of the allowed words.
    """
    try:
        from trl import TrlParser
    except ImportError as error:
        raise LasdError(
            f"{program} reads its settings with trl, which is not installed ({error}): pip install 'lasd[{extra}]'"
        ) from error

    class Parser(TrlParser):
        def error(self, message: str) -> NoReturn:
            raise LasdError(f"{message}; see `python {program} --help`")

    words = _split_config_flag(arguments)
    if "--config" in words:
        _check_file(Path(words[words.index("--config") + 1]), kind)
    kinds: Any = [kind]
    parser = Parser(kinds, allow_abbrev=False, prog=program, description=(kind.__doc__ or "").strip().split("\n")[0])
    try:
        (settings,) = parser.parse_args_and_config(args=words)
    except LasdError:
        raise
    except ValueError as error:
        unknown = [word.lstrip("-").split("=")[0] for word in words if word.startswith("--") and not _known(word, kind)]
        reason = _unknown_text(unknown[0], kind) if unknown else " ".join(str(error).split())
        raise LasdError(f"{reason}; see `python {program} --help`") from error
    check_values(settings)
    return settings


def _names(kind: type) -> list[str]:
    return [item.name for item in dataclasses.fields(kind)]


def _known(word: str, kind: type) -> bool:
    name = word.lstrip("-").split("=")[0].replace("-", "_")
    return name.removeprefix("no_") in _names(kind) or name in {*_names(kind), "config", "help"}


def _unknown_text(name: str, kind: type) -> str:
    near = difflib.get_close_matches(name.replace("-", "_"), _names(kind), n=1)
    return f"unknown setting {name}" + (f" (did you mean {near[0]}?)" if near else "")


def _split_config_flag(arguments: Sequence[str]) -> list[str]:
    words: list[str] = []
    for word in arguments:
        words += ["--config", word.removeprefix("--config=")] if word.startswith("--config=") else [word]
    if words[-1:] == ["--config"]:
        raise LasdError("--config has no value; expected a YAML file")
    return words


def _check_file(path: Path, kind: type) -> None:
    """Names what is wrong with the file before anything else happens."""
    import yaml

    if not path.is_file():
        raise LasdError(f"--config {path} is not a file; give a YAML file of settings")
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())
        raise LasdError(f"--config {path} cannot be read as YAML ({reason}); write one `name: value` a line") from error
    if not isinstance(content, dict):
        raise LasdError(f"--config {path} holds a {type(content).__name__}; write one `name: value` a line")
    for name in content:
        if name not in _names(kind):
            raise LasdError(f"--config {path}: {_unknown_text(str(name), kind)}")


def check_values(settings: Any) -> None:
    """Names the first value of a wrong type: YAML values reach the dataclass unconverted, and would fail far away."""
    hints = typing.get_type_hints(type(settings))
    for item in dataclasses.fields(settings):
        value, hint = getattr(settings, item.name), hints[item.name]
        kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
        allowed = tuple(typing.get_origin(kind) or kind for kind in kinds)
        if float in allowed and type(value) is int:
            object.__setattr__(settings, item.name, float(value))
        elif not isinstance(value, allowed) or (isinstance(value, bool) and bool not in allowed):
            names = " or ".join("null" if kind is type(None) else kind.__name__ for kind in allowed)
            raise LasdError(f"{item.name} is {value!r}, expected {names}: change it (flag or --config file)")
        choices = item.metadata.get("choices")
        if choices and value not in choices:
            raise LasdError(f"{item.name} is {value!r}; expected one of {', '.join(choices)}: change it")
