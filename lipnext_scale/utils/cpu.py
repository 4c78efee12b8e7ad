"""Settings of this process that make a CPU faster. Made by the commands, not on import."""

import ctypes
import sys

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGEST = 2**31 - 1


def keep_freed_memory() -> None:
    """Let glibc keep freed memory instead of giving it back to the system.

    A step frees its activations and the next asks for the same amount again. By default glibc
    returns large blocks to the kernel, which clears every page anew: `python -m benchmarks.block`.
    """
    if not sys.platform.startswith("linux"):
        return
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:  # another C library than glibc
        return
    mallopt(_M_MMAP_THRESHOLD, 1 << 30)
    mallopt(_M_TRIM_THRESHOLD, _LARGEST)
