"""A training step on several processes: layouts against each other, with what they hold.

    python -m benchmarks.sharded_step [--ranks 4] [--width 512] [--depth 8] [--rounds 9]

Real processes over gloo. All variants live in the same processes and take their steps in turn, so
that each sees the same noise; a round's time is that of the slowest rank. With more processes than
cores the times show what is exchanged and computed in all, not what overlaps: look at their ratios.
"""

import argparse
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from benchmarks.memory import training_memory
from benchmarks.timing import machine, print_rows
from lipnext_scale.distributed import Engine, ParallelConfig, build_engine
from lipnext_scale.losses import class_distances, emma_loss
from lipnext_scale.models import LipNeXtConfig
from lipnext_scale.optim import OptimConfig
from lipnext_scale.utils.cpu import keep_freed_memory

IMAGES, SIDE, PATCH = 16, 16, 4  # for each process
VARIANTS = {
    "fsdp bank": ParallelConfig(engine="fsdp"),
    "fsdp bank, kept gathered": ParallelConfig(engine="fsdp", reshard_after_forward=False),
    "fsdp row": ParallelConfig(engine="fsdp", weight_layout="row", row_bucket_mb=2),
    "ddp": ParallelConfig(engine="ddp"),
}


class Variant:
    """A model under one engine, and its step in two halves."""

    def __init__(self, parallel: ParallelConfig, model: LipNeXtConfig) -> None:
        self.engine: Engine = build_engine(parallel, "cpu")
        self.engine.build(model, seed=0)
        self.optimizers = self.engine.optimizers(OptimConfig(lr=1e-3))
        generator = torch.Generator().manual_seed(self.engine.processes.rank)
        self.images = torch.rand(IMAGES, 3, SIDE, SIDE, generator=generator)
        self.labels = torch.randint(model.num_classes, (IMAGES,), generator=generator)

    def gradients(self) -> None:
        self.optimizers.zero_grad()
        logits, weight = self.engine.forward(self.images)
        self.engine.backward(emma_loss(logits, self.labels, class_distances(weight), 0.1))

    def update(self) -> None:
        self.optimizers.step()


def measure(variants: dict[str, Variant], rounds: int) -> dict[str, dict[str, list[float]]]:
    """Seconds of each half of each variant's step by round, on this rank."""
    halves = ("gradients", "update")
    seconds = {half: {name: [] for name in variants} for half in halves}
    for turn in range(rounds + 2):  # the first two make state and buffers
        for name, variant in variants.items():
            for half in halves:
                dist.barrier()
                start = time.perf_counter()
                getattr(variant, half)()
                if turn >= 2:
                    seconds[half][name].append(time.perf_counter() - start)
    return seconds


def slowest(own: dict[str, list[float]]) -> dict[str, list[float]]:
    """The same with each time that of the slowest rank."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    return {
        name: [max(times) for times in zip(*(rank[name] for rank in everyone), strict=True)]
        for name in own
    }


def describe(name: str, variant: Variant) -> str:
    """A row of the table: MB held by the rank that holds most."""
    everyone: list[Any] = [None] * dist.get_world_size()
    held = training_memory(variant.engine, variant.optimizers).total / 1e6
    dist.all_gather_object(everyone, held)
    return f"  {name:<26}{max(everyone):14.2f}"


def rank_main(rank: int, ranks: int, store: str, model: LipNeXtConfig, rounds: int) -> None:
    torch.set_num_threads(1)
    keep_freed_memory()
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=ranks)
    say: Callable[..., None] = partial(print, flush=True) if rank == 0 else lambda *_: None
    say(machine())
    say(f"{ranks} processes, L{model.depth}W{model.width}, {IMAGES} images each")
    variants = {name: Variant(parallel, model) for name, parallel in VARIANTS.items()}
    seconds = measure(variants, rounds)
    titles = {"gradients": "forward and backward pass", "update": "optimizer step"}
    both = {}
    for half, title in titles.items():
        times = slowest(seconds[half])
        for name, values in times.items():
            before = both.get(name, [0.0] * rounds)
            both[name] = [a + b for a, b in zip(before, values, strict=True)]
        say(f"\n{title}")
        if rank == 0:
            print_rows(times, "fsdp bank")
    say("\nboth")
    if rank == 0:
        print_rows(both, "fsdp bank")
    say("\nlargest rank: MB of parameters, gradients and state; `plan --gpu cpu` has what is sent")
    for name, variant in variants.items():
        say(describe(name, variant))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--depth", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    model = LipNeXtConfig(
        depth=arguments.depth, width=arguments.width, image_size=SIDE, patch_size=PATCH
    )
    with TemporaryDirectory() as directory:
        store = str(Path(directory) / "store")
        rest = (arguments.ranks, store, model, arguments.rounds)
        multiprocessing.spawn(rank_main, args=rest, nprocs=arguments.ranks)


if __name__ == "__main__":
    main()
