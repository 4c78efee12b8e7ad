"""GPUs, and NCCL between them."""

import os
import shutil
from typing import TYPE_CHECKING

from lipnext_scale.doctor.report import Finding, ok, size, warn, wrong

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
