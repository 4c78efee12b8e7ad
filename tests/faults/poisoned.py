"""Runs in which the numbers of certain steps are not finite, on all engines."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from training.small import small_recipe, whole_piece

from lipnext_scale import trainer as trainer_module
from lipnext_scale.checkpoint import load_pieces, read_facts, stored_shapes
from lipnext_scale.errors import RunFailed
from lipnext_scale.trainer import Trainer

# ε is large enough that Adam does not make steps of rounding errors, so engines can be compared.
# Nothing is evaluated; a quarter of the digits makes epochs of as many steps.
SETTINGS = [
    "data.train=builtin:digits/test-*.tar.gz",
    "data.batch_size=120",
    "optim.eps=1e-2",
    "run.keep_checkpoints=9",
    "run.eval_every=0",
]
ENGINES = {
    "single": ["parallel.engine=single"],
    "ddp": ["parallel.engine=ddp"],
    "banks": ["parallel.engine=fsdp"],
    "rows": ["parallel.engine=fsdp", "parallel.weight_layout=row"],
    "ZeRO-1": ["parallel.engine=deepspeed", "parallel.zero_stage=1"],
    "ZeRO-2": ["parallel.engine=deepspeed", "parallel.zero_stage=2"],
    "ZeRO-3": ["parallel.engine=deepspeed", "parallel.zero_stage=3"],
    "ZeRO-2, offloaded": ["parallel.engine=deepspeed", "parallel.offload_optimizer=true"],
}
# Those that keep weights and state in ways of their own: stopped and cut off around the step, too.
THOROUGH = ["single", "banks", "rows", "ZeRO-2", "ZeRO-3"]
# Whose checkpoints are in DeepSpeed's format.


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


def train(directory: Path, steps: set[int], *overrides: str) -> Trainer:
    """A run, or its continuation, whose epochs have three steps and which goes to step 12."""
    trainer = Trainer(small_recipe(directory, *SETTINGS, *overrides))
    with poison(trainer, steps):
        trainer.run()
    return trainer


def train_all(rank: int, world_size: int, directory: Path, engines: list[str]) -> None:
    """Every engine: undisturbed but for the poison, and stopped or cut off around it."""
    for name in engines:
        skip = [*ENGINES[name], "run.on_non_finite=skip"]
        train(directory / name / "skip", {5, 8}, *skip)
        if name in THOROUGH:
            train(directory / name / "skip, stopped", {5, 8}, *skip, "run.max_steps=5")
            train(directory / name / "skip, stopped", {5, 8}, *skip)


def train_offloaded_in_bf16(rank: int, world_size: int, directory: Path) -> None:
    for stage in (1, 2, 3):
        train(
            directory / f"ZeRO-{stage}",
            {5},
            *ENGINES["ZeRO-2, offloaded"],
            f"parallel.zero_stage={stage}",
            "parallel.precision=bf16",
            "run.on_non_finite=skip",
        )


def train_with_a_huge_loss(rank: int, world_size: int, directory: Path) -> str:
    """What is said in the third step."""
    trainer = Trainer(small_recipe(directory, *SETTINGS, *ENGINES["ZeRO-2, offloaded"]))
    with poison(trainer, {3}, by=1e21), pytest.raises(RunFailed) as failed:
        trainer.run()
    return str(failed.value)


def stored(directory: Path, step: int) -> dict[str, Any]:
    """The facts and the tensors of a checkpoint."""
    path = directory / "checkpoints" / f"step-{step:09d}"
    tensors = {name: torch.empty(shape) for name, shape in stored_shapes(path).items()}
    load_pieces(path, {name: whole_piece(tensor) for name, tensor in tensors.items()})
    return {**read_facts(path), **tensors}


def tensors_of(state: dict[str, Any]) -> dict[str, Tensor]:
    return {name: value for name, value in state.items() if isinstance(value, Tensor)}
