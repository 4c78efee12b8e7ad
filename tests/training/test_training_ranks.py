"""What ranks must agree on: the samples, and the copies that they hold."""

import io
from contextlib import redirect_stderr
from pathlib import Path

import pytest
import torch
from distributed.engine_runs import require_rows_of_owners
from gloo import run_processes
from small import small_recipe

from lipnext_scale.distributed.engine import checksums
from lipnext_scale.distributed.rows import RowManifoldAdam
from lipnext_scale.training.trainer import Trainer
from lipnext_scale.utils.config import ConfigError

ROWS = ["parallel.shard_size=2", "parallel.weight_layout=row"]


def train_on_other_samples(rank: int, world: int, directory: Path, key: str) -> str:
    shards = "builtin:digits/test-*.tar.gz" if rank == 1 else "builtin:digits/train-*.tar.gz"
    with pytest.raises(ConfigError) as error:
        Trainer(small_recipe(directory, f"data.{key}={shards}", "data.batch_size=99"))
    return str(error.value)


def test_ranks_with_other_samples_are_refused(tmp_path):
    """A node with a stale copy: all ranks raise before the first step, and name the odd one."""
    for message in run_processes(3, train_on_other_samples, tmp_path / "run", "test"):
        assert "data.test = " in message and "rank 1 reads other samples than rank 0" in message


def save_unequal_copies(rank: int, world: int, directory: Path, *overrides: str) -> list[str]:
    """A last bit flips on one rank; what it then prints, and whether all are equal again."""
    trainer = Trainer(small_recipe(directory, *overrides))
    batches = iter(trainer.loader)
    trainer.train_step(next(batches))
    said = io.StringIO()
    with redirect_stderr(said):
        trainer.save()  # equal
        if rank == world - 1:
            flip_a_bit(trainer)
        trainer.save()
    count = trainer.checkpointer.metrics().get("train/repaired_replicas")
    shards = trainer.engine.state_shards(trainer.optimizers)
    equal = {}
    for held in trainer.processes.gather_objects(checksums(shards)):
        for name, checksum in held.items():
            assert equal.setdefault(name, checksum) == checksum
    require_rows_of_owners(trainer)
    trainer.train_step(next(batches))
    trainer.processes.close()
    return [said.getvalue(), str(count)]


@torch.no_grad()
def flip_a_bit(trainer: Trainer) -> None:
    owned = trainer.engine.owner
    if isinstance(owned, RowManifoldAdam):
        found = (owned.owned_tensors(name) for name in owned.names)
        index, tensors = next(pair for pair in found if pair is not None)
        numbers = tensors["model"][index].view(-1)
    else:
        bias = trainer.optimizers.euclidean.state[trainer.model.head.bias]["slow"]
        numbers = bias.to_local() if hasattr(bias, "to_local") else bias
    numbers[0] = torch.nextafter(numbers[0], torch.tensor(9.0))


@pytest.mark.parametrize(
    ("world", "overrides", "name"),
    [
        (2, ["parallel.engine=ddp"], "ranks 0 and 1 hold copies of slow.head.bias from (0,)"),
        (2, ["parallel.shard_size=1"], "ranks 0 and 1 hold copies of slow.head.bias from (0,)"),
        (4, ROWS, "ranks 1 and 3 hold copies of model.blocks."),
    ],
)
def test_copies_that_differ_are_made_equal(tmp_path, world, overrides, name):
    """A last bit that differs between replicas is taken from the first; a line names the tensor."""
    found = run_processes(world, save_unequal_copies, tmp_path / "run", *overrides)
    assert [count for _, count in found] == ["1"] * world
    (line,) = found[0][0].splitlines()
    assert line.startswith(f"warning: step 1: {name}")
    assert line.endswith("that differ; the first rank's are taken")
    assert not any(said for said, _ in found[1:])
