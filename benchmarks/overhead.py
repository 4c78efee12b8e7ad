"""What observing and guarding a run costs: records, statistics by block, watchdog, checks.

    python -m benchmarks.overhead [--width 128] [--depth 6] [--steps 1000] [--rounds 20]

Two figures, both of one process on the digits that ship with the package:

    share   of one run with the defaults: the time inside observer and guards, by what it does, in
            units of the time that its steps take. Both are of the same steps, so noise meets them
            alike. The threads of watchdog and run lock run beside, and count wherever they fall.
    ratio   of two runs that take turns, a log interval each: everything off, and the defaults. The
            median over the rounds; good to a percent or so.

Times are the process's CPU time, of all its threads: a step on one CPU waits for nothing, and other
work on the machine does not count. Neither figure has the picture and the profile, which are there
once or on demand.
"""

import argparse
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import process_time
from typing import Any

import torch

from benchmarks.timing import machine, print_rows
from lipnext_scale.config.recipe import load_recipe
from lipnext_scale.data import Batch
from lipnext_scale.training.trainer import Trainer
from lipnext_scale.utils.cpu import keep_freed_memory
from lipnext_scale.utils.progress import beat

SETTINGS = [
    "data.train=builtin:digits/train-*.tar.gz",
    "data.test=builtin:digits/test-*.tar.gz",
    "data.batch_size=64",
    "model.image_size=8",
    "model.patch_size=2",
    "model.in_channels=1",
    "optim.epochs=1000",
    "run.eval_every=0",
    "run.checkpoint_every=0",
]
OFF = [
    "run.log_every=1000000000",
    "run.per_depth=false",
    "run.watch_every=0",
    "run.hang_timeout=0",
]
DEFAULTS: list[str] = []


class Loop:
    """The trainer's loop, taken in pieces, with a clock at each call of the observer."""

    def __init__(self, directory: Path, overrides: list[str]) -> None:
        recipe = load_recipe(None, [*SETTINGS, f"run.dir={directory}", *overrides])
        self.trainer = Trainer(recipe)
        self.trainer.observer.open(self.trainer.step)
        self._open = ExitStack()
        self._open.callback(self.trainer.directory.lock.release)
        self._open.callback(self.trainer.observer.close)
        self._open.enter_context(self.trainer._watching())
        self._batches: Iterator[Batch] = iter(self.trainer.loader)
        self.seconds: dict[str, float] = defaultdict(float)
        for name in ("gradients_made", "weights_moved"):
            self._time(self.trainer.observer, name, "by block")
        self._time(self.trainer, "_is_finite", "finite")
        self._time(self.trainer.observer.evaluation, "of_subset", "subset")

    def _time(self, owner: Any, name: str, kind: str) -> None:
        action: Callable[..., Any] = getattr(owner, name)

        def timed(*arguments: Any) -> Any:
            start = process_time()
            result = action(*arguments)
            self.seconds[kind] += process_time() - start
            return result

        setattr(owner, name, timed)

    def steps(self, count: int) -> None:
        trainer, observer = self.trainer, self.trainer.observer
        for _ in range(count):
            batch = next(self._batches)
            begun = process_time()
            with observer.step(trainer.step + 1):
                stepping = process_time()
                values = trainer.train_step(batch)
                stepped = process_time()
            trainer._after_step(values)
            beat(f"step {trainer.step + 1}")
            self.seconds["around"] += process_time() - begun - (stepped - stepping)
            self.seconds["step"] += stepped - stepping

    def shares(self) -> dict[str, float]:
        """By kind, in units of the steps alone."""
        by_block, subset = self.seconds["by block"], self.seconds["subset"]
        finite = self.seconds["finite"]
        alone = self.seconds["step"] - by_block - finite
        shares = {
            "gradient, step and drift by block": by_block,
            "subset of the test set": subset,
            "records, lines, warnings": self.seconds["around"] - subset,
            "check for finite numbers": finite,
        }
        return {name: seconds / alone for name, seconds in shares.items()}

    def close(self) -> None:
        self._open.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--depth", type=int, default=6)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=20)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    print(machine())
    print(f"L{arguments.depth}W{arguments.width}, batches of 64, 16 tokens an image")
    model = [f"model.width={arguments.width}", f"model.depth={arguments.depth}"]
    with TemporaryDirectory() as directory:
        share_of_one_run(Path(directory) / "one", model, arguments.steps)
        ratio_of_two(Path(directory), model, arguments.rounds)


def share_of_one_run(directory: Path, model: list[str], steps: int) -> None:
    loop = Loop(directory, [*model, *DEFAULTS])
    loop.steps(10)  # buffers, files
    loop.seconds.clear()
    loop.steps(steps)
    shares = loop.shares()
    each = 1e3 * loop.seconds["step"] / steps
    print(f"\nshare of the steps' time, over {steps} steps of {each:.1f} ms")
    for name, share in {**shares, "all": sum(shares.values())}.items():
        print(f"  {name:<38}{share:8.3%}")
    loop.close()


def ratio_of_two(directory: Path, model: list[str], rounds: int) -> None:
    off = Loop(directory / "off", [*model, *OFF])
    on = Loop(directory / "on", [*model, *DEFAULTS])
    every = on.trainer.recipe.run.log_every
    print(f"\na log interval of {every} steps, two runs in turn, {rounds} rounds")
    seconds: dict[str, list[float]] = {"everything off": [], "defaults": []}
    for turn in range(rounds + 1):
        for loop, times in zip((off, on), seconds.values(), strict=True):
            start = process_time()
            loop.steps(every)
            if turn:  # the first makes buffers
                times.append(process_time() - start)
    print_rows(seconds, "everything off")
    ratios = [a / b for a, b in zip(seconds["defaults"], seconds["everything off"], strict=True)]
    print(f"  ratios from {min(ratios):.3f} to {max(ratios):.3f}, median {median(ratios):.3f}")
    off.close()
    on.close()


if __name__ == "__main__":
    main()
