"""Writing files so that nobody ever reads half of one."""

import hashlib
import os
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


@contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """Write aside; on success sync and rename, on any failure remove what was written."""
    aside = path.with_name(path.name + PARTIAL)
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
