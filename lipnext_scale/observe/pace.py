"""How fast a run goes: images per second, MFU, what is left to do; and the memory it takes."""

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from lipnext_scale.observe.flops import peak_flops, training_flops_per_image
from lipnext_scale.recipe import Recipe


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
