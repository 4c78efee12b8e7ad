"""Timing several things against each other on a noisy machine."""

import os
import platform
import time
from collections.abc import Callable
from statistics import median

import torch


def interleaved(runs: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Seconds of every run in each round, one after the other, so that all see the same noise."""
    for run in runs.values():
        run()
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - start)
    return seconds


def ratio(seconds: dict[str, list[float]], name: str, unit: str) -> float:
    """The median over the rounds of a run's time in units of another's in the same round."""
    return median(one / other for one, other in zip(seconds[name], seconds[unit], strict=True))


def print_rows(seconds: dict[str, list[float]], *units: str) -> None:
    """A line for each run: its median in milliseconds, and in units of each of `units`."""
    print(f"  {'':<38}{'time':>13}" + "".join(f"{unit:>24}" for unit in units))
    for name, times in seconds.items():
        ratios = "".join(f"{ratio(seconds, name, unit):>24.3f}" for unit in units)
        print(f"  {name:<38}{median(times) * 1e3:>10.1f} ms{ratios}")


def machine() -> str:
    return (
        f"{platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads, "
        f"Python {platform.python_version()}, torch {torch.__version__}"
    )
