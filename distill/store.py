"""Append-only output that survives `kill -9`: what is whole is kept, what is torn is dropped at the next start.

A conversation counts as done when all its records stand in a data shard and its readable copy stands in the twin shard;
recovery cuts both files back to their longest common beginning. Each rank writes its own shards.
"""

import json
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lasd.conversations import DistilledRecord
from lasd.conversations.distilled import ASIDE_DIR, DATA_DIR, READABLE_DIR
from lasd.errors import LasdError

logger = logging.getLogger(__name__)

SYNC_CONVERSATIONS = 32
SYNC_SECONDS = 5.0


class ShardFile:
    """One append-only file. A line reaches the kernel at once (a killed process loses none) and the disk at `sync`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def write(self, rows: list[dict[str, Any]]) -> None:
        """Appends JSON lines in one go. On a full disk a torn line may remain; recovery drops it."""
        data = "".join(json.dumps(row, ensure_ascii=False, separators=(",", ":")) + "\n" for row in rows).encode()
        while data:
            try:
                data = data[os.write(self._fd, data) :]
            except OSError as error:
                error.filename = str(self.path)
                raise

    def sync(self) -> None:
        """Waits until the disk has it."""
        os.fsync(self._fd)

    def close(self) -> None:
        """Syncs and closes."""
        self.sync()
        os.close(self._fd)


class Store:
    """The output folder as one rank sees it.

    Args:
        output: the folder; created if missing.
        rank: this process's number among `world`.
        world: number of processes.
        shard_conversations: a new shard begins after this many.
    """

    def __init__(self, output: Path, rank: int = 0, world: int = 1, shard_conversations: int = 5000) -> None:
        self.output, self.rank, self.world = output, rank, world
        self.shard_conversations = shard_conversations
        for name in (DATA_DIR, READABLE_DIR, ASIDE_DIR):
            (output / name).mkdir(parents=True, exist_ok=True)
        self._lock = _lock(output / f".rank-{rank:05d}.lock")
        self._recover()
        self._number, self._in_shard = self._last_shard()
        self._data = ShardFile(self._path(DATA_DIR))
        self._readable = ShardFile(self._path(READABLE_DIR))
        self._aside = ShardFile(output / ASIDE_DIR / f"shard-{rank:05d}-00000.jsonl")
        self._unsynced, self._synced_at = 0, time.monotonic()

    def write(self, conversation_id: str, records: list[DistilledRecord], readable: list[dict[str, str]]) -> None:
        """Stores a finished conversation: its records, then its readable copy."""
        if self._in_shard >= self.shard_conversations:
            self._next_shard()
        self._data.write(
            [
                {**record.to_dict(), "conversation": conversation_id, "part": part, "parts": len(records)}
                for part, record in enumerate(records)
            ]
        )
        self._readable.write([{"id": conversation_id, "conversations": readable}])
        self._in_shard += 1
        self._sync_now_and_then()

    def set_aside(self, conversation_id: str, reason: str) -> None:
        """Stores that a conversation has no usable answer."""
        self._aside.write([{"id": conversation_id, "reason": reason}])
        self._sync_now_and_then()

    def close(self) -> None:
        """Syncs and closes all files and gives the lock back."""
        for file in (self._data, self._readable, self._aside):
            file.close()
        os.close(self._lock)

    def _sync_now_and_then(self) -> None:
        self._unsynced += 1
        now = time.monotonic()
        if self._unsynced >= SYNC_CONVERSATIONS or now - self._synced_at > SYNC_SECONDS:
            for file in (self._data, self._readable, self._aside):
                file.sync()
            self._unsynced, self._synced_at = 0, now

    def _path(self, folder: str) -> Path:
        return self.output / folder / f"shard-{self.rank:05d}-{self._number:05d}.jsonl"

    def _next_shard(self) -> None:
        self._data.close()
        self._readable.close()
        self._number, self._in_shard = self._number + 1, 0
        self._data, self._readable = ShardFile(self._path(DATA_DIR)), ShardFile(self._path(READABLE_DIR))

    def _last_shard(self) -> tuple[int, int]:
        own = sorted((self.output / READABLE_DIR).glob(f"shard-{self.rank:05d}-*.jsonl"))
        if not own:
            return 0, 0
        return int(own[-1].stem.rsplit("-", 1)[1]), sum(1 for _ in own[-1].open("rb"))

    def _recover(self) -> None:
        """Cuts torn ends off this rank's shards; rank 0 also does it for ranks that no longer exist."""
        for file in sorted((self.output / DATA_DIR).glob("shard-*.jsonl")):
            owner = int(file.stem.split("-")[1])
            if owner == self.rank or (self.rank == 0 and owner >= self.world):
                recover_pair(file, self.output / READABLE_DIR / file.name)
        for file in (self.output / ASIDE_DIR).glob(f"shard-{self.rank:05d}-*.jsonl"):
            whole = sum(len(line) for line, _ in _whole_lines(file))
            _cut(file, whole)


def recover_pair(data: Path, readable: Path) -> None:
    """Cuts a data shard and its readable twin to the conversations that are whole in both."""
    data_ends = _conversation_ends(data)
    readable_ends = [(row["id"], end) for row, end in _rows_with_ends(readable)]
    data_size = readable_size = 0
    for (data_id, data_end), (readable_id, readable_end) in zip(data_ends, readable_ends, strict=False):
        if data_id != readable_id:
            raise LasdError(
                f"{data} and {readable} hold different conversations ({data_id} and {readable_id}): "
                "they were changed by hand; move the folder away and distil again"
            )
        data_size, readable_size = data_end, readable_end
    _cut(data, data_size)
    _cut(readable, readable_size)


def finished_ids(output: Path) -> tuple[set[str], dict[str, str]]:
    """(ids of stored conversations, id -> reason of those set aside), from all ranks' shards; torn ends are ignored."""
    done: set[str] = set()
    for file in (output / DATA_DIR).glob("shard-*.jsonl"):
        in_data = {conversation_id for conversation_id, _ in _conversation_ends(file)}
        done |= in_data & {row["id"] for row, _ in _rows_with_ends(output / READABLE_DIR / file.name)}
    aside = {
        row["id"]: row["reason"]
        for file in (output / ASIDE_DIR).glob("shard-*.jsonl")
        for row, _ in _rows_with_ends(file)
    }
    return done, aside


def _conversation_ends(data: Path) -> list[tuple[str, int]]:
    """(conversation id, byte behind its last record) of each conversation whose records are all there."""
    return [(row["conversation"], end) for row, end in _rows_with_ends(data) if row["part"] == row["parts"] - 1]


def _rows_with_ends(path: Path) -> Iterator[tuple[dict[str, Any], int]]:
    for line, end in _whole_lines(path):
        try:
            yield json.loads(line), end
        except ValueError:
            logger.warning("%s is damaged at byte %d: what follows is dropped and made again", path, end - len(line))
            return


def _whole_lines(path: Path) -> Iterator[tuple[bytes, int]]:
    """(line, byte behind it) of each line that ends with a newline; none if the file does not exist."""
    if not path.exists():
        return
    end = 0
    with path.open("rb") as file:
        for line in file:
            if not line.endswith(b"\n"):
                return
            end += len(line)
            yield line, end


def _cut(path: Path, size: int) -> None:
    if path.exists() and path.stat().st_size > size:
        logger.info("%s: %d bytes of an unfinished write dropped", path, path.stat().st_size - size)
        os.truncate(path, size)


def _lock(path: Path) -> int:
    """Holds the file as long as this process lives, so that two runs never write the same shards."""
    import fcntl

    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        raise LasdError(
            f"{path.parent} is being written by another process: wait for it, or give another --output"
        ) from error
    return descriptor
