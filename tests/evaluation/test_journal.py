"""The journal: what a kill leaves behind is taken over, anything else is refused or started anew."""

from pathlib import Path

import pytest

from lasd.errors import LasdError
from lasd.evaluation.journal import Journal, write_text_atomic

SAME = {"model": "m", "tokens": 5, "environment": {"threads": 2}}
OTHER = {"model": "m", "tokens": 4, "environment": {"threads": 1}}


def test_rows_are_taken_over_by_the_same_settings(tmp_path: Path) -> None:
    Journal(tmp_path / "j", SAME).append("0", {"a": 1})
    assert Journal(tmp_path / "j", SAME).rows == {"0": {"a": 1}}


def test_rows_of_other_settings_are_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    Journal(tmp_path / "j", OTHER).append("0", {"a": 1})
    with pytest.raises(
        LasdError, match=r"other settings \(tokens 4 there, 5 now; threads 1 there, 2 now\): .* remove the file"
    ):
        Journal(tmp_path / "j", SAME)


def test_a_line_that_was_cut_off_is_dropped_and_written_again(tmp_path: Path) -> None:
    path = tmp_path / "j"
    Journal(path, SAME).append("0", {"a": 1})
    with path.open("a") as file:
        file.write('{"key": "1", "ro')
    journal = Journal(path, SAME)
    journal.append("1", {"a": 2})
    assert Journal(path, SAME).rows == {"0": {"a": 1}, "1": {"a": 2}}


def test_a_complete_journal_is_started_anew(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j", OTHER)
    journal.append("0", {"a": 1})
    journal.complete()
    assert Journal(tmp_path / "j", SAME).rows == {}


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "j").write_text("my notes\n")
    with pytest.raises(LasdError, match="is not a journal"):
        Journal(tmp_path / "j", SAME)


def test_a_place_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(LasdError, match=r"cannot write .*: give --output a path"):
        Journal(tmp_path / "file" / "j", SAME)


def test_an_atomic_write_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_text_atomic(tmp_path / "r.json", "old")
    monkeypatch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space"):
        write_text_atomic(tmp_path / "r.json", "new")
    assert [path.name for path in tmp_path.iterdir()] == ["r.json"]
    assert (tmp_path / "r.json").read_text() == "old"
