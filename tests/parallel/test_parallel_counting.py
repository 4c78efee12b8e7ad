"""What a step says to other ranks and what a rank keeps, counted on real processes."""

from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from count_runs import (
    StepTraffic,
    allocated_by,
    calls,
    count_steps,
    small_trainers,
)
from gloo import run_processes

from lipnext_scale.models import LipNeXtConfig
from lipnext_scale.optim import OptimConfig, Optimizers, split_parameters
from lipnext_scale.parallel import ParallelConfig, build_engine
from lipnext_scale.parallel.estimate import training_memory

WIDTH, MATRICES, STEPS = 64, 8, 6
MATRIX = 4 * WIDTH**2
four = partial(pytest.param, 4, marks=pytest.mark.slow)  # ranks
# Two groups of blocks, everything divisible by four ranks. Six steps cross two Lookahead steps,
# three retractions inside step() and the end of an epoch.
SIZES = [
    f"model.width={WIDTH}",
    "model.num_classes=12",
    "model.blocks_per_bank=2",
    "optim.retract_every=2",
    "parallel.engine=fsdp",
]
ROW = "parallel.weight_layout=row"
CASES = {
    "bank": [],
    "row": [ROW],
    "row bf16": [ROW, "parallel.precision=bf16"],
    "hsdp": ["parallel.shard_size=2"],
    "uneven bank": ["model.depth=3", "model.blocks_per_bank=0"],
    "uneven row": ["model.depth=3", "model.blocks_per_bank=0", ROW],
}
IN_WORLD = {
    1: ["bank", "row", "uneven bank", "uneven row"],
    2: ["bank", "row", "row bf16"],
    3: ["bank"],
    4: list(CASES),
}


@dataclass(frozen=True)
class Measured:
    """A case on one rank: the traffic of its steps, what the rank keeps after them."""

    traffic: StepTraffic
    kept: int


def measure(rank: int, world: int, directory: Path) -> dict[str, Measured]:
    overrides = [[*SIZES, *CASES[name]] for name in IN_WORLD[world]]
    measured = {}
    for name, trainer in zip(IN_WORLD[world], small_trainers(directory, overrides), strict=True):
        traffic = count_steps(trainer, STEPS)
        kept = training_memory(trainer.engine, trainer.optimizers).total
        measured[name] = Measured(traffic, kept)
    return measured


@cache
def all_cases(world: int) -> list[dict[str, Measured]]:
    with TemporaryDirectory() as directory:
        return run_processes(world, measure, Path(directory))


def on_ranks(world: int, case: str) -> list[Measured]:
    return [measured[case] for measured in all_cases(world)]


# ---- what a step sends ---------------------------------------------------------------------------

BANKS = [(2, "bank"), (3, "bank"), four("bank"), four("hsdp")]


@pytest.mark.parametrize("world, case", BANKS)
def test_the_bank_layout_moves_its_matrices_in_silence(world: int, case: str) -> None:
    """No collective in step() or retract(), on Lookahead and retraction steps as on any other."""
    for rank in on_ranks(world, case):
        assert rank.traffic.updates == [{}] * STEPS
        assert rank.traffic.retractions == [{}]


@pytest.mark.parametrize("world, case", BANKS)
def test_a_step_of_the_bank_layout_has_fsdps_collectives_and_two_more(
    world: int, case: str
) -> None:
    """Two gathers and a reduction for each of two groups, one for the head; norm and scalars."""
    groups, replicated = 2, case == "hsdp"
    expected = {
        "all_gather": 2 * groups + 1 + 1,
        "reduce_scatter": groups + 1,
        "all_reduce": 1 + (groups + 1) * replicated,
    }
    for rank in on_ranks(world, case):
        assert [calls(step) for step in rank.traffic.steps] == [expected] * STEPS


@pytest.mark.parametrize("case, out, back", [("row", 4, 4), ("row bf16", 4, 2)])
@pytest.mark.parametrize("world", [2, four()])
def test_the_row_layout_sends_each_row_once_each_way(
    world: int, case: str, out: int, back: int
) -> None:
    """A step() sends 8·P·(R-1)/R² bytes a rank (6 with bf16) within 5 %, by all-to-alls alone."""
    rows = MATRICES * WIDTH**2 * (world - 1) / world**2
    for rank in on_ranks(world, case):
        for update in rank.traffic.updates:
            assert list(update) == ["all_to_all"]
            assert (
                (out + back) * rows <= update["all_to_all"].bytes_sent <= 1.05 * (out + back) * rows
            )
        (retraction,) = rank.traffic.retractions
        assert list(retraction) == ["all_to_all"]
        assert back * rows <= retraction["all_to_all"].bytes_sent <= 1.05 * back * rows


@pytest.mark.parametrize("world", [2, four()])
def test_a_step_of_the_row_layout_adds_nothing_but_all_to_alls(world: int) -> None:
    """Beside these it has the collectives of the bank layout, not one more and not a byte."""
    for row, bank in zip(on_ranks(world, "row"), on_ranks(world, "bank"), strict=True):
        beside = [
            {name: counted for name, counted in step.items() if name != "all_to_all"}
            for step in row.traffic.steps
        ]
        assert beside == bank.traffic.steps


# ---- what a rank keeps ---------------------------------------------------------------------------


def total(case: str) -> int:
    """What one process keeps that has all."""
    return on_ranks(1, case)[0].kept


@pytest.mark.slow
@pytest.mark.parametrize("case", ["bank", "row"])
def test_every_rank_keeps_its_share(case: str) -> None:
    """Where the matrices divide by the ranks, each keeps a quarter of one process's total."""
    for rank in on_ranks(4, case):
        assert rank.kept == pytest.approx(total(case) / 4, rel=0.05)


def test_one_process_keeps_six_numbers_for_each_of_a_matrix() -> None:
    """X, gradient, m, v, B and the slow weights; with the row layout X at its owner as well."""
    assert total("bank") == pytest.approx(6 * MATRICES * MATRIX, rel=0.05)
    assert total("row") - total("bank") == pytest.approx(MATRICES * MATRIX, rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("case, numbers", [("uneven bank", 6), ("uneven row", 7)])
def test_uneven_matrices_cost_at_most_one_more(case: str, numbers: int) -> None:
    """Six matrices on four ranks: none is above its share by more than a matrix with its state."""
    kept = [rank.kept for rank in on_ranks(4, case)]
    assert max(kept) <= total(case) / 4 + numbers * MATRIX
    assert sum(kept) >= total(case)


# ---- what a rank has while the model is built ----------------------------------------------------


def build(rank: int, world: int, layout: str, config: LipNeXtConfig) -> tuple[int, int, int]:
    parallel = ParallelConfig(engine="fsdp", weight_layout=layout, row_bucket_mb=1)
    engine = build_engine(parallel, "cpu")
    left, most, model = allocated_by(lambda: engine.build(config, seed=0))
    _, most_of_optimizers, _ = allocated_by(
        lambda: Optimizers(split_parameters(model), OptimConfig(), engine.manifold_optimizer)
    )
    return left, most, left + most_of_optimizers


@pytest.mark.parametrize("layout, width", [("bank", 128), ("row", 512)])
def test_no_rank_ever_has_the_whole_model(layout: str, width: int) -> None:
    """While 32 matrices come to 4 ranks, none has more at a time than it keeps and a few."""
    config = LipNeXtConfig(depth=16, width=width, image_size=8, in_channels=1)
    matrix, others = 4 * width**2, 0.2
    for left, most, most_with_optimizers in run_processes(4, build, layout, config):
        assert 8 * matrix <= left <= (8 + others) * matrix
        assert most <= (8 + 4 + others) * matrix  # what makes one orthogonal matrix
        if layout == "row":  # as many at the owner, its gradient, boxes for one matrix each way
            assert most_with_optimizers <= (8 + 8 + 1 + 4 + others) * matrix
