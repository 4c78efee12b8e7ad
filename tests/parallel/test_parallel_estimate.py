"""What is estimated from shapes is what real processes keep and send."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import torch.distributed as dist
from count_runs import Counted, bytes_of_whole_gradients, count_steps, small_trainers, usually_left
from gloo import run_processes

from lipnext_scale.parallel import FSDPEngine
from lipnext_scale.parallel.estimate import Memory, RankEstimate, estimate, training_memory
from lipnext_scale.parallel.rows import WORD
from lipnext_scale.trainer import Trainer

pytestmark = pytest.mark.slow
FSDP, DDP, ROW = "parallel.engine=fsdp", "parallel.engine=ddp", "parallel.weight_layout=row"
HSDP, TWICE = "parallel.shard_size=2", "parallel.accumulation=2"
BF16, BF16_SUMS = "parallel.precision=bf16", "parallel.reduce_precision=bf16"
LAST, KEEP = "parallel.reduce_every_part=false", "parallel.reshard_after_forward=false"
# Seven blocks in groups of three: seldom divisible by ranks. 18 rows are not by 4.
UNEVEN = ["model.depth=7", "model.blocks_per_bank=3", "model.width=18"]
TWO_GROUPS = "model.blocks_per_bank=2"
CASES: dict[int, list[list[str]]] = {
    1: [[], [FSDP], [FSDP, ROW], [FSDP, BF16, TWICE]],
    2: [
        [FSDP],
        [FSDP, TWO_GROUPS, TWICE],
        [FSDP, TWO_GROUPS, TWICE, LAST],
        [FSDP, TWO_GROUPS, KEEP],
        [FSDP, TWO_GROUPS, KEEP, TWICE],
        [FSDP, TWO_GROUPS, BF16],
        [FSDP, TWO_GROUPS, BF16, BF16_SUMS, TWICE],
        [FSDP, TWO_GROUPS, "parallel.recompute_activations=true", "parallel.prefetch=2"],
        [FSDP, "model.positional_embedding=false", "optim.lookahead=0", "parallel.prefetch=0"],
        [ROW, TWO_GROUPS, TWICE],
        [ROW, BF16, KEEP],
        [ROW, "optim.lookahead=0", *UNEVEN],
        [DDP],
        [DDP, TWICE],
        [DDP, BF16, BF16_SUMS],
    ],
    3: [[FSDP, *UNEVEN], [FSDP, TWICE, LAST], [ROW, *UNEVEN], [DDP]],
    4: [
        [FSDP, *UNEVEN],
        [FSDP, BF16, "model.depth=1"],
        [HSDP, *UNEVEN],
        [HSDP, TWO_GROUPS, TWICE],
        [HSDP, TWO_GROUPS, TWICE, LAST, BF16, BF16_SUMS],
        [ROW, *UNEVEN],
        [ROW, HSDP, BF16],
        [ROW, "model.depth=1"],
        [FSDP, "parallel.shard_size=1", BF16],
    ],
}
EACH = [(world, index) for world, cases in CASES.items() for index in range(len(cases))]
NAMES = [
    f"{world}: " + " ".join(override.split(".")[1] for override in CASES[world][index])
    for world, index in EACH
]
each_case = pytest.mark.parametrize(
    "world, case",
    [pytest.param(world, case, id=name) for (world, case), name in zip(EACH, NAMES, strict=True)],
)


@dataclass(frozen=True)
class Compared:
    """One rank of a case."""

    estimate: RankEstimate
    sent: Counted
    memory: Memory
    sharded: bool


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
        isinstance(trainer.engine, FSDPEngine),
    )


@cache
def ranks_of(world: int) -> list[list[Compared]]:
    with TemporaryDirectory() as directory:
        return run_processes(world, compare, Path(directory))


def on_ranks(world: int, case: int) -> list[Compared]:
    return [cases[case] for cases in ranks_of(world)]


@each_case
def test_bytes_kept_are_as_estimated(world: int, case: int) -> None:
    """Parameters, gradients and optimizer state, to the byte, on every rank."""
    for rank in on_ranks(world, case):
        expected, memory = rank.estimate, rank.memory
        assert (memory.parameters, memory.gradients, memory.optimizer) == (
            expected.parameters,
            expected.gradients,
            expected.optimizer,
        )
        assert memory.total == expected.kept


@each_case
def test_bytes_sent_are_as_estimated(world: int, case: int) -> None:
    """Every collective to the byte, but for the step's own scalars and the row layout's words."""
    for rank in on_ranks(world, case):
        sent = {name: collective.bytes_sent for name, collective in rank.sent.items()}
        scalars = 3 * 4 * (world - 1)  # loss, accuracy, wish to stop
        norm = 2 * 8 * (world - 1) // world * rank.sharded
        assert sent.pop("all_gather", 0) - scalars == rank.estimate.all_gather
        assert sent.pop("reduce_scatter", 0) == rank.estimate.reduce_scatter
        assert sent.pop("all_reduce", 0) - norm == rank.estimate.all_reduce
        words = 4 * WORD * (world - 1)
        assert 0 <= sent.pop("all_to_all", 0) - rank.estimate.all_to_all <= words
        assert not sent


def test_uneven_shards_are_padded() -> None:
    """A rank without a matrix of a group sends, and keeps twice, as much as one that has one."""
    first, *_, last = on_ranks(4, 0)  # 6, 6 and 2 matrices on 4 ranks
    assert (first.estimate.matrices, last.estimate.matrices) == (5, 0)
    assert first.memory.parameters == last.memory.parameters
    assert first.memory.optimizer > 10 * last.memory.optimizer
    assert first.sent == last.sent


# ---- what is there for a while -------------------------------------------------------------------


@dataclass(frozen=True)
class Pair:
    """Bytes on one rank, of one case."""

    found: int
    expected: int


def leave(rank: int, world: int, directory: Path, cases: list[list[str]]) -> list[Pair]:
    """What a forward pass of one image leaves for the backward pass, beside the estimate."""
    pairs, images = [], torch.rand(1, 1, 8, 8)
    for trainer in small_trainers(directory, cases):
        trainer.train_step(next(iter(trainer.loader)))
        forward = partial(trainer.engine.forward, images)
        left = usually_left(forward, partial(go_back, trainer))
        pairs.append(Pair(left, estimate_for(trainer).gathered))
    return pairs


def go_back(trainer: Trainer, output: tuple[torch.Tensor, torch.Tensor]) -> None:
    trainer.engine.backward(output[0].sum())


@pytest.mark.parametrize("world", [1, 3])
def test_gathered_weights_are_as_estimated(world: int, tmp_path: Path) -> None:
    """All of them, padded, in the type that computes, and W; activations are small beside them."""
    wide = [FSDP, KEEP, "model.width=192"]
    cases = [
        [*wide, "model.depth=7", "model.blocks_per_bank=3"],
        [*wide, "model.parametrisation=merged"],
        [*wide, BF16, "parallel.recompute_activations=true"],
        [*wide, BF16, ROW],
    ]
    for pairs in run_processes(world, leave, tmp_path, cases):
        for pair in pairs:
            assert pair.expected <= pair.found <= 1.05 * pair.expected


def hold(rank: int, world: int, directory: Path, cases: list[list[str]]) -> list[Pair]:
    """What a part before the last leaves behind, beside what the estimate adds for it."""
    pairs = []
    for trainer in small_trainers(directory, cases):
        for batch in islice(trainer.loader, 2):
            trainer.train_step(batch)
        trainer.optimizers.zero_grad()
        assert bytes_of_whole_gradients(trainer.model) == 0
        part(trainer, last=False)
        held = bytes_of_whole_gradients(trainer.model)
        last_part(trainer)
        with_gradients, config = estimate_for(trainer).gathered, trainer.engine.config
        trainer.engine.config = replace(config, reduce_every_part=True)
        pairs.append(Pair(held, with_gradients - estimate_for(trainer).gathered))
    return pairs


def part(trainer: Trainer, last: bool) -> None:
    go_back(trainer, trainer.engine.forward(torch.rand(2, 1, 8, 8), last=last))


def last_part(trainer: Trainer) -> None:
    """The gradients are summed over ranks, and gone."""
    part(trainer, last=True)
    trainer.optimizers.zero_grad()


def test_gradients_that_are_summed_last_are_whole_until_then(tmp_path: Path) -> None:
    """Between two parts a rank has all gradients, in the type in which they will be summed."""
    common = [FSDP, "model.width=96", TWICE, LAST]
    cases = [common, [*common, BF16], [*common, BF16, BF16_SUMS]]
    for pairs in run_processes(2, hold, tmp_path, cases):
        assert [pair.found for pair in pairs] == [pair.expected for pair in pairs]
        assert pairs[1].expected > 1.9 * pairs[2].expected


def fill_buffers(rank: int, world: int, directory: Path, cases: list[list[str]]) -> list[Pair]:
    """All that is sent from or received into, beside the estimate of all buffers."""
    pairs, send = [], dist.all_to_all_single
    for trainer in small_trainers(directory, cases):
        boxes: dict[int, int] = {}
        for step, batch in enumerate(islice(trainer.loader, 5)):
            if step == 3:  # they have grown
                dist.all_to_all_single = partial(noting, boxes, send)
            trainer.train_step(batch)
        dist.all_to_all_single = send
        pairs.append(Pair(sum(boxes.values()), estimate_for(trainer).buffers))
    return pairs


def noting(
    boxes: dict[int, int],
    send: Callable[..., Any],
    output: torch.Tensor,
    source: torch.Tensor,
    **arguments: Any,
) -> Any:
    for storage in (output.untyped_storage(), source.untyped_storage()):
        boxes[storage.data_ptr()] = storage.nbytes()
    return send(output, source, **arguments)


def test_buffers_of_the_row_layout_are_as_estimated(tmp_path: Path) -> None:
    """Two boxes each way but for a few words, and whole gradients: of 4 matrices in a bucket."""
    cases = [[ROW, "model.width=64"], [ROW, "model.width=64", BF16]]
    for pairs in run_processes(2, fill_buffers, tmp_path, cases):
        for pair in pairs:
            assert pair.found == pytest.approx(pair.expected - 4 * 4 * 64**2, rel=0.002)


def test_buckets_make_the_buffers_smaller(tmp_path: Path) -> None:
    """With a matrix of each owner in a bucket, there are boxes and a gradient for one alone."""
    cases = [[ROW, "model.width=512", "parallel.row_bucket_mb=1"]]
    for (pair,) in run_processes(2, fill_buffers, tmp_path, cases):
        assert pair.found == pytest.approx(pair.expected - 4 * 512**2, rel=0.002)
        assert pair.expected < 6 * 4 * 512**2
