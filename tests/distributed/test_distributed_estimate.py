"""What is estimated from shapes is what real processes keep and send."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch
from count_runs import Counted, count_steps, small_trainers, usually_left
from gloo import run_processes

from benchmarks.memory import Memory, training_memory
from lipnext_scale.distributed.estimate import RankEstimate, estimate
from lipnext_scale.training.trainer import Trainer

pytestmark = pytest.mark.slow
FSDP, DDP, ROW = "parallel.engine=fsdp", "parallel.engine=ddp", "parallel.weight_layout=row"
HSDP, TWICE = "parallel.shard_size=2", "parallel.accumulation=2"
BF16, BF16_SUMS = "parallel.precision=bf16", "parallel.reduce_precision=bf16"
LAST, KEEP = "parallel.reduce_every_part=false", "parallel.reshard_after_forward=false"
ALONE = "parallel.share_step=false"
# Seven blocks in groups of three: seldom divisible by ranks. 18 rows are not by 4.
UNEVEN = ["model.depth=7", "model.blocks_per_bank=3", "model.width=18"]
TWO_GROUPS = "model.blocks_per_bank=2"
# The padding of uneven shards, HSDP and row ownership show on four ranks, the rest on two.
CASES: dict[int, list[list[str]]] = {
    2: [
        [FSDP, TWO_GROUPS, TWICE, LAST],
        [FSDP, TWO_GROUPS, KEEP, TWICE],
        [FSDP, TWO_GROUPS, BF16, BF16_SUMS, TWICE],
        [FSDP, TWO_GROUPS, "parallel.recompute_activations=true", "parallel.prefetch=2"],
        [FSDP, "model.positional_embedding=false", "optim.lookahead=0", "parallel.prefetch=0"],
        [ROW, TWO_GROUPS, TWICE],
        [ROW, BF16, KEEP],
        [DDP, TWICE],
        [DDP, BF16, BF16_SUMS],
        [DDP, ALONE],
    ],
    4: [
        [FSDP, *UNEVEN],
        [FSDP, BF16, "model.depth=1"],
        [HSDP, *UNEVEN, TWICE],
        [HSDP, TWO_GROUPS, TWICE, LAST, BF16, BF16_SUMS],
        [ROW, "optim.lookahead=0", *UNEVEN],
        [ROW, HSDP, BF16],
        [FSDP, "parallel.shard_size=1", BF16],
        [HSDP, *UNEVEN, ALONE, TWICE],
        [DDP, *UNEVEN, TWICE],
        [HSDP, *UNEVEN, "model.layer=sandwich"],
    ],
}


@dataclass(frozen=True)
class Compared:
    """One rank of a case."""

    estimate: RankEstimate
    sent: Counted
    memory: Memory


def compare(rank: int, world: int, directory: Path) -> list[Compared]:
    return [compare_case(trainer) for trainer in small_trainers(directory, CASES[world])]


def estimate_for(trainer: Trainer) -> RankEstimate:
    engine, recipe = trainer.engine, trainer.recipe
    return estimate(engine, engine.place(recipe.model), recipe.optim)


def compare_case(trainer: Trainer) -> Compared:
    *_, step = count_steps(trainer, 3).steps  # in the second DDP sorts its buckets anew
    return Compared(
        estimate_for(trainer),
        step,
        training_memory(trainer.engine, trainer.optimizers),
    )


@pytest.mark.parametrize("world", CASES)
def test_bytes_are_as_estimated(world: int, tmp_path: Path) -> None:
    """Parameters, gradients and optimizer state to the byte, on every rank; every collective to the
    byte, but for the step's own scalars."""
    ranks = run_processes(world, compare, tmp_path)
    for compared in [case for cases in ranks for case in cases]:
        expected, memory = compared.estimate, compared.memory
        assert (memory.parameters, memory.gradients, memory.optimizer) == (
            expected.parameters,
            expected.gradients,
            expected.optimizer,
        )
        sent = {name: collective.bytes_sent for name, collective in compared.sent.items()}
        scalars = 3 * 4 * (world - 1)  # loss, accuracy, stop request
        norm = 2 * 8 * (world - 1) // world
        gathered = sent.pop("all_gather", 0) + sent.pop("broadcast", 0)
        assert gathered - scalars == expected.all_gather
        reduced = sent.pop("reduce_scatter", 0) + sent.pop("reduce", 0)
        assert reduced == expected.reduce_scatter
        assert sent.pop("all_reduce", 0) - norm == expected.all_reduce
        assert sent.pop("all_to_all", 0) == expected.all_to_all
        assert not sent
    if world == 4:  # 3, 3 and 1 blocks: a rank without one sends and keeps as much padding
        first, last = ranks[0][0], ranks[-1][0]
        assert (first.estimate.matrices, last.estimate.matrices) == (6, 0)
        assert first.memory.parameters == last.memory.parameters
        assert first.memory.optimizer > 10 * last.memory.optimizer
        assert first.sent == last.sent


# ---- what is there for a while -------------------------------------------------------------------


def leave(rank: int, world: int, directory: Path, cases: list[list[str]]) -> list[tuple[int, int]]:
    """What a forward pass of one image leaves for the backward pass, and the estimate of it."""
    pairs, images = [], torch.rand(1, 1, 8, 8)
    for trainer in small_trainers(directory, cases):
        trainer.train_step(next(iter(trainer.loader)))
        forward = partial(trainer.engine.forward, images)
        left = usually_left(forward, partial(go_back, trainer))
        pairs.append((left, estimate_for(trainer).gathered))
    return pairs


def go_back(trainer: Trainer, output: tuple[torch.Tensor, torch.Tensor]) -> None:
    trainer.engine.backward(output[0].sum())


def test_gathered_weights_are_as_estimated(tmp_path: Path) -> None:
    """All of them, padded, in the type that computes, and W; activations are small beside them."""
    wide = [FSDP, KEEP, "model.width=192"]
    cases = [
        [*wide, "model.depth=7", "model.blocks_per_bank=3"],
        [*wide, "optim.parametrisation=merged"],
        [*wide, BF16, "parallel.recompute_activations=true"],
        [*wide, BF16, ROW],
    ]
    for pairs in run_processes(3, leave, tmp_path, cases):
        for found, expected in pairs:
            assert expected <= found <= 1.05 * expected
