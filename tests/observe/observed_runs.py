"""Small runs that record everything at every step, and their records."""

from pathlib import Path
from typing import Any

from torch import Tensor
from training.small import final_state, small_recipe

from lipnext_scale.config.recipe import Recipe
from lipnext_scale.observe.metrics import read_records
from lipnext_scale.training.trainer import Trainer

# Four blocks of width 16, 14 steps an epoch. ε of Adam is large, so that engines agree
# (docs/parallel.md); steps are, and exponentials cheap, so that the drift is more than rounding.
CHANGED = """
data.batch_size=100 data.augment.crop_padding=0 data.augment.flip=false model.depth=4
optim.epochs=2 optim.warmup_epochs=0 optim.lr=0.06 optim.eps=1e-2 optim.lookahead=3
optim.exp_rule=paper
run.eval_every=0 run.checkpoint_every=0 run.watch_every=2 run.watch_samples=101
""".split()
QUIET = ["run.log_every=100000", "run.watch_every=0", "run.per_depth=false"]
DEPTH, WIDTH, LAST = 4, 16, 5
BETAS, LR = (0.9, 0.999), 0.06


def recipe(directory: Path, *overrides: str) -> Recipe:
    return small_recipe(directory, *CHANGED, *overrides)


def run(directory: Path, *overrides: str) -> None:
    Trainer(recipe(directory, f"run.max_steps={LAST}", *overrides)).run()


def run_each(rank: int, world: int, directory: Path, configurations: dict[str, list[str]]) -> None:
    """One after the other on the same processes."""
    for name, overrides in configurations.items():
        run(directory / name, *overrides)


def records(directory: Path) -> list[dict[str, Any]]:
    return read_records(directory / "metrics.jsonl")


def last_record(directory: Path) -> dict[str, Any]:
    return [record for record in records(directory) if "train/loss" in record][-1]


def checkpoint_tensors(directory: Path) -> dict[str, Tensor]:
    """The tensors of the newest checkpoint by name."""
    state = final_state(directory)
    return {name: value for name, value in state.items() if isinstance(value, Tensor)}
