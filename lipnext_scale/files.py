"""Writing files so that nobody ever reads half of one."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

PARTIAL = ".partial"


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
