"""Small runs that tell everything at every step, and what they have told."""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lipnext_scale.checkpoint import StateShard, latest_checkpoint, load_pieces, stored_shapes
from lipnext_scale.recipe import Recipe, load_recipe
from lipnext_scale.trainer import Trainer

# Three blocks of width 16, 14 steps an epoch. ε of Adam is large, so that engines agree
# (docs/parallel.md); steps are, so that the drift is more than rounding.
SETTINGS = [
    "data.train=builtin:digits/train-*.tar.gz",
    "data.test=builtin:digits/test-*.tar.gz",
    "data.batch_size=100",
    "model.depth=3",
    "model.width=16",
    "model.image_size=8",
    "model.patch_size=2",
    "model.in_channels=1",
    "optim.epochs=2",
    "optim.warmup_epochs=0",
    "optim.lr=0.06",
    "optim.eps=1e-2",
    "optim.lookahead=3",
    "loss.logit_scale=8",
    "run.eval_every=0",
    "run.log_every=1",
    "run.checkpoint_every=0",
    "run.watch_every=2",
    "run.watch_samples=101",
    "run.summary=false",
]
QUIET = ["run.log_every=100000", "run.watch_every=0", "run.per_depth=false"]
DEPTH, WIDTH, LAST = 3, 16, 5
BETAS, LR = (0.9, 0.999), 0.06


def recipe(directory: Path, *overrides: str) -> Recipe:
    return load_recipe(None, [*SETTINGS, f"run.dir={directory}", *overrides])


def run(directory: Path, *overrides: str) -> None:
    Trainer(recipe(directory, f"run.max_steps={LAST}", *overrides)).run()


def run_each(rank: int, world: int, directory: Path, configurations: dict[str, list[str]]) -> None:
    """One after the other on the same processes."""
    for name, overrides in configurations.items():
        run(directory / name, *overrides)


def records(directory: Path) -> list[dict[str, Any]]:
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def last_record(directory: Path) -> dict[str, Any]:
    return [record for record in records(directory) if "train/loss" in record][-1]


def checkpoint_tensors(directory: Path) -> dict[str, Tensor]:
    """Whole tensors of the newest checkpoint by name."""
    path = latest_checkpoint(directory / "checkpoints")
    assert path is not None
    tensors = {name: torch.empty(shape) for name, shape in stored_shapes(path).items()}
    pieces = {n: StateShard(t, tuple(t.shape), (0,) * t.dim()) for n, t in tensors.items()}
    load_pieces(path, pieces)
    return tensors
