"""Writing to disk all or nothing: a folder or a set of files is there whole, or not at all."""

import errno
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from lasd.errors import LasdError

FULL = (errno.ENOSPC, errno.EDQUOT)
FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST, errno.EISDIR)
Writer = Callable[[Path], None]


@contextmanager
def one_line_disk_errors(path: Path) -> Iterator[None]:
    """Turns a full disk or a folder that cannot be written to into a LasdError; `path` is what was being written."""
    try:
        yield
    except SafetensorError as error:
        if f"os error {errno.ENOSPC}" not in str(error):  # safetensors tells the errno in its text only
            raise
        raise _disk_error(path, errno.ENOSPC) from error
    except OSError as error:
        if error.errno not in (*FULL, *FORBIDDEN):
            raise
        raise _disk_error(path, error.errno) from error


def _disk_error(path: Path, code: int) -> LasdError:
    if code in FULL:
        expected, action = "room", "free some space and run the same command again; nothing half-written was kept"
    else:
        expected, action = "a folder open to writing", "pass another folder, or mend its permissions"
    return LasdError(f"cannot write {path} ({os.strerror(code)}); expected {expected}: {action}")


def sync(path: Path) -> None:
    """Waits until a file or a folder's list of names has reached the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def staged_folder(path: Path) -> Iterator[Path]:
    """Yields an empty folder beside `path`.

    On leaving, it is synced and renamed to `path`, or removed if something was raised.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent))
    try:
        yield staging
        for found in staging.rglob("*"):
            found.chmod(0o755 if found.is_dir() else 0o644)  # some writers make private files
            sync(found)
        staging.chmod(0o755)
        sync(staging)
        staging.rename(path)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    sync(path.parent)


def replace_files(folder: Path, writers: Mapping[str, Writer], first: Callable[[], None] | None = None) -> None:
    """Writes files (relative name -> writer) into a folder that exists: all beside their places, then renamed in order.

    `first` runs when everything is written, right before the renames.
    """
    staged: list[tuple[Path, Path]] = []
    try:
        for name, write in writers.items():
            final = folder / name
            final.parent.mkdir(exist_ok=True)
            staging = final.with_name(f".{final.name}.tmp")
            staged.append((staging, final))
            write(staging)
            staging.chmod(0o644)
            sync(staging)
        if first is not None:
            first()
        for staging, final in staged:
            staging.replace(final)
        for parent in {final.parent for _, final in staged}:
            sync(parent)
    finally:
        for staging, _ in staged:
            staging.unlink(missing_ok=True)
