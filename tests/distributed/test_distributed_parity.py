"""Eleven steps under every engine are those of one process, to 1e-9 in float64 (engine_runs.py)."""

import os
from collections.abc import Callable
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
    build_trainer,
    of_all_ranks,
    recipe,
    relative_errors,
    run_each,
    train,
)
from gloo import run_processes
from torch import Tensor

from lipnext_scale.checkpoint.exports import stable_parameters
from lipnext_scale.distributed import build_engine
from lipnext_scale.distributed.processes import fake_group
from lipnext_scale.models import LipNeXt
from lipnext_scale.optim import local_part
from lipnext_scale.training.trainer import Trainer

pytestmark = pytest.mark.slow
DDP, ROW, HSDP = "parallel.engine=ddp", "parallel.weight_layout=row", "parallel.shard_size=2"
MERGED, TWICE = "optim.parametrisation=merged", "parallel.accumulation=2"
KEEP, RECOMPUTE = "parallel.reshard_after_forward=false", "parallel.recompute_activations=true"
LAST = ["parallel.accumulation=3", "parallel.reduce_every_part=false"]
NARROW = ["model.width=5", "model.shift_ratio=0.25"]
SMALL_BANKS, ALONE = "model.blocks_per_bank=2", "parallel.share_step=false"
# world size → name → settings; each is compared with one process that has its FUNCTION.
ENGINES: dict[int, Configurations] = {
    1: {"row": ["parallel.engine=fsdp", ROW]},
    2: {"ddp": [DDP], "ddp alone": [DDP, ALONE], "bank": [], "row": [ROW]},
    3: {"ddp in parts": [DDP, TWICE], "bank 2, 2, 0": [SMALL_BANKS], "row": [ROW, MERGED]},
    4: {
        "ddp": [DDP, MERGED, TWICE],
        "ddp alone": [DDP, TWICE, ALONE],
        "ddp, a block for one rank": [DDP, "model.depth=1"],
        "ddp, two blocks in a bank": [DDP, SMALL_BANKS, MERGED],
        "bank": [MERGED, TWICE],
        "row": [ROW, MERGED, TWICE],
        "2x2 bank": [HSDP, MERGED, TWICE],
        "2x2 bank, product": [HSDP, TWICE],
        "2x2 bank alone": [HSDP, TWICE, ALONE],
        "2x2 bank, merged alone": [HSDP, MERGED, ALONE],
        "2x2 bank, a block for one rank": [HSDP, "model.depth=1"],
        "2x2 bank reduced last": [HSDP, SMALL_BANKS, *LAST, KEEP],
        "2x2 row": [HSDP, ROW, MERGED, TWICE],
        "bank 1, 0, 0, 0": ["model.depth=1"],
        "bank 2, 2, 0, 0": [SMALL_BANKS],
        "rows 2, 2, 1, 0": [ROW, *NARROW],
        "bank reduced last": [*LAST],
        "2x2 row reduced last": [HSDP, ROW, *LAST, KEEP, RECOMPUTE],
    },
}
FUNCTION = ("model.", "optim.")  # settings that change what is computed
CASES = [(world_size, name) for world_size, cases in ENGINES.items() for name in cases]


class Runs:
    """The runs that tests compare, each made once."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._single: dict[str, Outcome] = {}
        self._engines: dict[int, dict[str, Outcome]] = {}

    def single(self, *overrides: str) -> Outcome:
        model = [override for override in overrides if override.startswith(FUNCTION)]
        key = " ".join(model)
        if key not in self._single:
            self._single[key] = train(self.directory / f"single {key}", *model)
        return self._single[key]

    def engines(self, world_size: int) -> dict[str, Outcome]:
        if world_size not in self._engines:
            made = run_each(world_size, self.directory, ENGINES[world_size])
            self._engines[world_size] = made
        return self._engines[world_size]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("parity"))


def test_the_reference_run_has_everything_to_compare(runs: Runs) -> None:
    """It learns, clips some gradients and not all, ends between Lookahead steps."""
    run = runs.single()
    assert run.engine == "single, fp32"
    assert len(run.losses) == STEPS
    assert fmean(run.losses[-5:]) < 0.8 * fmean(run.losses[:5])
    limit = recipe(runs.directory).optim.clip_norm
    assert 3 <= sum(norm > 1.01 * limit for norm in run.norms) <= STEPS - 3
    tensors = run.tensors
    for name, tensor in tensors.items():
        if name.startswith("buffer."):
            assert tensor.abs().max() > 1e-4
        if name.startswith("model.") and (slow := name.replace("model.", "slow.")) in tensors:
            assert (tensor - tensors[slow]).abs().max() > 1e-4
        if name in run.weights_at_start:
            assert (tensor - run.weights_at_start[name]).abs().max() > 1e-3
    assert len(run.scores) == 2
    assert 0 < run.scores[-1]["test/nominal_cra"] < run.scores[-1]["test/clean_accuracy"]


def test_the_bound_is_above_rounding(runs: Runs) -> None:
    """Accumulation within one process: visible, and far below the bound."""
    parts = train(runs.directory / "parts", "parallel.accumulation=24")
    assert 0 < max(relative_errors(parts, runs.single()).values()) < BOUND / 10


@pytest.mark.parametrize("world_size, name", CASES)
def test_every_engine_trains_as_one_process_does(runs: Runs, world_size: int, name: str) -> None:
    """Losses, norms, weights, slow weights, moments, buffers; the same evaluation; every rank.

    Ranks with fewer matrices, rows or classes than others, or none, change nothing; nor does it
    whether replicas share the step.
    """
    ours, overrides = runs.engines(world_size)[name], ENGINES[world_size][name]
    mesh = "2 × 2" if HSDP in overrides else f"1 × {world_size}"
    layout = "row" if ROW in overrides else "bank"
    expected = "ddp, fp32" if DDP in overrides else f"fsdp {mesh}, {layout} layout, fp32"
    assert ours.engine == expected
    assert_parity(ours, runs.single(*overrides))


def test_every_start_is_that_of_the_model(runs: Runs) -> None:
    """Bit for bit the weights of LipNeXt(config, seed), whatever engine, layout and world size."""
    for world_size, name in CASES:
        overrides = ENGINES[world_size][name]
        configured = recipe(runs.directory, *overrides)
        with arithmetic(torch.float64):
            weights = stable_parameters(LipNeXt(configured.model, configured.run.seed))
        expected = {f"model.{key}": tensor for key, tensor in weights.items()}
        assert_same_bits(runs.engines(world_size)[name].weights_at_start, expected)


def test_uneven_shards_are_where_their_names_say(tmp_path: Path) -> None:
    """The cases of ENGINES: matrices over all banks, rows of a matrix, classes."""
    for name in (name for name in ENGINES[4] if name[-1].isdigit()):
        configured, held, classes = recipe(tmp_path, *ENGINES[4][name]), [], []
        for rank in range(4):
            with fake_group(rank, 4):
                model = build_engine(configured.parallel, "cpu").place(configured.model)
            counts = {key: local_part(p).shape[0] for key, p in model.named_parameters()}
            shards = [n for key, n in counts.items() if key.endswith(("bank", "matrices.0"))]
            held.append(sum(shards))
            classes.append(counts["head.weight"])
        assert ", ".join(map(str, held)) == name.partition(" ")[2]
        assert classes == [3, 3, 3, 1]


def clip_differently(trainer: Trainer) -> None:
    step = trainer.optimizers.step
    trainer.optimizers.step = (  # type: ignore[method-assign]
        lambda scale, usable=None: step(1.01 * scale, usable)
    )


def lose_a_part_of_the_batch(trainer: Trainer) -> None:
    forward = trainer.engine.forward

    def forward_the_last_only(images: Tensor, last: bool = True) -> tuple[Tensor, Tensor]:
        logits, weight = forward(images, last)
        return (logits, weight) if last else (logits.detach() + 0 * logits, weight)

    trainer.engine.forward = forward_the_last_only  # type: ignore[method-assign]


MISTAKES: list[Callable[[Trainer], None]] = [clip_differently, lose_a_part_of_the_batch]


def train_with_mistakes(rank: int, world_size: int, directory: Path) -> list[Outcome]:
    """Rank 1 makes the mistake."""
    return [
        train(directory / mistake.__name__, TWICE, change=mistake if rank == 1 else None)
        for mistake in MISTAKES
    ]


def test_a_mistake_of_one_rank_exceeds_the_bound(runs: Runs) -> None:
    for outcomes in zip(*run_processes(2, train_with_mistakes, runs.directory), strict=True):
        errors = relative_errors(of_all_ranks(outcomes), runs.single())
        assert max(errors["model"], errors["slow"]) > 1000 * BOUND, errors


@pytest.mark.parametrize("layout", ["bank", "row"])
def test_options_of_memory_and_time_change_no_bit(runs: Runs, layout: str) -> None:
    """Freeing, recomputing and prefetching decide when things are done, not what is computed."""
    common = ["model.blocks_per_bank=1", f"parallel.weight_layout={layout}", TWICE]
    other = [*common, KEEP, RECOMPUTE, "parallel.prefetch=2"]
    configurations = {"plain": common, "other": other}
    outcomes = run_each(2, runs.directory / f"options {layout}", configurations)
    plain, ours = outcomes.values()
    assert (ours.losses, ours.norms, ours.scores) == (plain.losses, plain.norms, plain.scores)
    assert_same_bits(ours.tensors, plain.tensors)


def train_compiled(rank: int, world_size: int, directory: Path) -> tuple[float, int]:
    """Five steps, compiled and not: how far they lie apart, and how many graphs there were."""
    # The machine's own cache may have kernels for other instruction sets of this CPU.
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(directory / "inductor")
    settings = ["parallel.engine=fsdp", "model.depth=1", "model.positional_embedding=false"]
    losses = {}
    with arithmetic(torch.float64):
        for name in ("false", "true"):
            trainer = build_trainer(directory / name, *settings, f"parallel.compile={name}")
            steps = zip(range(5), trainer.loader, strict=False)
            losses[name] = [float(trainer.train_step(b)["train/loss"]) for _, b in steps]
    distance = max(abs(a - b) for a, b in zip(*losses.values(), strict=True))
    return distance, torch._dynamo.utils.counters["stats"]["unique_graphs"]


def test_compiled_groups_train_as_the_others(tmp_path: Path) -> None:
    """Under FSDP; the compiler's kernels round differently. One rank: each compiles for itself."""
    [(distance, graphs)] = run_processes(1, train_compiled, tmp_path, timeout=300)
    assert graphs > 0
    assert distance <= BOUND
