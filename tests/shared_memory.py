"""Shared memory that a process has, by the names that could outlive it."""

from pathlib import Path

_GONE = " (deleted)"


def mapped_names(process: int, still_there: bool = False) -> set[str]:
    """Files of /dev/shm that a process has mapped; still_there: those that have a name now."""
    lines = Path(f"/proc/{process}/maps").read_text().splitlines()
    files = {line.split(maxsplit=5)[5] for line in lines if " /dev/shm/" in line}
    if still_there:
        return {file for file in files if not file.endswith(_GONE)}
    return {file.removesuffix(_GONE) for file in files}
