"""What the kernel tells of a process: its children, and what it does with a signal."""

from contextlib import suppress
from pathlib import Path
from signal import Signals


def descendants(pid: int) -> list[int]:
    below = children(pid)
    return [*below, *(deeper for child in below for deeper in descendants(child))]


def children(pid: int) -> list[int]:
    found: list[int] = []
    with suppress(OSError):  # it has just ended
        for path in Path(f"/proc/{pid}/task").glob("*/children"):
            found += map(int, path.read_text().split())
    return found


def catches(pid: int, signal: Signals) -> bool:
    return _has(pid, "SigCgt", signal)


def ignores(pid: int, signal: Signals) -> bool:
    return _has(pid, "SigIgn", signal)


def _has(pid: int, mask: str, signal: Signals) -> bool:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    (signals,) = [line.split()[1] for line in lines if line.startswith(f"{mask}:")]
    return bool(int(signals, 16) >> (signal - 1) & 1)
