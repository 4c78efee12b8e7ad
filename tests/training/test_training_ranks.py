"""What ranks must agree on: the samples, and the copies that they hold."""

from pathlib import Path

import pytest
import torch
from gloo import run_processes
from small import small_recipe

from lipnext_scale.training.trainer import Trainer
from lipnext_scale.utils.config import ConfigError
from lipnext_scale.utils.errors import RunFailed


def train_on_other_samples(rank: int, world: int, directory: Path, key: str) -> str:
    shards = "builtin:digits/test-*.tar.gz" if rank == 1 else "builtin:digits/train-*.tar.gz"
    with pytest.raises(ConfigError) as error:
        Trainer(small_recipe(directory, f"data.{key}={shards}", "data.batch_size=99"))
    return str(error.value)


def test_ranks_with_other_samples_are_refused(tmp_path):
    """A node with a stale copy: all ranks raise before the first step, and name the odd one."""
    for message in run_processes(3, train_on_other_samples, tmp_path / "run", "test"):
        assert "data.test = " in message and "rank 1 reads other samples than rank 0" in message


def save_unequal_copies(rank: int, world: int, directory: Path, engine: str) -> str:
    trainer = Trainer(small_recipe(directory, *engine.split()))
    trainer.train_step(next(iter(trainer.loader)))
    if rank == 1:
        bias = trainer.optimizers.euclidean.state[trainer.model.head.bias]["slow"]
        local = bias.to_local() if hasattr(bias, "to_local") else bias
        local[0] = torch.nextafter(local[0], torch.tensor(9.0))
    with pytest.raises(RunFailed) as error:
        trainer.save()
    return str(error.value)


@pytest.mark.parametrize("engine", ["parallel.engine=ddp", "parallel.shard_size=1"])
def test_copies_that_differ_are_not_saved_as_one(tmp_path, engine):
    """A last bit that differs between replicas ends the run on all ranks, and writes nothing."""
    for message in run_processes(2, save_unequal_copies, tmp_path / "run", engine):
        assert "step 1: ranks 0 and 1 hold copies of slow.head.bias" in message
    assert list((tmp_path / "run" / "checkpoints").iterdir()) == []
