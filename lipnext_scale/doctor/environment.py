"""Python, packages, CPUs, memory, JPEG and FFCV. Imports nothing but Python's own at the top."""

import importlib
import importlib.metadata
import json
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lipnext_scale.doctor.report import Finding, ok, size, warn, wrong

DISTRIBUTION = "lipnext_scale"
OLDEST_PYTHON = (3, 10)
# What only whoever works on the package needs is not looked at; FFCV has a check of its own.
EXTRAS = ("accelerate", "deepspeed", "prep")
# What a distribution is imported as, where its name does not tell.
MODULES = {
    "pyyaml": "yaml",
    "pillow": "PIL",
    "opencv-python-headless": "cv2",
    "scikit-learn": "sklearn",
}
FFCV_PACKAGES = "g++ libopencv-dev libturbojpeg0-dev pkg-config"
# NCCL keeps some tens of MB for each process of a node there.
SHARED_MEMORY = 512e6
PATIENCE = 120  # seconds for an import on a busy machine
# Tells which of the modules cannot be imported, in the last line of its output.
_IMPORT_EACH = """
import gc, importlib, json, sys
gc.disable()
failures = {}
for module in sys.argv[1:]:
    try:
        importlib.import_module(module)
    except BaseException as error:
        why = f"{type(error).__name__}: {error}"
        failures[module] = why.strip().splitlines()[-1]
print()
print(json.dumps(failures))
"""


def python() -> Finding:
    version = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info < OLDEST_PYTHON:
        oldest = ".".join(map(str, OLDEST_PYTHON))
        return wrong("python", version, f"use Python {oldest} or newer: make PYTHON=python3.11 env")
    return ok("python", f"{version}, {sys.executable}")


def requirements() -> list[str]:
    """The package's own, as its pyproject.toml or its installation says: `name>=1; extra == "x"`.

    The file first: beside it an installation may be older.
    """
    source = Path(__file__).parents[2] / "pyproject.toml"
    reader = _toml_reader()
    if not source.is_file() or reader is None:
        return importlib.metadata.requires(DISTRIBUTION) or []
    project = reader.loads(source.read_text(encoding="utf-8"))["project"]
    found = list(project["dependencies"])
    for extra, needed in project["optional-dependencies"].items():
        found += [f'{requirement}; extra == "{extra}"' for requirement in needed]
    return found


def _toml_reader() -> Any:
    """Python's own since 3.11, before that the one that pip brings."""
    for name in ("tomllib", "pip._vendor.tomli"):
        try:
            return importlib.import_module(name)
        except ImportError:
            continue
    return None


def packages() -> list[Finding]:
    """Every package that is needed, and those that one may want."""
    looked_at = [
        (name, oldest, extra, installed(name))
        for name, oldest, extra in map(_parsed, requirements())
        if name != DISTRIBUTION and (not extra or extra in EXTRAS)
    ]
    modules = [_module(name) for name, _, _, version in looked_at if version]
    failures = import_failures([*modules, "ffcv"])
    findings: list[Finding] = []
    for name, oldest, extra, version in looked_at:
        failure = failures.get(_module(name), "")
        findings.append(_package(name, oldest, extra, version, failure))
    return [*findings, ffcv(failures.get("ffcv", ""))]


def installed(name: str) -> str:
    """The version of a distribution, "" if there is none."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _parsed(requirement: str) -> tuple[str, str, str]:
    """(name, oldest version, extra); those of the package are all of the form name>=version."""
    found = re.match(r"([\w.-]+)(?:\[[^]]*\])?\s*(?:>=\s*([\w.]+))?", requirement)
    assert found is not None, requirement
    extra = re.search(r"extra\s*==\s*[\"'](\w+)", requirement)
    return (
        found[1].replace("lipnext-scale", DISTRIBUTION),
        found[2] or "",
        extra[1] if extra else "",
    )


def _package(name: str, oldest: str, extra: str, version: str, failure: str) -> Finding:
    check, optional = f"package {name}", f"; optional ({extra})" if extra else ""
    complain = warn if extra else wrong
    install = f"pip install -c constraints.txt '{name}>={oldest}'"
    if not version:
        wanted = f"pip install -c constraints.txt '.[{extra}]', if you want it"
        return complain(check, f"not installed{optional}", wanted if extra else install)
    if _numbers(version) < _numbers(oldest):
        return complain(check, f"{version} is older than {oldest}{optional}", install)
    if failure:
        told = f"{version} is installed but cannot be imported: {failure}{optional}"
        again = f"pip install --force-reinstall --no-deps -c constraints.txt {name}"
        return complain(check, told, again)
    return ok(check, f"{version} (≥ {oldest}){optional}")


def _numbers(version: str) -> tuple[int, ...]:
    """1.10.0+cpu → (1, 10, 0), so that 1.10 is newer than 1.9."""
    return tuple(int(part) for part in re.findall(r"\d+", version.split("+")[0])[:3])


def _module(name: str) -> str:
    return MODULES.get(name.lower(), name)


def import_failures(modules: list[str]) -> dict[str, str]:
    """Of those that cannot be imported, why; another process tries, for one may crash.

    One for all: most of them import torch, which takes seconds. Only where it crashes, one each.
    """
    command = [sys.executable, "-c", _IMPORT_EACH, *modules]
    with suppress(subprocess.TimeoutExpired):
        tried = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
        if tried.returncode == 0:
            found: dict[str, str] = json.loads(tried.stdout.splitlines()[-1])
            return found
    failures = {module: _tried(f"import {module}") for module in modules}
    return {module: why for module, why in failures.items() if why}


def _tried(line: str) -> str:
    """Why Python did not come to the end of a line, "" if it did."""
    command = [sys.executable, "-c", line]
    try:
        tried = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        return f"no end after {PATIENCE} s"
    if tried.returncode == 0:
        return ""
    said = tried.stderr.strip().splitlines()
    return said[-1] if said else f"it ended with {tried.returncode}"


def cpus(ranks_here: int) -> Finding:
    count = len(os.sched_getaffinity(0))
    told = os.environ.get("OMP_NUM_THREADS")
    if told is not None and not told.isdigit():
        return wrong("cpu", f"OMP_NUM_THREADS = {told!r}", "export OMP_NUM_THREADS=1")
    threads = int(told) if told else count
    text = f"{count} for {ranks_here} process(es) with {threads} thread(s) each"
    if threads * ranks_here > count and ranks_here > 1:
        best = max(1, count // ranks_here)
        return warn(
            "cpu", f"{text}: they get in each other's way", f"export OMP_NUM_THREADS={best}"
        )
    return ok("cpu", text + ("" if told else "; OMP_NUM_THREADS is not set"))


def memory_limit() -> tuple[int, int]:
    """(bytes of RAM that this process may use, of these those that are free)."""
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    known = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines}
    total, free = known["MemTotal"], known["MemAvailable"]
    for name in ("memory.max", "memory/memory.limit_in_bytes"):  # of cgroups 2 and 1
        path = Path("/sys/fs/cgroup") / name
        text = path.read_text(encoding="ascii").strip() if path.is_file() else "max"
        if text != "max":
            total = min(total, int(text))
    return total, min(total, free)


def memory() -> Finding:
    total, free = memory_limit()
    return ok("memory", f"{size(free)} of {size(total)} free")


def shared_memory(directory: str = "/dev/shm") -> Finding:
    """Worker processes have locks there, NCCL its buffers between the GPUs of a node."""
    mend = "docker run --shm-size=2g or --ipc=host; elsewhere mount -o remount,size=2G /dev/shm"
    try:
        multiprocessing.get_context("fork").Lock()
        stat = os.statvfs(directory)
    except OSError as error:
        why = f"no lock can be made in {directory}: {error.strerror}"
        return wrong("shared memory", f"{why}; data.workers needs them", mend)
    free = stat.f_bavail * stat.f_frsize
    if free < SHARED_MEMORY:
        text = f"{size(free)} free in {directory}: several GPUs of a node may find too little"
        return warn("shared memory", text, mend)
    return ok("shared memory", f"{size(free)} free in {directory}")


def jpeg() -> Finding:
    """libjpeg-turbo comes with simplejpeg; an image goes through it and back."""
    import numpy as np
    import simplejpeg

    pixels = np.full((16, 16, 3), 128, dtype=np.uint8)
    found = simplejpeg.decode_jpeg(simplejpeg.encode_jpeg(pixels, quality=95))
    if found.shape != pixels.shape or int(np.abs(found.astype(int) - 128).max()) > 8:
        mend = "pip install --force-reinstall --no-deps -c constraints.txt simplejpeg"
        return wrong("libjpeg-turbo", "simplejpeg decodes to other pixels", mend)
    return ok("libjpeg-turbo", f"decodes (simplejpeg {importlib.metadata.version('simplejpeg')})")


def ffcv(failure: str) -> Finding:
    """Optional; compiled where it is installed, for which Debian packages must be there.

    failure: of its import.
    """
    if not failure:
        return ok("ffcv", "imports; optional")
    try:
        libraries = subprocess.run(["pkg-config", "--exists", "opencv4", "libturbojpeg"])
        compiles = libraries.returncode == 0
    except FileNotFoundError:
        compiles = False
    mend = "pip install -c constraints.txt '.[ffcv]', if you want to write .beton files"
    if not compiles:
        mend = f"apt-get install {FFCV_PACKAGES}; {mend}"
    return warn("ffcv", f"{failure}; optional", mend)


# --------------------------------------------------------------------------------------------------
# GPUs, and NCCL between them.

if TYPE_CHECKING:
    from lipnext_scale.recipe import Recipe

CUDA_BUILD = (
    "pip install -c constraints.txt --force-reinstall --no-deps torch from an index of CUDA"
)


def gpus(ranks_here: int, recipe: "Recipe | None" = None) -> list[Finding]:
    """What torch sees; where it sees none, whether there might be some."""
    import torch

    if not torch.cuda.is_available():
        return [no_gpu(torch.version.cuda, recipe)]
    count = torch.cuda.device_count()
    findings = [_gpu(index) for index in range(count)]
    wants_cpu = recipe is not None and recipe.run.device == "cpu"
    if ranks_here > count and not wants_cpu:
        text = f"{count} GPU(s) for {ranks_here} processes of this node"
        findings.append(wrong("gpu", text, f"--nproc-per-node {count}, or run.device=cpu"))
    if recipe is not None and recipe.parallel.precision == "bf16":
        if not wants_cpu and not torch.cuda.is_bf16_supported(including_emulation=False):
            text = "parallel.precision = 'bf16', which these GPUs do not compute with"
            findings.append(wrong("gpu bf16", text, "parallel.precision=fp32"))
    return findings


def _gpu(index: int) -> Finding:
    import torch

    facts = torch.cuda.get_device_properties(index)
    free, total = torch.cuda.mem_get_info(index)
    can = "bf16" if facts.major >= 8 else "no bf16"
    text = f"{facts.name}, {size(free)} of {size(total)} free, sm_{facts.major}{facts.minor}, {can}"
    if free < 0.9 * total:
        return warn(f"gpu {index}", f"{text}: somebody uses it", "nvidia-smi tells who")
    return ok(f"gpu {index}", f"{text}, CUDA {torch.version.cuda}")


def no_gpu(built_for: str | None, recipe: "Recipe | None") -> Finding:
    """Wrong only where one is there or asked for: a CPU alone is slow, not wrong."""
    from lipnext_scale.parallel.processes import gpu_is_there

    there = gpu_is_there() or shutil.which("nvidia-smi")
    if there and built_for is None:
        return wrong("gpu", "there is one, but torch is built for CPUs", CUDA_BUILD)
    if there:
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
        told = "" if hidden is None else f"; CUDA_VISIBLE_DEVICES = {hidden!r}"
        mend = f"a driver for CUDA {built_for} or newer, or a build of torch for an older one"
        return wrong("gpu", f"there is one, but torch cannot use it{told}", f"nvidia-smi; {mend}")
    build = f"torch is built for CUDA {built_for}" if built_for else "torch is built for CPUs"
    if recipe is not None and recipe.run.device == "cuda":
        text = f"run.device = 'cuda', and there is none; {build}"
        return wrong("gpu", text, "run.device=auto, or docker run --gpus all, srun --gpus-per-node")
    mend = "docker run --gpus all, srun --gpus-per-node, if there should be one"
    return warn("gpu", f"none; runs use the CPU; {build}", mend)


def nccl() -> Finding:
    import torch
    import torch.distributed as dist

    if not dist.is_nccl_available():
        if torch.cuda.is_available():
            return wrong("nccl", "not in this build of torch: GPUs cannot talk", CUDA_BUILD)
        return ok("nccl", "not in this build of torch; CPUs use gloo")
    version = ".".join(map(str, torch.cuda.nccl.version()))
    return ok("nccl", f"{version}" + ("" if torch.cuda.is_available() else "; no GPU to try it on"))
