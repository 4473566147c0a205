"""What is whole survives a kill at any byte; what is torn is dropped and made again."""

import json
from pathlib import Path

import pytest

from distill import store as store_module
from distill.store import Store, finished_ids
from lasd.conversations import DistilledRecord
from lasd.errors import LasdError


def parts(name: str, count: int = 1) -> list[DistilledRecord]:
    return [DistilledRecord(f"{name}-{part}", [1, 2, part], [0, 1, 1], 1, None, ["eos"]) for part in range(count)]


def fill(folder: Path, names: str, count: int = 1) -> None:
    store = Store(folder)
    for name in names:
        store.write(name, parts(name, count), [{"from": "human", "value": name}])
    store.close()


def lines(folder: Path, kind: str, shard: str = "shard-00000-00000") -> list[str]:
    return (folder / kind / f"{shard}.jsonl").read_text().splitlines()


@pytest.mark.parametrize("kind", ["data", "sharegpt"])
@pytest.mark.parametrize("bytes_cut", [1, 5, 60, 130])
def test_a_torn_end_is_dropped_in_both_files(tmp_path: Path, kind: str, bytes_cut: int) -> None:
    fill(tmp_path, "abcdefgh", count=2)
    file = tmp_path / kind / "shard-00000-00000.jsonl"
    file.write_bytes(file.read_bytes()[:-bytes_cut])
    before, _ = finished_ids(tmp_path)
    Store(tmp_path).close()
    after, _ = finished_ids(tmp_path)
    assert before == after
    assert 0 < len(after) < 8
    assert len(lines(tmp_path, "data")) == 2 * len(after)
    assert len(lines(tmp_path, "sharegpt")) == len(after)


def test_writing_goes_on_behind_what_was_recovered(tmp_path: Path) -> None:
    fill(tmp_path, "abc")
    with (tmp_path / "data" / "shard-00000-00000.jsonl").open("ab") as file:
        file.write(b'{"id": "d", "inp')
    fill(tmp_path, "d")
    assert [json.loads(line)["conversation"] for line in lines(tmp_path, "data")] == list("abcd")


def test_a_conversation_with_half_of_its_records_is_not_done(tmp_path: Path) -> None:
    fill(tmp_path, "ab", count=3)
    file = tmp_path / "data" / "shard-00000-00000.jsonl"
    file.write_text("".join(line + "\n" for line in lines(tmp_path, "data")[:5]))
    assert finished_ids(tmp_path)[0] == {"a"}


def test_verdicts_are_kept_and_torn_ones_dropped(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.set_aside("x", "empty_answer")
    store.set_aside("y", "answer_cut")
    store.close()
    file = tmp_path / "set_aside" / "shard-00000-00000.jsonl"
    file.write_bytes(file.read_bytes()[:-4])
    Store(tmp_path).close()
    assert finished_ids(tmp_path)[1] == {"x": "empty_answer"}
    assert file.read_bytes().endswith(b"\n")


def test_a_new_shard_begins_when_one_is_full(tmp_path: Path) -> None:
    store = Store(tmp_path, shard_conversations=2)
    for name in "abcde":
        store.write(name, parts(name), [])
    store.close()
    assert sorted(path.name for path in (tmp_path / "data").iterdir()) == [
        f"shard-00000-0000{n}.jsonl" for n in range(3)
    ]
    store = Store(tmp_path, shard_conversations=2)
    store.write("f", parts("f"), [])
    store.close()
    assert len(lines(tmp_path, "data", "shard-00000-00002")) == 2


def test_each_rank_has_its_own_shards_and_all_see_what_is_done(tmp_path: Path) -> None:
    stores = [Store(tmp_path, rank, 2) for rank in range(2)]
    stores[0].write("a", parts("a"), [])
    stores[1].write("b", parts("b"), [])
    for store in stores:
        store.close()
    assert finished_ids(tmp_path)[0] == {"a", "b"}
    assert len(lines(tmp_path, "data", "shard-00001-00000")) == 1


def test_rank_0_mends_the_shards_of_ranks_that_are_gone(tmp_path: Path) -> None:
    store = Store(tmp_path, 1, 2)
    store.write("b", parts("b"), [])
    store.close()
    file = tmp_path / "data" / "shard-00001-00000.jsonl"
    file.write_bytes(file.read_bytes() + b'{"torn')
    Store(tmp_path, 0, 1).close()
    assert file.read_bytes().endswith(b"\n")


def test_two_processes_cannot_write_the_same_shards(tmp_path: Path) -> None:
    first = Store(tmp_path)
    with pytest.raises(LasdError, match="another process"):
        Store(tmp_path)
    first.close()
    Store(tmp_path).close()


def test_files_that_were_mixed_up_are_refused(tmp_path: Path) -> None:
    fill(tmp_path, "ab")
    file = tmp_path / "sharegpt" / "shard-00000-00000.jsonl"
    file.write_text("".join(line + "\n" for line in lines(tmp_path, "sharegpt")[::-1]))
    with pytest.raises(LasdError, match="different conversations"):
        Store(tmp_path)


def test_a_short_write_is_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = store_module.os.write
    monkeypatch.setattr(store_module.os, "write", lambda fd, data: real(fd, data[:7]))
    fill(tmp_path, "ab")
    assert finished_ids(tmp_path)[0] == {"a", "b"}
