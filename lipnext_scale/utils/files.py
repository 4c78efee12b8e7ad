"""Writing files so that a reader never sees half of one; hashes, free space, errors in words."""

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
    """The sha256 of a file; `advance` is called with the size of every part that was read."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            advance(len(chunk))
    return digest.hexdigest()


def file_stamp(path: str | Path, sha256: str) -> str:
    """Identifies a file that was found to have this sha256.

    Another file, or one that was written to, has another stamp. So has a copy on another node,
    which may have the same path, size and mtime, but not the same ctime.
    """
    facts = os.stat(path)
    times = f"{facts.st_mtime_ns} {facts.st_ctime_ns}"
    return f"{os.path.abspath(path)} {facts.st_size} {times} {sha256}"


@contextmanager
def atomic_file(path: Path, writer: str = "") -> Iterator[BinaryIO]:
    """Write to a temporary name; on success sync and rename, on failure remove it.

    writer: part of the temporary name, where several may write the same file at the same time.
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
    """Readers see the old file or the complete new one."""
    with atomic_file(path) as file:
        file.write(content)


def free_bytes(path: Path) -> int:
    """What the disk of a path, which need not exist yet, has left."""
    return shutil.disk_usage(nearest_existing(path)).free


def free_space(path: Path) -> str:
    return f"{free_bytes(path) / 1e6:.1f} MB"


def nearest_existing(path: Path) -> Path:
    """The path, or the nearest directory above it that is there."""
    path = path.absolute()
    return next(place for place in (path, *path.parents) if place.exists())


def os_error_in_words(error: OSError, directory: Path) -> str:
    """Which file and why, in a line; where the disk is full, its free space.

    directory: where we write, named where a disk is full and the error names no file.
    """
    if error.errno is None:  # of a data worker: torch rebuilds it from the worker's traceback
        return (str(error).strip() or type(error).__name__).splitlines()[-1]
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        left = f"({free_space(directory)} are free on {directory})"
        return f"{error.filename or directory}: {error.strerror} {left}"
    return f"{error.filename}: {error.strerror}" if error.filename else str(error.strerror)
