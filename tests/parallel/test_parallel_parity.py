"""Twenty steps under every engine are those of one process.

Same numbers, other order of summation: a gradient is a sum over the tokens of a batch, which ranks,
parts of the batch and reductions cut differently. In float64 that changes nothing above 1e-9
(engine_runs.py), so no seed has to be chosen and the bound holds on every CPU.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean

import pytest
import torch
from engine_runs import (
    BOUND,
    STEPS,
    Configurations,
    Outcome,
    arithmetic,
    assert_parity,
    assert_same_bits,
    of_all_ranks,
    recipe,
    relative_errors,
    run_each,
    train,
)
from gloo import run_processes
from torch import Tensor

from lipnext_scale.models import LipNeXt
from lipnext_scale.parallel import training_pieces
from lipnext_scale.trainer import Trainer

ROW, HSDP = "parallel.weight_layout=row", "parallel.shard_size=2"
ENGINES: dict[int, Configurations] = {
    1: {"bank": ["parallel.engine=fsdp"], "row": ["parallel.engine=fsdp", ROW]},
    2: {"ddp": ["parallel.engine=ddp"], "bank": [], "row": [ROW]},
    3: {"ddp": ["parallel.engine=ddp"], "bank": [], "row": [ROW]},
    4: {
        "ddp": ["parallel.engine=ddp"],
        "bank": [],
        "row": [ROW],
        "2x2-bank": [HSDP],
        "2x2-row": [HSDP, ROW],
    },
}
PARAMETRISATIONS = {"product": [], "merged": ["model.parametrisation=merged"]}


class Runs:
    """The runs that tests compare, each made once."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._single: dict[str, Outcome] = {}
        self._engines: dict[tuple[str, int, int], dict[str, Outcome]] = {}

    def single(self, parametrisation: str) -> Outcome:
        if parametrisation not in self._single:
            directory = self.directory / parametrisation / "single"
            self._single[parametrisation] = train(directory, *settings(parametrisation, 1))
        return self._single[parametrisation]

    def engines(self, parametrisation: str, parts: int, world_size: int) -> dict[str, Outcome]:
        key = parametrisation, parts, world_size
        if key not in self._engines:
            configurations = {
                name: [*overrides, *settings(parametrisation, parts)]
                for name, overrides in ENGINES[world_size].items()
            }
            directory = self.directory / parametrisation / f"{parts} parts"
            self._engines[key] = run_each(world_size, directory, configurations)
        return self._engines[key]


def settings(parametrisation: str, parts: int) -> list[str]:
    return [*PARAMETRISATIONS[parametrisation], f"parallel.accumulation={parts}"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("parity"))


@pytest.mark.parametrize("parametrisation", PARAMETRISATIONS)
def test_the_run_that_is_compared_has_everything_to_compare(
    runs: Runs, parametrisation: str
) -> None:
    """It learns, clips some gradients and not all, ends between Lookahead steps."""
    run = runs.single(parametrisation)
    assert run.engine == "single, fp32"
    assert len(run.losses) == STEPS
    assert fmean(run.losses[-5:]) < 0.8 * fmean(run.losses[:5])
    limit = recipe(runs.directory).optim.clip_norm
    assert 4 <= sum(norm > 1.01 * limit for norm in run.norms) <= 16
    tensors = run.tensors
    for name, tensor in tensors.items():
        if name.startswith("buffer."):
            assert tensor.abs().max() > 1e-4
        if name.startswith("model."):
            assert (tensor - tensors[name.replace("model.", "slow.")]).abs().max() > 1e-4
            assert (tensor - run.weights_at_start[name]).abs().max() > 1e-3
    assert len(run.scores) == 2
    assert 0 < run.scores[-1]["test/nominal_cra"] < run.scores[-1]["test/clean_accuracy"]


def test_the_bound_is_above_rounding(runs: Runs) -> None:
    """Cutting a batch into parts within one process: seen, and far below the bound."""
    single = runs.single("product")
    parts = train(runs.directory / "parts", *settings("product", 24))
    assert 0 < max(relative_errors(parts, single).values()) < BOUND / 10


def description(engine: str, world_size: int) -> str:
    """What the engine that is meant says of itself."""
    if engine == "ddp":
        return "ddp, fp32"
    mesh = "2 × 2" if engine.startswith("2x2") else f"1 × {world_size}"
    return f"fsdp {mesh}, {engine.removeprefix('2x2-')} layout, fp32"


def parity_cases() -> Iterator[object]:
    """All engines with both parametrisations, the batch in one part and in two; the latter on even
    numbers of ranks alone."""
    for parametrisation, parts in (("product", 1), ("product", 2), ("merged", 2)):
        for world_size, engines in ENGINES.items():
            if parts > 1 and world_size % 2:
                continue
            quick = (parametrisation, parts) == ("product", 1) and world_size == 2
            for engine in engines:
                yield pytest.param(
                    parametrisation,
                    parts,
                    world_size,
                    engine,
                    id=f"{parametrisation}-parts{parts}-ranks{world_size}-{engine}",
                    marks=() if quick else pytest.mark.slow,
                )


@pytest.mark.parametrize(("parametrisation", "parts", "world_size", "engine"), list(parity_cases()))
def test_every_engine_trains_as_one_process_does(
    runs: Runs, parametrisation: str, parts: int, world_size: int, engine: str
) -> None:
    """Losses, norms, weights, slow weights, moments, buffers; the same evaluation; every rank."""
    ours = runs.engines(parametrisation, parts, world_size)[engine]
    assert ours.engine == description(engine, world_size)
    assert_parity(ours, runs.single(parametrisation))


@pytest.mark.parametrize(
    "world_size", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 3, 4))]
)
def test_every_start_is_that_of_the_model(runs: Runs, world_size: int) -> None:
    """Bit for bit the weights of LipNeXt(config, seed), whatever engine, layout and world size."""
    configured = recipe(runs.directory)
    with arithmetic(torch.float64):
        pieces = training_pieces(LipNeXt(configured.model, configured.run.seed), None)
    expected = {name: piece.tensor.detach() for name, piece in pieces.items()}
    assert_same_bits(runs.single("product").weights_at_start, expected)
    for run in runs.engines("product", 1, world_size).values():
        assert_same_bits(run.weights_at_start, expected)


def leave_its_gradient_out(trainer: Trainer) -> None:
    backward = trainer.engine.backward
    trainer.engine.backward = lambda loss: backward(0 * loss)  # type: ignore[method-assign]


def clip_a_little_differently(trainer: Trainer) -> None:
    clip = trainer.engine.clip_gradients
    trainer.engine.clip_gradients = (  # type: ignore[method-assign]
        lambda max_norm, norm: clip(1.01 * max_norm, norm)
    )


def look_ahead_at_another_step(trainer: Trainer) -> None:
    for group in trainer.optimizers.manifold.param_groups:
        group["lookahead"] = 7


def forget_the_retraction(trainer: Trainer) -> None:
    trainer.optimizers.retract = lambda: None  # type: ignore[method-assign]


def lose_a_part_of_the_batch(trainer: Trainer) -> None:
    forward = trainer.engine.forward

    def forward_the_last_only(images: Tensor, last: bool = True) -> tuple[Tensor, Tensor]:
        logits, weight = forward(images, last)
        return (logits, weight) if last else (logits.detach() + 0 * logits, weight)

    trainer.engine.forward = forward_the_last_only  # type: ignore[method-assign]


MISTAKES = {
    "gradient": leave_its_gradient_out,
    "clipping": clip_a_little_differently,
    "lookahead": look_ahead_at_another_step,
    "retraction": forget_the_retraction,
    "part": lose_a_part_of_the_batch,
}


def train_with_mistakes(rank: int, world_size: int, directory: Path) -> dict[str, Outcome]:
    """The second rank makes the mistake; the first does everything right."""
    outcomes = {}
    for name, mistake in MISTAKES.items():
        overrides = settings("product", parts=2 if name == "part" else 1)
        change = mistake if rank == 1 else None
        outcomes[name] = train(directory / name, *overrides, change=change)
    return outcomes


@pytest.mark.slow
def test_a_mistake_of_one_rank_would_be_seen(runs: Runs) -> None:
    """Every one of these takes some kind of number far over its bound."""
    ranks = run_processes(2, train_with_mistakes, runs.directory / "mistakes")
    for name in MISTAKES:
        run = of_all_ranks([outcomes[name] for outcomes in ranks])
        errors = relative_errors(run, runs.single("product"))
        assert max(errors["model"], errors["slow"]) > 1000 * BOUND, (name, errors)


# Groups of one block, so that there is something to prefetch and to free.
ONE_EACH = "model.blocks_per_bank=1"
SAME_ARITHMETIC: Configurations = {
    "kept weights": ["parallel.reshard_after_forward=false"],
    "recomputing": ["parallel.recompute_activations=true"],
    "no prefetch": ["parallel.prefetch=0"],
    "all and far prefetch": [
        "parallel.reshard_after_forward=false",
        "parallel.recompute_activations=true",
        "parallel.prefetch=2",
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["bank", "row"])
def test_options_of_memory_and_time_change_no_bit(runs: Runs, layout: str) -> None:
    """Freeing, recomputing and prefetching decide when things are done, not what is computed."""
    common = [ONE_EACH, f"parallel.weight_layout={layout}", *settings("product", 2)]
    configurations = {"plain": common} | {k: [*common, *v] for k, v in SAME_ARITHMETIC.items()}
    outcomes = run_each(2, runs.directory / f"options {layout}", configurations)
    plain = outcomes["plain"]
    assert_parity(plain, runs.single("product"))
    for name in SAME_ARITHMETIC:
        ours = outcomes[name]
        assert (ours.losses, ours.norms, ours.scores) == (plain.losses, plain.norms, plain.scores)
        assert_same_bits(ours.tensors, plain.tensors)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["bank", "row"])
def test_gradients_may_be_reduced_after_the_last_part_only(runs: Runs, layout: str) -> None:
    """Another order of summation again, with and without replicas, kept weights, recomputing."""
    common = [
        f"parallel.weight_layout={layout}",
        "parallel.reduce_every_part=false",
        *settings("product", 3),
    ]
    every = ["parallel.reshard_after_forward=false", "parallel.recompute_activations=true"]
    configurations = {"plain": common, "all": [*common, *every], "2x2": [*common, HSDP]}
    for ours in run_each(4, runs.directory / f"last {layout}", configurations).values():
        assert_parity(ours, runs.single("product"))


def train_compiled(rank: int, world_size: int, directory: Path) -> tuple[Outcome, int]:
    # What it compiled for other kernels of this CPU would be taken from the machine's own cache.
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(directory / "inductor")
    outcome = train(directory, "parallel.compile=true", *settings("product", 1))
    return outcome, torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.slow
def test_compiled_groups_train_as_the_others(runs: Runs) -> None:
    """The compiler's kernels round differently."""
    results = run_processes(2, train_compiled, runs.directory / "compiled", timeout=300)
    assert all(graphs > 0 for _, graphs in results)
    compiled = of_all_ranks([outcome for outcome, _ in results])
    assert_parity(compiled, runs.single("product"))
