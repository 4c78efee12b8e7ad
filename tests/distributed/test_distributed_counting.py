"""What a step sends to other ranks and what a rank keeps, counted on real processes."""

from dataclasses import dataclass
from pathlib import Path

import pytest
from count_runs import StepTraffic, allocated_by, calls, count_steps, small_trainers
from gloo import run_processes

from benchmarks.memory import training_memory
from lipnext_scale.distributed import ParallelConfig, build_engine
from lipnext_scale.models import LipNeXtConfig
from lipnext_scale.optim import OptimConfig

pytestmark = pytest.mark.slow
WORLD, WIDTH, MATRICES, STEPS = 4, 64, 16, 6
# Two groups of blocks, everything divisible by four ranks. Six steps have two Lookahead steps,
# three retractions inside step() and the end of an epoch.
SIZES = [
    f"model.width={WIDTH}",
    "model.num_classes=12",
    "model.depth=8",
    "model.blocks_per_bank=4",
    "optim.retract_every=2",
    "parallel.engine=fsdp",
]
ROW = "parallel.weight_layout=row"
CASES = {
    "bank": [],
    "hsdp": ["parallel.shard_size=2", "parallel.share_step=false"],
    "shared": ["parallel.shard_size=2"],
    "row": [ROW],
    "row bf16": [ROW, "parallel.precision=bf16"],
}


@dataclass(frozen=True)
class Measured:
    """A case on one rank: the traffic of its steps, what the rank keeps after them."""

    traffic: StepTraffic
    kept: int


def measure(rank: int, world: int, directory: Path) -> dict[str, Measured]:
    trainers = small_trainers(directory, [[*SIZES, *overrides] for overrides in CASES.values()])
    return {
        name: Measured(
            count_steps(trainer, STEPS), training_memory(trainer.engine, trainer.optimizers).total
        )
        for name, trainer in zip(CASES, trainers, strict=True)
    }


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Measured]]:
    return run_processes(WORLD, measure, tmp_path_factory.mktemp("counting"))


@pytest.mark.parametrize("case", ["bank", "hsdp"])
def test_the_manifold_step_of_banks_needs_no_communication(
    ranks: list[dict[str, Measured]], case: str
) -> None:
    """Also on Lookahead and retraction steps. All else are FSDP's collectives, norm and scalars.

    Two gathers and a reduction for each of two groups, one for the head.
    """
    groups, replicated = 2, case == "hsdp"
    expected = {
        "all_gather": 2 * groups + 1 + 1,
        "reduce_scatter": groups + 1,
        "all_reduce": 1 + (groups + 1) * replicated,
    }
    for rank in ranks:
        traffic = rank[case].traffic
        assert traffic.updates == [{}] * STEPS and traffic.retractions == [{}]
        assert [calls(step) for step in traffic.steps] == [expected] * STEPS


@pytest.mark.parametrize("case, out, back", [("row", 4, 4), ("row bf16", 4, 2)])
def test_the_row_layout_sends_each_row_once_each_way(
    ranks: list[dict[str, Measured]], case: str, out: int, back: int
) -> None:
    """A step() sends 8·P·(R-1)/R² bytes a rank (6 with bf16) within 5 %, by all-to-alls alone."""
    rows = MATRICES * WIDTH**2 * (WORLD - 1) / WORLD**2
    for rank in ranks:
        (retraction,) = rank[case].traffic.retractions
        for counted, width in [(u, out + back) for u in rank[case].traffic.updates] + [
            (retraction, back)
        ]:
            assert list(counted) == ["all_to_all"]
            assert width * rows <= counted["all_to_all"].bytes_sent <= 1.05 * width * rows


def test_replicas_that_share_the_step_exchange_weights_in_it(
    ranks: list[dict[str, Measured]],
) -> None:
    """Of each of two groups, once; in the backward pass a further reduction of it."""
    weights = 4 * MATRICES * WIDTH**2 // 2  # of a shard
    for rank in ranks:
        traffic = rank["shared"].traffic
        for update in traffic.updates:
            assert calls(update) == {"all_gather": 2}
            assert update["all_gather"].bytes_sent == weights // 2
        assert [calls(counted) for counted in traffic.retractions] == [{"all_gather": 2}]
        for step in traffic.steps[:4]:
            assert calls(step) == {"all_gather": 6 + 2, "reduce_scatter": 3 + 2, "all_reduce": 4}


@pytest.mark.parametrize("case, numbers", [("bank", 6.5), ("shared", 8.5), ("row", 7.5)])
def test_every_rank_keeps_its_share(
    ranks: list[dict[str, Measured]], case: str, numbers: float
) -> None:
    """Of X, gradient, m, v, B, the slow weights and M; in the row layout X at its owner as well.

    Two replicas that share the step have twice as much of X and its gradient.
    """
    share = numbers * 4 * WIDTH**2 * MATRICES / WORLD
    for rank in ranks:
        assert rank[case].kept == pytest.approx(share, rel=0.05)


def build(rank: int, world: int, layout: str, config: LipNeXtConfig) -> tuple[int, int, int]:
    """Bytes left by the model, the most there was, and the most with the optimizers."""
    parallel = ParallelConfig(engine="fsdp", weight_layout=layout, row_bucket_mb=1)
    engine = build_engine(parallel, "cpu")
    left, most, _ = allocated_by(lambda: engine.build(config, seed=0))
    # The least of five: buffers of exchanges may seem to be left (`allocated_by`).
    tries = [allocated_by(lambda: engine.optimizers(OptimConfig()))[1] for _ in range(5)]
    return left, most, left + min(tries)


@pytest.mark.parametrize("layout, width", [("bank", 128), ("row", 512)])
def test_no_rank_ever_has_the_whole_model(layout: str, width: int) -> None:
    """While 32 matrices come to 4 ranks, none has more at a time than it keeps and a few."""
    config = LipNeXtConfig(depth=16, width=width, image_size=8, in_channels=1)
    matrix, others = 4 * width**2, 0.2
    for left, most, most_with_optimizers in run_processes(4, build, layout, config):
        assert 8 * matrix <= left <= (8 + others) * matrix
        assert most <= (8 + 4 + others) * matrix  # what makes one orthogonal matrix
        if layout == "row":  # as many at the owner, two boxes for a block each way
            assert most_with_optimizers <= (8 + 8 + 6 + others) * matrix
