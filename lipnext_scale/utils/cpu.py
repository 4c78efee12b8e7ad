"""What this process may use of its machine, and settings that make a CPU faster.

The commands make them, not an import.
"""

import ctypes
from collections.abc import Mapping
from pathlib import Path

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGEST = 2**31 - 1


def keep_freed_memory() -> None:
    """Let glibc keep freed memory instead of giving it back to the system.

    A step frees its activations and the next asks for the same amount again. By default glibc
    returns large blocks to the kernel, which clears every page anew: `python -m benchmarks.block`.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:  # another C library than glibc
        return
    mallopt(_M_MMAP_THRESHOLD, 1 << 30)
    mallopt(_M_TRIM_THRESHOLD, _LARGEST)


def step_threads(own: int, of_node: int, ranks: int, environment: Mapping[str, str]) -> int | None:
    """Threads for a step on the host; None: those that the user chose.

    own, of_node: cores that this rank and that all `ranks` of its node may use.
    Launchers set OMP_NUM_THREADS to 1 unless it is set; launch/shared marks that the user set it.
    """
    if "LIPNEXT_OMP_CHOSEN" in environment or environment.get("OMP_NUM_THREADS", "1") != "1":
        return None
    return max(1, min(own, of_node // ranks))


def memory_limit() -> tuple[int, int]:
    """(bytes of RAM that this process may use, bytes of these that are free)."""
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    known = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines}
    total, free = known["MemTotal"], known["MemAvailable"]
    for name in ("memory.max", "memory/memory.limit_in_bytes"):  # of cgroups 2 and 1
        path = Path("/sys/fs/cgroup") / name
        text = path.read_text(encoding="ascii").strip() if path.is_file() else "max"
        if text != "max":
            total = min(total, int(text))
    return total, min(total, free)
