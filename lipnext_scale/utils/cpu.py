"""Settings of this process that make a CPU faster. Made by the commands, not on import."""

import ctypes

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
