"""bfloat16 is for computing alone: weights, optimizer state and checkpoints stay float32.

The model is tiny, for products in bfloat16 are slow on the CPU. One rounding to bfloat16 is 2⁻⁹ of
a number; that is how far runs may lie apart that compute, or reduce, in different types. (They move
further than that.) Runs that differ only in how they are spread round the same numbers in the same
places, but where float32 round-off takes a number over the edge between two roundings; which is
rare and small, so these lie ten times closer together.
"""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from engine_runs import (
    SMOOTH,
    Configurations,
    assert_same_bits,
    build_trainer,
    held_pieces,
    joined,
    require_rows_of_owners,
    stored,
    tensor_errors,
)
from gloo import run_processes
from torch import Tensor, nn

from lipnext_scale.checkpoint import StateShards
from lipnext_scale.models import Head
from lipnext_scale.trainer import Trainer

# Some channels must be shifted: without, the first forward pass gives the channels that the stem
# pads with zeros nothing but rounding, and the gradient of their norm is a matter of chance.
TINY = [
    *SMOOTH,
    "model.depth=2",
    "model.width=8",
    "model.shift_ratio=0.25",
    "model.blocks_per_bank=1",
    "optim.lookahead=2",
]
STEPS = 5
BF16, FP32 = "parallel.precision=bf16", "parallel.precision=fp32"
REDUCE = "parallel.reduce_precision=bf16"
ROW, DDP = "parallel.weight_layout=row", "parallel.engine=ddp"
TWO_RANKS: Configurations = {
    "ddp": [DDP, BF16],
    "bank": [BF16],
    "row": [ROW, BF16],
    "fp32": [FP32],
}
REDUCING: Configurations = {
    "ddp reducing": [DDP, BF16, REDUCE],
    "bank reducing": [BF16, REDUCE],
    "row reducing": [ROW, BF16, REDUCE],
}
HSDP: Configurations = {
    "bank": [BF16, "parallel.shard_size=2"],
    "row": [ROW, BF16, "parallel.shard_size=2"],
}


class Seen:
    """What the groups and the head computed with, noted in every forward pass."""

    def __init__(self, trainer: Trainer) -> None:
        self.group_outputs: set[torch.dtype] = set()
        self.head_weights: set[torch.dtype] = set()
        self.head_outputs: set[torch.dtype] = set()
        self.rounded_heads = 0
        for group in trainer.model.block_groups():
            group.register_forward_hook(self._group)
        trainer.model.head.register_forward_pre_hook(self._head)
        trainer.model.head.register_forward_hook(self._logits)

    def _group(self, group: nn.Module, inputs: tuple[Tensor], output: Tensor) -> None:
        self.group_outputs.add(output.dtype)

    def _head(self, head: nn.Module, inputs: tuple[Tensor]) -> None:
        assert isinstance(head, Head)
        self.head_weights.add(head.weight.dtype)
        self.rounded_heads += torch.equal(head.weight, head.weight.bfloat16().float())

    def _logits(self, head: nn.Module, inputs: tuple[Tensor], outputs: tuple[Tensor]) -> None:
        self.head_outputs |= {output.dtype for output in outputs}


@dataclass(frozen=True)
class Result:
    losses: list[float]
    start: StateShards
    end: StateShards


ONE_ROUNDING = 2.0**-9
SAME_ROUNDINGS = ONE_ROUNDING / 10


def held_types(trainer: Trainer) -> set[torch.dtype]:
    """The types of all parameters, of the owners' matrices and of all optimizer state."""
    pieces = held_pieces(trainer).values()
    parameters = {parameter.dtype for parameter in trainer.model.parameters()}
    return parameters | {piece.tensor.dtype for piece in pieces}


def train_and_resume(directory: Path, *overrides: str) -> Result:
    """Five steps, of which the last two after a restart; types are looked at all the time."""
    expected = torch.bfloat16 if BF16 in overrides else torch.float32
    losses: list[float] = []
    start: StateShards = {}
    for last_step in (3, STEPS):
        trainer = build_trainer(directory, *TINY, *overrides)
        start = start or held_pieces(trainer, weights_only=True)
        require_rows_of_owners(trainer)
        seen = Seen(trainer)
        assert held_types(trainer) == {torch.float32}
        for batch in trainer.loader:
            losses.append(float(trainer.train_step(batch)["train/loss"]))
            assert held_types(trainer) == {torch.float32}
            if trainer.step == last_step:
                break
        trainer.save()
        trainer.state.wait()
        require_rows_of_owners(trainer)
        assert seen.group_outputs == {expected}
        assert seen.head_weights == seen.head_outputs == {torch.float32}
        assert seen.rounded_heads == 0
    assert len(losses) == STEPS  # the second trainer did take up where the first had stopped
    return Result(losses, start, held_pieces(trainer))


def train_each(
    rank: int, world_size: int, directory: Path, configurations: Configurations
) -> dict[str, Result]:
    return {
        name: train_and_resume(directory / f"{world_size} {name}", *overrides)
        for name, overrides in configurations.items()
    }


Tensors = dict[str, Tensor]


def weights(tensors: Tensors) -> Tensors:
    return {name: t for name, t in tensors.items() if name.startswith(("model.", "slow."))}


def distance(one: Tensors, other: Tensors) -> float:
    """The largest difference in weights and slow weights, of the largest weight."""
    return max(tensor_errors(weights(one), weights(other)).values())


def run_each(
    world_size: int, directory: Path, configurations: Configurations
) -> dict[str, Tensors]:
    """The tensors at the end; all ranks saw the same losses, and the last checkpoint holds them."""
    ranks = run_processes(world_size, train_each, directory, configurations)
    ends = {}
    for name in configurations:
        results = [rank[name] for rank in ranks]
        assert all(result.losses == results[0].losses for result in results)
        ends[name] = joined([result.end for result in results])
        facts, tensors = stored(directory / f"{world_size} {name}")
        assert facts["step"] == STEPS
        assert_same_bits(tensors, ends[name])
    return ends


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("precision")


@pytest.fixture(scope="module")
def single(directory: Path) -> Tensors:
    """One process, in bfloat16."""
    result = train_and_resume(directory / "single", BF16)
    start, end = joined([result.start]), joined([result.end])
    moved = tensor_errors({name: end[name] for name in start}, start)
    assert moved["model"] > 2 * ONE_ROUNDING
    return end


@pytest.fixture(scope="module")
def ends(directory: Path) -> dict[str, Tensors]:
    """Every configuration on two ranks."""
    return run_each(2, directory, TWO_RANKS)


def test_every_engine_computes_in_bfloat16_and_keeps_float32(
    ends: dict[str, Tensors], single: Tensors
) -> None:
    """Held, stored and loaded in float32; the workers look at what computes, head and groups."""
    for name in ("ddp", "bank", "row"):
        assert 0 < distance(ends[name], ends["fp32"]) < ONE_ROUNDING
        assert distance(ends[name], single) < ONE_ROUNDING
        for tensor in ends[name].values():
            assert tensor.dtype == torch.float32
            assert not torch.equal(tensor, tensor.bfloat16().float())


def test_layouts_differ_by_less_than_a_rounding(ends: dict[str, Tensors]) -> None:
    """Rows that return in bfloat16 are what a bank is cast to; the owners' X is the bank's."""
    assert distance(ends["row"], ends["bank"]) < SAME_ROUNDINGS
    assert distance(ends["ddp"], ends["bank"]) < SAME_ROUNDINGS


@pytest.mark.slow
def test_gradients_summed_in_bfloat16_cost_a_rounding(
    directory: Path, ends: dict[str, Tensors]
) -> None:
    """reduce_precision is seen, and does little."""
    reducing = run_each(2, directory, REDUCING)
    for engine in ("ddp", "bank", "row"):
        assert 0 < distance(reducing[f"{engine} reducing"], ends[engine]) < ONE_ROUNDING


@pytest.mark.slow
def test_replicas_in_bfloat16(directory: Path, single: Tensors) -> None:
    """2 × 2 ranks: the replicas stay equal bit for bit, and both layouts agree."""
    both = run_each(4, directory, HSDP)
    assert distance(both["row"], both["bank"]) < SAME_ROUNDINGS
    assert distance(both["bank"], single) < ONE_ROUNDING
