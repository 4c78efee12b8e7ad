"""Python, packages, CPUs, memory and GPUs. Imports no other package at the top."""

import importlib.metadata
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress

from lipnext_scale.checks import Finding, ok, size, warn, wrong
from lipnext_scale.utils.cpu import memory_limit

DISTRIBUTION = "lipnext_scale"
EXTRAS = ("accelerate", "deepspeed", "ffcv", "prep")  # not those of the package's developers
# The module of a distribution, if the names differ.
MODULES = {
    "pyyaml": "yaml",
    "pillow": "PIL",
    "opencv-python-headless": "cv2",
    "scikit-learn": "sklearn",
}
# NCCL keeps some tens of MB for each process of a node there.
SHARED_MEMORY = 512e6
# NVIDIA's oldest driver for each major version of CUDA ("Minor Version Compatibility").
DRIVERS = {11: 450, 12: 525, 13: 580}


def packages() -> list[Finding]:
    """Every package that is needed, and the optional ones."""
    try:
        requirements = importlib.metadata.requires(DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        fix = "pip install -c constraints.txt -e ."
        return [warn("packages", f"{DISTRIBUTION} is not installed: versions are not known", fix)]
    findings: list[Finding] = []
    there: dict[bool, list[str]] = {False: [], True: []}  # whether optional → names
    for name, oldest, extra in map(parsed, requirements):
        if name == DISTRIBUTION or (extra and extra not in EXTRAS):
            continue
        version = ""
        with suppress(importlib.metadata.PackageNotFoundError):
            version = importlib.metadata.version(name)
            there[bool(extra)].append(name)
        findings.append(package(name, oldest, extra, version))
    findings.append(imports("imports of needed packages", there[False], wrong))
    findings.append(imports("imports of optional packages", there[True], warn))
    return findings


def parsed(requirement: str) -> tuple[str, str, str]:
    """(name, oldest version, extra); those of the package are all of the form name>=version."""
    found = re.match(r"([\w.-]+)(?:\[[^]]*\])?\s*(?:>=\s*([\w.]+))?", requirement)
    assert found is not None, requirement
    extra = re.search(r"extra\s*==\s*[\"'](\w+)", requirement)
    name = found[1].replace("lipnext-scale", DISTRIBUTION)
    return name, found[2] or "", extra[1] if extra else ""


def package(name: str, oldest: str, extra: str, version: str) -> Finding:
    """version: what is installed, empty if it is not."""
    check, optional = f"package {name}", f"; optional ({extra})" if extra else ""
    fix = f"pip install '{name}>={oldest}'"
    if version and _numbers(version) >= _numbers(oldest):
        return ok(check, f"{version} (≥ {oldest}){optional}")
    if not version and extra:
        fix = f"pip install '{DISTRIBUTION}[{extra}]', if you want it"
    text = f"{version} is older than {oldest}" if version else "not installed"
    return (warn if extra else wrong)(check, text + optional, fix)


def _numbers(version: str) -> tuple[int, ...]:
    """1.10.0+cpu → (1, 10, 0), so that 1.10 is newer than 1.9."""
    return tuple(int(part) for part in re.findall(r"\d+", version.split("+")[0])[:3])


def imports(check: str, names: list[str], complain: Callable[..., Finding]) -> Finding:
    """All in one other process: most of them import torch, and one may crash."""
    modules = [MODULES.get(name.lower(), name) for name in names]
    command = [sys.executable, "-c", "import " + ", ".join(modules)]
    tried = subprocess.run(command, capture_output=True, text=True)
    if tried.returncode == 0:
        return ok(check, ", ".join(modules))
    lines = tried.stderr.strip().splitlines() or [f"exit code {tried.returncode}"]
    fix = "pip install --force-reinstall --no-deps PACKAGE"
    return complain(check, lines[-1], fix)


def cpus(ranks_here: int) -> Finding:
    count, given = len(os.sched_getaffinity(0)), os.environ.get("OMP_NUM_THREADS", "")
    threads = int(given) if given.isdigit() else count
    text = f"{count} for {ranks_here} process(es) with {threads} thread(s) each"
    if ranks_here > 1 and threads * ranks_here > count:
        return warn("cpu", text, f"export OMP_NUM_THREADS={max(1, count // ranks_here)}")
    return ok("cpu", text)


def memory() -> str:
    total, free = memory_limit()
    return f"{size(free)} of {size(total)} free"


def shared_memory(directory: str = "/dev/shm") -> Finding:
    """Worker processes have locks there, NCCL its buffers between the GPUs of a node."""
    fix = "docker run --shm-size=2g or --ipc=host; elsewhere mount -o remount,size=2G /dev/shm"
    try:
        multiprocessing.get_context("fork").Lock()
        stat = os.statvfs(directory)
    except OSError as error:
        text = f"no lock can be made in {directory}: {error.strerror}; data.workers needs them"
        return wrong("shared memory", text, fix)
    free = stat.f_bavail * stat.f_frsize
    text = f"{size(free)} free in {directory}"
    if free < SHARED_MEMORY:
        return warn("shared memory", f"{text}: may be too little for NCCL", fix)
    return ok("shared memory", text)


def ask_driver() -> subprocess.CompletedProcess[str] | None:
    """Its version, by nvidia-smi if that is there."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    if shutil.which(command[0]) is None:
        return None
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def driver() -> list[Finding]:
    """NVIDIA's against the CUDA of torch; nothing where one of them is not there."""
    import torch

    if not torch.version.cuda or (asked := ask_driver()) is None:
        return []
    if asked.returncode or not asked.stdout.strip():
        said = " ".join((asked.stdout or asked.stderr).split())
        return [warn("driver", said, "load NVIDIA's driver, if there is a GPU")]
    version = asked.stdout.split()[0]
    return [driver_for(torch.version.cuda, version, torch.cuda.is_available())]


def driver_for(cuda: str, version: str, works: bool) -> Finding:
    """works: torch uses the GPUs, with an older driver by NVIDIA's package cuda-compat."""
    oldest = DRIVERS.get(_numbers(cuda)[0], 0)
    if works or _numbers(version)[0] >= oldest:
        return ok("driver", f"{version}, for torch with CUDA {cuda}")
    fix = f"install NVIDIA driver {oldest} or newer, or a build of torch for an older CUDA"
    return wrong("driver", f"{version} is older than {oldest}, which CUDA {cuda} needs", fix)


def gpus() -> list[Finding]:
    """The GPUs as torch sees them; whether a run can use them is a check of the run."""
    import torch
    import torch.distributed as dist

    if not torch.cuda.is_available():
        build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPUs"
        fix = "docker run --gpus all, srun --gpus-per-node, or a build of torch for your driver's "
        fix += "CUDA, if there should be one"
        return [warn("gpu", f"none that torch, built for {build}, can use", fix)]
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if dist.is_nccl_available() else "none"
    findings = []
    for index in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        text = f"{facts.name}, {size(free)} of {size(total)} free, CUDA {torch.version.cuda}, "
        text += f"NCCL {nccl}, {'bf16' if facts.major >= 8 else 'no bf16'}"
        used = free < 0.9 * total
        fix = "nvidia-smi shows which process uses it" if used else ""
        findings.append(Finding(f"gpu {index}", "warn" if used else "ok", text, fix))
    return findings
