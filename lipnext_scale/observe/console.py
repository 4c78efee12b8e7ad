"""The line of a log interval: images per second, MFU, memory, time to go.

The MFU counts the arithmetic that the network itself needs, as is usual: two products a block
forward, and twice as many backward. The optimizer's products, M·Rᵀ and recomputation do not count.
"""

import math
import re
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from lipnext_scale.config.recipe import Recipe
from lipnext_scale.models import LipNeXtConfig
from lipnext_scale.models.layers import FAMILIES, Gated
from lipnext_scale.models.layers.conv import ORTHOGONAL

# TFLOP/s of dense products by words of the device's name, the more particular ones first:
# (bf16, fp32 without TF32, which would not keep a matrix orthogonal). Nominal; run.peak_tflops
# overrides them.
PEAKS: dict[str, tuple[float, float]] = {
    "GB200": (2500.0, 80.0),
    "B200": (2250.0, 75.0),
    "H200": (989.5, 67.0),
    "GH200": (989.5, 67.0),
    "H100 PCIe": (756.0, 51.0),
    "H100 NVL": (835.0, 60.0),
    "H100": (989.5, 67.0),
    "A100": (312.0, 19.5),
    "L40S": (362.0, 91.6),
    "A40": (149.7, 37.4),
    "MI300X": (1307.4, 163.4),
}
PAGE = resource.getpagesize()


def training_flops_per_image(config: LipNeXtConfig) -> float:
    """Forward and backward: 6 for each entry of a matrix and each token, as a product has 2."""
    tokens = (config.image_size // config.patch_size) ** 2
    matrices = 2.0 if isinstance(FAMILIES.get(config.layer), Gated) else 1  # of a mixer
    if config.kernel_size > 1 and config.layer in ORTHOGONAL:
        matrices *= 2 / config.kernel_size**2  # complex ones, of half of the frequencies
    return 6.0 * (matrices * config.bank_parameters * tokens + config.dense_products)


def peak_tflops(name: str, precision: str) -> float:
    """Of a device by its name; 0 where it is not known."""
    for words, (bf16, fp32) in PEAKS.items():
        if re.search(rf"\b{words}\b", name, re.IGNORECASE):  # an RTX A4000 is no A40
            return bf16 if precision == "bf16" else fp32
    return 0.0


class Pace:
    """How fast a run is. The rate of steps leaves evaluations out; the time to go has them in."""

    def __init__(self, recipe: Recipe, device: torch.device, world_size: int, step: int) -> None:
        self._batch, self._first_step, self._last_step = recipe.data.batch_size, step, step
        self._begun = self._last = time.perf_counter()
        self._paused = 0.0
        peak = recipe.run.peak_tflops
        if not peak and device.type == "cuda":
            peak = peak_tflops(torch.cuda.get_device_name(device), recipe.parallel.precision)
        self._flops, self._peak = training_flops_per_image(recipe.model), 1e12 * peak * world_size

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, no step is taken."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._paused += time.perf_counter() - began

    def take(self, step: int) -> dict[str, float]:
        """Since the last call."""
        now = time.perf_counter()
        seconds = max(now - self._last - self._paused, 1e-9)
        rate = (step - self._last_step) * self._batch / seconds
        self._last, self._last_step, self._paused = now, step, 0.0
        values = {"images_per_second": rate}
        if self._peak:
            values["mfu"] = rate * self._flops / self._peak
        return values

    def seconds_to(self, last_step: int, step: int) -> float:
        """At the pace of this process so far."""
        passed = time.perf_counter() - self._begun
        return (last_step - step) * passed / max(1, step - self._first_step)


def process_memory(device: torch.device) -> dict[str, float]:
    """GB of this process: resident now, and the GPU's peaks."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    values = {"memory/resident_gb": pages * PAGE / 1e9}
    if device.type == "cuda":
        values["memory/gpu_allocated_gb"] = torch.cuda.max_memory_allocated(device) / 1e9
        values["memory/gpu_reserved_gb"] = torch.cuda.max_memory_reserved(device) / 1e9
    return values


def console_line(
    values: dict[str, float], epochs: int, step: int, total_steps: int, seconds_to_go: float
) -> str:
    """A line of what is known."""
    memory = values.get("memory/gpu_allocated_gb", values["memory/resident_gb"])
    parts = [
        f"epoch {epoch_of(values['train/epoch'], epochs)}/{epochs}",
        f"step {step:>{len(str(total_steps))}}/{total_steps}",
        f"loss {values['train/loss']:.4f}",
        f"acc {values['train/accuracy']:.3f}",
        f"lr {values['train/lr']:.1e}",
        f"ε {values['train/epsilon']:.3f}",
        f"{values['images_per_second']:,.0f} img/s",
        *([f"MFU {values['mfu']:.0%}"] if "mfu" in values else []),
        f"wait {values['data/wait_share']:.0%}",
        f"{memory:.1f} GB",
        f"ETA {duration(seconds_to_go)}",
    ]
    return "  ".join(parts)


def score_line(scores: dict[str, float]) -> str:
    """`test/clean_accuracy` and `test/nominal_cra`, a line below the step's."""
    return "  " + "  ".join(f"{name} {value:.4f}" for name, value in scores.items())


def epoch_of(done: float, epochs: int) -> int:
    """The number of the epoch that is under way after so many."""
    return min(epochs, max(1, math.ceil(done - 1e-9)))


def duration(seconds: float) -> str:
    """0:07, 12:05, 3:12:05, 2 d 4 h."""
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 24:
        return f"{hours // 24} d {hours % 24} h"
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
