"""A run small enough to be repeated many times: two blocks of width 16, three steps an epoch."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from lipnext_scale.checkpoint import (
    StateShard,
    latest_checkpoint,
    load_shards,
    read_facts,
    stored_shapes,
    verify_checkpoint,
)
from lipnext_scale.checkpoint.io import read_metadata
from lipnext_scale.config.recipe import Recipe, load_recipe
from lipnext_scale.training import trainer as trainer_module
from lipnext_scale.training.trainer import Trainer

SETTINGS = """
data.train=builtin:digits/train-*.tar.gz data.test=builtin:digits/test-*.tar.gz
data.batch_size=400 data.augment.crop_padding=1 data.augment.flip=true model.depth=2
model.width=16 model.image_size=8 model.patch_size=2 model.in_channels=1 optim.epochs=4
optim.warmup_epochs=1 optim.lookahead=5 optim.lr=1e-2 loss.logit_scale=8 run.eval_every=2
run.log_every=1 run.checkpoint_every=4 run.summary=false
""".split()
STEPS = 12


def small_recipe(directory: Path, *overrides: str) -> Recipe:
    return load_recipe(None, [*SETTINGS, f"run.dir={directory}", *overrides])


def final_state(directory: Path) -> dict:
    path = latest_checkpoint(directory / "checkpoints")
    assert path is not None
    return state_of(path)


def state_of(path: Path) -> dict:
    """The facts and every tensor by name of a checkpoint, which is intact."""
    facts, tensors = checkpoint_content(path)
    return {**facts, **tensors}


def checkpoint_content(path: Path) -> tuple[dict, dict[str, Tensor]]:
    """(facts, tensors), all of one type."""
    verify_checkpoint(path)
    shapes, metadata = stored_shapes(path), read_metadata(path).state_dict_metadata
    (dtype,) = {metadata[name].properties.dtype for name in shapes}
    tensors = {n: torch.full(shape, torch.nan, dtype=dtype) for n, shape in shapes.items()}
    load_shards(path, {name: StateShard.full(tensor) for name, tensor in tensors.items()})
    return read_facts(path), tensors


def assert_same(one: object, other: object, where: str = "state") -> None:
    """Bit-equal, all the way down."""
    assert type(one) is type(other), where
    if isinstance(one, dict):
        assert one.keys() == other.keys(), where
        for key in one:
            assert_same(one[key], other[key], f"{where}.{key}")
    elif isinstance(one, list | tuple):
        assert len(one) == len(other), where
        for index, (left, right) in enumerate(zip(one, other, strict=True)):
            assert_same(left, right, f"{where}[{index}]")
    elif isinstance(one, torch.Tensor):
        assert torch.equal(one, other), where
    else:
        assert one == other, where


@contextmanager
def poison(trainer: Trainer, steps: set[int], by: float = torch.nan) -> Iterator[None]:
    """The loss of these steps, counted from one, is NaN on the last rank; so are all gradients."""
    healthy = trainer_module.compute_loss
    is_last = trainer.processes.rank == trainer.processes.world_size - 1

    def loss(*arguments: object) -> Tensor:
        bad = is_last and trainer.step + 1 in steps
        return healthy(*arguments) * (by if bad else 1.0)  # type: ignore[arg-type]

    trainer_module.compute_loss = loss  # type: ignore[assignment]
    try:
        yield
    finally:
        trainer_module.compute_loss = healthy
