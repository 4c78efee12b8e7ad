"""bfloat16 is for computing alone: weights, optimizer state and checkpoints stay float32.

One rounding to bfloat16 is 2⁻⁹ of a number: that is how far runs may lie apart that compute, or
reduce, in different types. (They move further than that.) Runs that differ only in their engine
round the same numbers in the same places, but for float32 round-off that crosses the edge between
two roundings; that is rare and small, so these lie ten times closer together.
"""

from pathlib import Path

import pytest
import torch
from engine_runs import (
    SMOOTH,
    Configurations,
    assert_same_bits,
    build_trainer,
    checkpointed,
    held_shards,
    joined,
    require_rows_of_owners,
    stored,
    tensor_errors,
)
from gloo import run_processes
from torch import Tensor, nn

from lipnext_scale.checkpoint import StateShards
from lipnext_scale.training.trainer import Trainer

pytestmark = pytest.mark.slow
# Tiny, for products in bfloat16 are slow on the CPU. Some channels must be shifted: without, the
# first pass gives the channels that the stem pads nothing but rounding.
TINY = [
    *SMOOTH,
    "data.batch_size=24",
    "model.depth=2",
    "model.width=8",
    "model.shift_ratio=0.25",
    "model.blocks_per_bank=1",
    "optim.lookahead=2",
]
STEPS = 5
BF16, REDUCE = "parallel.precision=bf16", "parallel.reduce_precision=bf16"
ROW, DDP = "parallel.weight_layout=row", "parallel.engine=ddp"
TWO_RANKS: Configurations = {
    "ddp": [DDP, BF16],
    "bank": [BF16],
    "row": [ROW, BF16],
    "fp32": ["parallel.precision=fp32"],
    "ddp reducing": [DDP, BF16, REDUCE],
    "bank reducing": [BF16, REDUCE],
}
ONE_ROUNDING = 2.0**-9
SAME_ROUNDINGS = ONE_ROUNDING / 10
Tensors = dict[str, Tensor]


def note_types(trainer: Trainer) -> tuple[set[torch.dtype], set[torch.dtype]]:
    """What the groups and the head compute with, noted in every forward pass."""
    of_groups: set[torch.dtype] = set()
    of_head: set[torch.dtype] = set()

    def note_head(head: nn.Module, inputs: tuple[Tensor], outputs: tuple[Tensor]) -> None:
        of_head.update(tensor.dtype for tensor in (head.weight, *outputs))
        assert not torch.equal(head.weight, head.weight.bfloat16().float())

    for group in trainer.model.block_groups():
        group.register_forward_hook(lambda _group, _inputs, output: of_groups.add(output.dtype))
    trainer.model.head.register_forward_hook(note_head)
    return of_groups, of_head


def held_types(trainer: Trainer) -> set[torch.dtype]:
    """Of all parameters, of the owners' matrices and of all optimizer state."""
    shards = held_shards(trainer).values()
    parameters = {parameter.dtype for parameter in trainer.model.parameters()}
    return parameters | {shard.tensor.dtype for shard in shards}


def train_and_resume(directory: Path, *overrides: str) -> tuple[list[float], StateShards]:
    """(losses, end) of five steps, the last two after a restart."""
    expected = torch.bfloat16 if BF16 in overrides else torch.float32
    losses: list[float] = []
    for last_step in (3, STEPS):
        trainer = build_trainer(directory, *TINY, *overrides)
        of_groups, of_head = note_types(trainer)
        for batch in trainer.loader:
            losses.append(float(trainer.train_step(batch)["train/loss"]))
            assert held_types(trainer) == {torch.float32}
            if trainer.step == last_step:
                break
        trainer.save()
        trainer.checkpointer.writer.wait()
        require_rows_of_owners(trainer)
        assert of_groups == {expected} and of_head == {torch.float32}
    assert len(losses) == STEPS
    return losses, held_shards(trainer)


def train_each(rank: int, world_size: int, directory: Path) -> dict[str, tuple]:
    return {n: train_and_resume(directory / n, *o) for n, o in TWO_RANKS.items()}


def distance(one: Tensors, other: Tensors) -> float:
    """The largest difference in weights and slow weights, of the largest weight."""
    errors = tensor_errors(one, other)
    return max(errors["model"], errors["slow"])


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensors]:
    """The tensors at the end; all ranks saw the same losses, and the last checkpoint holds them."""
    directory = tmp_path_factory.mktemp("precision")
    ranks, ends = run_processes(2, train_each, directory), {}
    for name in TWO_RANKS:
        losses, shards = zip(*(rank[name] for rank in ranks), strict=True)
        assert losses[0] == losses[1]
        ends[name] = joined(shards)
        facts, tensors = stored(directory / name)
        assert facts["step"] == STEPS
        assert_same_bits(tensors, checkpointed(ends[name]))
    ends["single"] = joined([train_and_resume(directory / "single", BF16)[1]])
    return ends


def test_every_engine_computes_in_bfloat16_and_keeps_float32(ends: dict[str, Tensors]) -> None:
    """Held, stored and loaded in float32; the ranks look at what computes, head and groups."""
    for name in ("ddp", "bank", "row"):
        assert 0 < distance(ends[name], ends["fp32"]) < ONE_ROUNDING
        assert distance(ends[name], ends["single"]) < ONE_ROUNDING
        for tensor in ends[name].values():
            assert tensor.dtype == torch.float32
            assert not torch.equal(tensor, tensor.bfloat16().float())


def test_layouts_differ_by_less_than_a_rounding(ends: dict[str, Tensors]) -> None:
    """Rows that return in bfloat16 are what a bank is cast to; the owners' X is the bank's."""
    assert distance(ends["row"], ends["bank"]) < SAME_ROUNDINGS
    assert distance(ends["ddp"], ends["bank"]) < SAME_ROUNDINGS


def test_gradients_summed_in_bfloat16_cost_a_rounding(ends: dict[str, Tensors]) -> None:
    for engine in ("ddp", "bank"):
        assert 0 < distance(ends[f"{engine} reducing"], ends[engine]) < ONE_ROUNDING
