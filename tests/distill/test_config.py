"""Flag over file over default; what is unknown or of the wrong type is one line."""

import sys
from pathlib import Path
from typing import Any

import pytest

from distill.config import parse_config
from lasd.errors import LasdError

pytest.importorskip("trl")
NEEDED = ["--model", "m", "--prompts", "p", "--output", "o"]


@pytest.fixture
def yaml_file(tmp_path: Path) -> Any:
    def write(text: str) -> str:
        path = tmp_path / "config.yaml"
        path.write_text(text)
        return str(path)

    return write


def test_defaults() -> None:
    config = parse_config(NEEDED)
    assert (config.temperature, config.multi_turn, config.limit) == (0.0, True, None)


def test_the_file_is_over_the_default_and_the_flag_over_the_file(yaml_file: Any) -> None:
    path = yaml_file("model: fromfile\nprompts: p\noutput: o\ntemperature: 1\nmax_new_tokens: 7\nexclude: [a, b]\n")
    config = parse_config(["--config", path, "--max_new_tokens", "9"])
    assert (config.model, config.temperature, config.max_new_tokens, config.exclude) == ("fromfile", 1.0, 9, ["a", "b"])
    assert parse_config([f"--config={path}"]).max_new_tokens == 7


def test_dashes_and_booleans() -> None:
    config = parse_config([*NEEDED, "--max-new-tokens", "5", "--multi_turn", "false", "--drop_truncated"])
    assert (config.max_new_tokens, config.multi_turn, config.drop_truncated) == (5, False, True)


def test_check_needs_no_model() -> None:
    assert parse_config(["--prompts", "p", "--check"]).model is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("batchsize: 3\n", "unknown setting batchsize .did you mean batch_size"),
        ("limit: 1.5\n", "limit is 1.5, expected int or null"),
        ("exclude: file.jsonl\n", "exclude is 'file.jsonl', expected list"),
        ("multi_turn: 1\n", "multi_turn is 1, expected bool"),
        ("html: strip\n", "html is 'strip'; expected one of auto, keep"),
        ("- 1\n", "holds a list"),
        ("a: [1\n", "cannot be read as YAML"),
    ],
)
def test_a_bad_file_is_one_line(yaml_file: Any, text: str, words: str) -> None:
    with pytest.raises(LasdError, match=words):
        parse_config([*NEEDED, "--config", yaml_file(text)])


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--bogus", "1"], "bogus"),
        (["--batch_size", "0"], "batch_size is 0, expected at least 1"),
        (["--limit", "x"], "limit"),
        (["--top_p", "1.5"], "top_p is 1.5"),
        (["--config", "nosuch.yaml"], "nosuch.yaml is not a file"),
    ],
)
def test_a_bad_flag_is_one_line(flags: list[str], words: str) -> None:
    with pytest.raises(LasdError, match=words):
        parse_config([*NEEDED, *flags])


def test_without_trl_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "trl", None)
    with pytest.raises(LasdError, match=r"lasd\[distill\]"):
        parse_config(NEEDED)
