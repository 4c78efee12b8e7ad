"""A training step under every engine: time in units of DDP's, and what a rank holds.

    python -m benchmarks.engines [--ranks 2 4] [--width 256] [--depth 8] [--rounds 9]

Times: all engines live in the same processes and take their steps in turn, as in `sharded_step`.
Memory: each engine alone in new processes; the most that a rank has held beyond what it had after
its imports, through three steps, and the bytes of weights and optimizer state after them.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from benchmarks.memory import training_memory
from benchmarks.sharded_step import IMAGES, PATCH, SIDE, Variant, measure, slowest
from benchmarks.timing import machine, print_rows
from lipnext_scale.distributed import ParallelConfig
from lipnext_scale.distributed.deepspeed import import_deepspeed, require_deepspeed
from lipnext_scale.models import LipNeXtConfig
from lipnext_scale.utils.errors import command

ENGINES = {
    "ddp": ParallelConfig(engine="ddp"),
    "fsdp bank": ParallelConfig(engine="fsdp"),
    "fsdp row": ParallelConfig(engine="fsdp", weight_layout="row"),
    "deepspeed ZeRO-1": ParallelConfig(engine="deepspeed", zero_stage=1),
    "deepspeed ZeRO-2": ParallelConfig(engine="deepspeed", zero_stage=2),
    "deepspeed ZeRO-3": ParallelConfig(engine="deepspeed", zero_stage=3),
}


class WholeStep(Variant):
    """With the gradient's norm, which is part of every step."""

    def gradients(self) -> None:
        super().gradients()
        self.engine.gradient_norm()


def times(model: LipNeXtConfig, rounds: int) -> None:
    variants = {name: WholeStep(parallel, model) for name, parallel in ENGINES.items()}
    halves = [slowest(own) for own in measure(variants, rounds).values()]
    whole = {
        name: [sum(parts) for parts in zip(*(half[name] for half in halves), strict=True)]
        for name in variants
    }
    if dist.get_rank() == 0:
        print_rows(whole, "ddp")


def memory(model: LipNeXtConfig, name: str) -> None:
    before = _resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    variant = WholeStep(ENGINES[name], model)
    for _ in range(3):
        variant.gradients()
        variant.update()
    peak = _resident("VmHWM") - before
    held = training_memory(variant.engine, variant.optimizers)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (peak, (held.parameters + held.optimizer) / 1e6))
    if dist.get_rank() == 0:
        columns = "".join(f"{max(column):>16.1f}" for column in zip(*everyone, strict=True))
        print(f"  {name:<38}{columns}", flush=True)


def _resident(key: str) -> float:
    """MB of this process, as Linux reports."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith(f"{key}:"))
    return int(line.split()[1]) / 1e3


def rank_main(
    rank: int, ranks: int, store: str, work: Callable[..., None], arguments: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    import_deepspeed(torch.device("cpu"))
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=ranks)
    work(*arguments)
    dist.barrier()
    dist.destroy_process_group()


def start(ranks: int, work: Callable[..., None], *arguments: Any) -> None:
    with TemporaryDirectory() as directory:
        rest = (ranks, str(Path(directory) / "store"), work, arguments)
        multiprocessing.spawn(rank_main, args=rest, nprocs=ranks)


@command
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--depth", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    require_deepspeed()
    model = LipNeXtConfig(
        depth=arguments.depth, width=arguments.width, image_size=SIDE, patch_size=PATCH
    )
    print(machine())
    for ranks in arguments.ranks:
        size = 4 * model.bank_parameters / 1e6
        print(
            f"\n{ranks} processes, L{model.depth}W{model.width} ({size:.1f} MB of matrices), ",
            end="",
        )
        print(f"{IMAGES} images each", flush=True)
        start(ranks, times, model, arguments.rounds)
        print(f"  {'largest rank, MB':<38}{'peak':>16}{'weights, state':>16}", flush=True)
        for name in ENGINES:
            start(ranks, memory, model, name)


if __name__ == "__main__":
    main()
