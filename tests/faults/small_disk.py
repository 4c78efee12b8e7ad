"""A disk that can be filled: a tmpfs of its own, where the system lets us mount one."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def mounted(place: Path, options: str) -> Iterator[bool]:
    """Whether a tmpfs with these options is at `place`, which exists."""
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place)]
    try:
        done = subprocess.run(command, capture_output=True).returncode == 0
    except FileNotFoundError:
        done = False
    try:
        yield done
    finally:
        if done:
            subprocess.run(["umount", "--lazy", str(place)], check=True)


def fill(file: Path) -> None:
    """Put all that is free into a file, beside what is in it already."""
    size = 1 << 20
    with file.open("ab", buffering=0) as stream:
        while size:
            try:
                stream.write(b"\0" * size)
            except OSError:
                size //= 2


def room_again(file: Path) -> None:
    with suppress(FileNotFoundError):
        file.unlink()
