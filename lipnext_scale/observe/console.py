"""The arithmetic of a model and the best that a device could do: together the MFU.

What is counted is what the network itself needs, as is usual: two products a block forward, and
twice as many backward. The optimizer's products, M·Rᵀ and what is recomputed are not, so the MFU
says what share of the device trains the network.
"""

import math
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from lipnext_scale.models import LipNeXtConfig
from lipnext_scale.recipe import Recipe

# TFLOP/s of dense products by words of the device's name, the more particular ones first:
# (bf16, fp32 without TF32, which would not keep a matrix orthogonal). Nominal; run.peak_tflops goes
# over them.
PEAKS: dict[str, tuple[float, float]] = {
    "GB200": (2500.0, 80.0),
    "B200": (2250.0, 75.0),
    "H200": (989.5, 67.0),
    "GH200": (989.5, 67.0),
    "H100 PCIe": (756.0, 51.0),
    "H100 NVL": (835.0, 60.0),
    "H100": (989.5, 67.0),
    "H800": (989.5, 67.0),
    "A100": (312.0, 19.5),
    "A800": (312.0, 19.5),
    "L40S": (362.0, 91.6),
    "L40": (181.0, 90.5),
    "L4": (121.0, 30.3),
    "A40": (149.7, 37.4),
    "A10": (125.0, 31.2),
    "MI300X": (1307.4, 163.4),
    "MI250X": (383.0, 95.7),
}


def training_flops_per_image(config: LipNeXtConfig) -> float:
    """Forward and backward: 6 for each entry of a matrix and each token, as a product has 2."""
    tokens = (config.image_size // config.patch_size) ** 2
    return 6.0 * (config.bank_parameters * tokens + config.width * config.num_classes)


def peak_flops(told: float, device: torch.device, precision: str) -> float | None:
    """Of one device; None where nothing is known. told: run.peak_tflops, 0 if not given."""
    if told:
        return told * 1e12
    if device.type != "cuda":
        return None
    return peak_by_name(torch.cuda.get_device_name(device), precision)


def peak_by_name(name: str, precision: str) -> float | None:
    for words, (bf16, fp32) in PEAKS.items():
        if re.search(rf"\b{words}\b", name, re.IGNORECASE):  # an RTX A4000 is no A40
            return 1e12 * (bf16 if precision == "bf16" else fp32)
    return None


# --------------------------------------------------------------------------------------------------
# How fast a run goes: images per second, MFU, what is left to do; and the memory it takes.


class Pace:
    """The steps' own rate leaves evaluations out; the time to go counts everything."""

    def __init__(self, recipe: Recipe, device: torch.device, world_size: int, step: int) -> None:
        self._batch, self._begun_at, self._taken_at = recipe.data.batch_size, step, step
        self._begun = self._taken = time.perf_counter()
        self._paused = 0.0
        peak = peak_flops(recipe.run.peak_tflops, device, recipe.parallel.precision)
        flops = training_flops_per_image(recipe.model)
        self._mfu_of_rate = None if peak is None else flops / (peak * world_size)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, no step is taken."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._paused += time.perf_counter() - began

    def take(self, step: int) -> dict[str, float]:
        """Since it was last asked."""
        now = time.perf_counter()
        seconds = max(now - self._taken - self._paused, 1e-9)
        rate = (step - self._taken_at) * self._batch / seconds
        self._taken, self._taken_at, self._paused = now, step, 0.0
        told = {"images_per_second": rate}
        if self._mfu_of_rate is not None:
            told["mfu"] = rate * self._mfu_of_rate
        return told

    def seconds_to(self, last_step: int, step: int) -> float:
        """As this process has gone so far."""
        passed = time.perf_counter() - self._begun
        return (last_step - step) * passed / max(1, step - self._begun_at)


def process_memory(device: torch.device) -> dict[str, float]:
    """GB of this process: resident now, and the GPU's peaks."""
    told = {}
    resident = resident_bytes()
    if resident is not None:
        told["memory/resident_gb"] = resident / 1e9
    if device.type == "cuda":
        told["memory/gpu_allocated_gb"] = torch.cuda.max_memory_allocated(device) / 1e9
        told["memory/gpu_reserved_gb"] = torch.cuda.max_memory_reserved(device) / 1e9
    return told


def resident_bytes() -> int | None:
    """None where the kernel does not tell."""
    status = Path("/proc/self/status")
    found = re.search(r"^VmRSS:\s+(\d+) kB", status.read_text(), re.M) if status.exists() else None
    return int(found[1]) * 1024 if found else None


# --------------------------------------------------------------------------------------------------
# The line that a run prints at every log interval, and words for numbers.

COLUMNS = 120


def console_line(
    told: dict[str, float], epochs: int, step: int, total_steps: int, seconds_to_go: float
) -> str:
    """What is not known is left out, and the number of all steps where the line would be long."""
    epoch = min(epochs, max(1, math.ceil(told["train/epoch"] - 1e-9)))
    parts = [
        f"epoch {epoch}/{epochs}",
        f"step {step:>{len(str(total_steps))}}/{total_steps}",
        f"loss {told['train/loss']:.4f}",
        f"acc {told['train/accuracy']:.3f}",
        f"lr {told['train/lr']:.1e}",
        f"ε {told['train/epsilon']:.3f}",
        f"{told['images_per_second']:,.0f} img/s",
    ]
    if "mfu" in told:
        parts.append(f"MFU {told['mfu']:.0%}")
    parts.append(f"wait {told['data/wait_share']:.0%}")
    memory = told.get("memory/gpu_allocated_gb", told.get("memory/resident_gb"))
    if memory is not None:
        parts.append(f"{memory:.1f} GB")
    parts.append(f"ETA {duration(seconds_to_go)}")
    if len("  ".join(parts)) > COLUMNS:
        parts[1] = f"step {step}"
    return "  ".join(parts)


def score_line(scores: dict[str, float]) -> str:
    """`test/clean_accuracy` and its fellows, a line below the step's."""
    return "  " + "  ".join(f"{name} {value:.4f}" for name, value in scores.items())


def duration(seconds: float) -> str:
    """0:07, 12:05, 3:12:05, 2 d 4 h."""
    if not math.isfinite(seconds):
        return "–"
    whole = max(0, round(seconds))
    minutes, hours, days = whole // 60, whole // 3600, whole // 86400
    if days:
        return f"{days} d {hours % 24} h"
    if hours:
        return f"{hours}:{minutes % 60:02d}:{whole % 60:02d}"
    return f"{minutes}:{whole % 60:02d}"
