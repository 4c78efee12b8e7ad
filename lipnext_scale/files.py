"""Writing files so that nobody ever reads half of one."""

import errno
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

PARTIAL = ".partial"
_CHUNK = 1 << 22


def file_sha256(path: str | Path, advance: Callable[[int], None] = lambda _bytes: None) -> str:
    """The sha256 of a file; `advance` hears of every part that was read."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            advance(len(chunk))
    return digest.hexdigest()


def file_stamp(path: str | Path, sha256: str) -> str:
    """What a file that was found to have this sha256 is known by.

    Another file, or one that was written to, has another: also on another node, where a copy has
    the path, the size and, as copies are given it, the time of writing, but not that of its making.
    """
    facts = os.stat(path)
    times = f"{facts.st_mtime_ns} {facts.st_ctime_ns}"
    return f"{os.path.abspath(path)} {facts.st_size} {times} {sha256}"


@contextmanager
def atomic_file(path: Path, writer: str = "") -> Iterator[BinaryIO]:
    """Write aside; on success sync and rename, on any failure remove what was written.

    writer: goes into the name aside, where others may write the same file at the same time.
    """
    aside = path.with_name(path.name + (writer and f".{writer}") + PARTIAL)
    try:
        with aside.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise


def write_atomically(path: Path, content: bytes) -> None:
    """Readers see the old file or the whole new one."""
    with atomic_file(path) as file:
        file.write(content)


def sync_file(path: Path) -> None:
    """Put what others have written into a file, and have closed, on the disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def free_space(path: Path) -> str:
    """What the disk of a path, which need not exist yet, has left."""
    return f"{shutil.disk_usage(nearest_existing(path)).free / 1e6:.1f} MB"


def nearest_existing(path: Path) -> Path:
    """The path, or the nearest directory above it that is there."""
    path = path.absolute()
    return next(place for place in (path, *path.parents) if place.exists())


def os_error_in_words(error: OSError, directory: Path) -> str:
    """Which file, and why, in a line; where the disk is full, what is left of it.

    directory: what we write to, and so what is meant where a disk is full and no file is named.
    """
    if error.errno is None:  # a data worker's: torch makes it anew, of the worker's traceback
        return (str(error).strip() or type(error).__name__).splitlines()[-1]
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        left = f"({free_space(directory)} are free on {directory})"
        return f"{error.filename or directory}: {error.strerror} {left}"
    return f"{error.filename}: {error.strerror}" if error.filename else str(error.strerror)
