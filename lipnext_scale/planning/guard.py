"""Builds guard.cpp once and loads it before torch, which asks for its hooks once."""

import ctypes
import hashlib
import importlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

SOURCE = Path(__file__).with_name("guard.cpp")


def missing() -> str:
    """Why no walk is possible here; "" if one is."""
    return "" if shutil.which("g++") else "walks need g++, which builds a device that is not there"


def load() -> None:
    """Import torch with it, in a process that has not yet."""
    assert "torch" not in sys.modules, "the guard must be there before torch"
    library, torch = build(), _torch()
    # The guard's symbols are in torch's libraries, which need the OpenMP that torch brings along.
    needed = [*sorted(torch.glob("lib/libgomp*")), torch / "lib/libc10.so"]
    for file in [*needed, torch / "lib/libtorch_cpu.so"]:
        ctypes.CDLL(str(file), mode=ctypes.RTLD_GLOBAL)
    loaded = ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    importlib.import_module("torch")
    loaded.use_absent_device()


def build() -> Path:
    """The library, which is kept for the next process."""
    torch = _torch()
    key = hashlib.sha256(SOURCE.read_bytes() + version("torch").encode()).hexdigest()[:16]
    cache = Path(tempfile.gettempdir()) / f"lipnext_walk_{os.getuid()}"
    library = cache / f"guard_{key}.so"
    if library.exists():
        return library
    cache.mkdir(mode=0o700, exist_ok=True)
    aside = library.with_suffix(f".{os.getpid()}")  # another process may build it too
    includes = [torch / "include", sysconfig.get_path("include")]
    command = ["g++", "-std=c++20", "-shared", "-fPIC", str(SOURCE), "-o", str(aside)]
    command += [f"-I{path}" for path in includes]
    command += [f"-L{torch / 'lib'}", "-lc10", "-ltorch_cpu"]
    subprocess.run(command, check=True)
    aside.replace(library)
    return library


def _torch() -> Path:
    spec = find_spec("torch")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent
