"""The time of a training step, predicted from `bench cpu` and a walk, beside the measured one.

    python -m benchmarks.predicted_step [--seconds 600]

One process. The measurements of `bench cpu` and steps of all configurations take turns, so that all
see the same machine. Steps are the trainer's own, on images of noise; of their times the medians.
Both by two clocks, for a machine that others use too: the wall clock in those turns in which other
processes took less than a tenth of the machine, and the CPU time of all threads in every turn.
Exponentials have the sizes of the middle of a training, which the walk takes too: Adam's first
steps are larger.
"""

import argparse
import math
import os
import resource
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import torch

from benchmarks.timing import machine
from lipnext_scale.checks import cpu as rates_of
from lipnext_scale.config.recipe import load_recipe
from lipnext_scale.data import Batch
from lipnext_scale.distributed import build_engine
from lipnext_scale.optim import manifold_adam
from lipnext_scale.planning.cpu import Rates, seconds_of
from lipnext_scale.planning.walk import DatalessTrainer, Walk, Walked, usual_exponent, walk_all
from lipnext_scale.utils.cpu import keep_freed_memory

CONFIG = "configs/cifar10_small.yaml"
# name: depth, width, patch size, batch size; then other settings
CONFIGURATIONS = {
    "L8W128, 64 tokens, batch 64, product": (8, 128, 4, 64, "optim.parametrisation=product"),
    "L4W128, 256 tokens, batch 32, minmax": (4, 128, 2, 32, "model.activation=minmax"),
    "L8W192, 16 tokens, batch 8": (8, 192, 8, 8, ""),
    "L8W256, 16 tokens, batch 128": (8, 256, 8, 128, ""),
    "L4W256, 64 tokens, batch 64 in 2 parts, product, recomputed": (
        *(4, 256, 4, 64),
        "optim.parametrisation=product parallel.accumulation=2 parallel.recompute_activations=true",
    ),
    "L4W256, 64 px, 256 tokens, batch 32": (4, 256, 4, 32, "model.image_size=64"),
    "L8W512, 16 tokens, batch 64, product, no Lookahead": (
        *(8, 512, 8, 64),
        "optim.parametrisation=product optim.lookahead=0",
    ),
    "L4W512, 64 tokens, batch 64, minmax": (4, 512, 4, 64, "model.activation=minmax"),
    "L4W512, 16 tokens, batch 64, lr 1e-2": (4, 512, 8, 64, "optim.lr=1e-2"),
    "L4W768, 16 tokens, batch 64, product, recomputed": (
        *(4, 768, 8, 64),
        "optim.parametrisation=product parallel.recompute_activations=true",
    ),
    "L2W1024, 64 tokens, batch 32": (2, 1024, 4, 32, ""),
    "L4W1024, 16 tokens, batch 64 in 2 parts, product": (
        *(4, 1024, 8, 64),
        "optim.parametrisation=product parallel.accumulation=2",
    ),
}
LEAST = 40.0  # seconds, as `bench cpu` takes
TURN = 0.25  # seconds of steps at least: the kernel counts others' time in hundredths
WANTED = {"step": 7, "lookahead": 2}  # turns
CLOCKS = {"cpu": time.process_time, "wall": time.perf_counter}


def settings_of(name: str) -> list[str]:
    depth, width, patch, batch, others = CONFIGURATIONS[name]
    settings = f"model.depth={depth} model.width={width} model.patch_size={patch}"
    # What the figures of earlier days had.
    settings += " model.neck=l2_pool model.head=unit optim.parametrisation=merged"
    return f"{settings} data.batch_size={batch} optim.lr=1e-3 {others}".split()


class NoiseTrainer(DatalessTrainer):
    def batch(self, last_of_epoch: bool = False) -> Batch:
        batch = super().batch()
        batch.images.random_(256)
        batch.labels.random_(self.recipe.model.num_classes)
        return batch


@dataclass
class Run:
    name: str
    trainer: NoiseTrainer = field(init=False)
    steps: int = 0
    # Of each turn, by clock and by kind of step.
    seconds: dict[tuple[str, str], list[float]] = field(default_factory=lambda: defaultdict(list))

    def __post_init__(self) -> None:
        recipe = load_recipe(CONFIG, settings_of(self.name))
        self.trainer = NoiseTrainer(recipe, build_engine(recipe.parallel, "cpu"))
        self.take()  # makes state and buffers

    @property
    def kinds(self) -> tuple[str, ...]:
        return ("step", "lookahead") if self.trainer.recipe.optim.lookahead else ("step",)

    def done(self, clock: str) -> bool:
        return all(len(self.seconds[clock, kind]) >= WANTED[kind] for kind in self.kinds)

    def take(self) -> tuple[str, dict[str, float]]:
        batch = self.trainer.batch()
        self.steps += 1
        every = self.trainer.recipe.optim.lookahead
        kind = "lookahead" if every and self.steps % every == 0 else "step"
        size = usual_exponent(self.trainer, kind == "lookahead")
        plans = manifold_adam._plans
        with mock.patch.object(
            manifold_adam, "_plans", lambda moves, sizes: plans(moves, [size] * len(sizes))
        ):
            began = {name: clock() for name, clock in CLOCKS.items()}
            self.trainer.train_step(batch)
            return kind, {name: clock() - began[name] for name, clock in CLOCKS.items()}

    def turn(self) -> None:
        before, began, taken = usage(), time.perf_counter(), []
        while not taken or time.perf_counter() - began < TURN:
            taken.append(self.take())
        clocks = ("cpu", "wall") if others_share(before) < 0.1 else ("cpu",)
        for clock in clocks:
            for kind in {kind for kind, _ in taken}:
                of_kind = median(seconds[clock] for k, seconds in taken if k == kind)
                self.seconds[clock, kind].append(of_kind)

    def measured(self, clock: str) -> float:
        if not all(self.seconds[clock, kind] for kind in self.kinds):
            return math.nan  # never quiet
        return self.mean({kind: median(self.seconds[clock, kind]) for kind in self.kinds})

    def mean(self, of_kind: dict[str, float]) -> float:
        """Of all steps, every so many of which is a Lookahead step."""
        every = self.trainer.recipe.optim.lookahead
        more = (of_kind["lookahead"] - of_kind["step"]) / every if every else 0.0
        return of_kind["step"] + more


def usage() -> tuple[float, float]:
    """(seconds of CPU that other processes took, seconds of all CPUs) since the machine started."""
    ticks = [int(word) for word in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    user, nice, system, idle, waiting, *rest = ticks
    own = resource.getrusage(resource.RUSAGE_SELF)
    hertz = os.sysconf("SC_CLK_TCK")
    busy = (user + nice + system + sum(rest)) / hertz - own.ru_utime - own.ru_stime
    return busy, sum(ticks) / hertz


def others_share(before: tuple[float, float]) -> float:
    busy, all_of_it = usage()
    return (busy - before[0]) / max(all_of_it - before[1], 1e-9)


def predicted(walked: Walked, rates: Rates) -> dict[str, float]:
    return {kind: sum(seconds_of(r, rates) for r in rows) for kind, rows in walked.rows.items()}


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.predicted_step")
    parser.add_argument("--seconds", type=float, default=600.0, help="at most (600)")
    arguments = parser.parse_args()
    keep_freed_memory()
    torch.manual_seed(0)
    walks = walk_all(
        Walk(CONFIG, settings_of(name), per_node=1, device="cpu", what=("step", "lookahead"))
        for name in CONFIGURATIONS
    )
    runs, cases = [Run(name) for name in CONFIGURATIONS], rates_of.all_cases()
    times: dict[str, rates_of.Times] = {name: {} for name in CLOCKS}
    began, before = time.perf_counter(), usage()
    while time.perf_counter() - began < arguments.seconds:
        for name, clock in CLOCKS.items():
            measure_rates(cases, times[name], clock, always=name == "cpu")
        for run in runs:
            if not run.done("wall"):
                run.turn()
        if all(run.done("wall") for run in runs) and time.perf_counter() - began > LEAST:
            break
    print(f"{machine()}; others took {others_share(before):.0%} of the machine\n")
    for name in CLOCKS:
        if times[name]:  # else never quiet
            print_table(name, runs, walks, rates_of.figures(cases, times[name]))


def measure_rates(
    cases: list[rates_of.Case], times: rates_of.Times, clock: rates_of.Clock, always: bool
) -> None:
    """As in `turn`, all or only what is measured while others rest."""
    fresh: rates_of.Times = {}
    before = usage()
    rates_of.time_once(cases, fresh, clock)
    if always or others_share(before) < 0.1:
        for index, found in fresh.items():
            for all_times, new in zip(times.setdefault(index, ([], [])), found, strict=True):
                all_times += new


def print_table(clock: str, runs: list[Run], walks: list[Any], rates: Rates) -> None:
    print(f"| {clock} time | turns | measured ms | predicted ms | ratio |\n|---|---|---|---|---|")
    for run, walked in zip(runs, walks, strict=True):
        found, wanted = run.measured(clock) * 1e3, run.mean(predicted(walked, rates)) * 1e3
        turns, ratio = len(run.seconds[clock, "step"]), wanted / found
        print(f"| {run.name} | {turns} | {found:.1f} | {wanted:.1f} | {ratio:.2f} |")


if __name__ == "__main__":
    main()
