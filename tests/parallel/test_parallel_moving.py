"""Runs that move: stopped under one engine, layout and number of ranks, continued under another.

Everything through the run directory on disk, as `lipnext_scale.train` would. Where nothing changes
but that the run was interrupted, the arithmetic is the same and so is every bit at the end. Where
something changes, what is loaded has the bits of what was saved, and the end is that of one process
within the bound of test_parallel_parity.py.
"""

import base64
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_runs import (
    BOUND,
    STEPS,
    Outcome,
    Visit,
    arithmetic,
    assert_same_bits,
    build_trainer,
    checkpoint_content,
    continue_each,
    continue_run,
    held_pieces,
    joined,
    require_rows_of_owners,
    stored,
    tensor_errors,
    train,
)
from gloo import run_processes
from torch import Tensor

from lipnext_scale.checkpoint import StateShards
from lipnext_scale.run_directory import RunDirectory
from lipnext_scale.weights import load_run_model, save_export, stable_parameters

BANK: list[str] = []
ROW, DDP = ["parallel.weight_layout=row"], ["parallel.engine=ddp"]
HSDP = ["parallel.shard_size=2"]
Place = tuple[int, list[str]]  # ranks (0: one process without any group), overrides
SINGLE: Place = (0, [])


def visit(place: Place, runs: list[tuple[Path, int]]) -> list[list[Visit]]:
    """Continue runs, each up to a step; for each the visits of all ranks."""
    world_size, overrides = place
    if world_size == 0:
        return [[continue_run(path, last_step, *overrides)] for path, last_step in runs]
    jobs = [(path, last_step, overrides) for path, last_step in runs]
    ranks = run_processes(world_size, continue_each, jobs)
    return [list(visits) for visits in zip(*ranks, strict=True)]


def assert_found_everything(visits: list[Visit], facts: dict[str, Any], tensors: Any) -> None:
    """Bit for bit what the checkpoint holds: tensors, counters, place in the data, generator."""
    assert_same_bits(joined([visit.found for visit in visits]), tensors)
    for visit in visits:
        assert visit.first_step == facts["step"]
        assert visit.counters["loader"] == facts["loader"]
        assert visit.counters["optimizers"] == facts["optimizers"] != {}
        assert visit.counters["steps"] == {facts["step"]}
        assert bytes(visit.counters["rng"]) == base64.b64decode(facts["rng"])


def assert_end_of_one_process(directory: Path, single: Outcome) -> None:
    facts, tensors = stored(directory)
    assert facts["step"] == STEPS
    assert facts["optimizers"] == single.counters
    errors = tensor_errors(tensors, single.tensors)
    assert max(errors.values()) <= BOUND, errors


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return train(tmp_path_factory.mktemp("moving") / "single")


@pytest.fixture(scope="module")
def four_banks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """On four ranks in the bank layout: `straight` to the end, `half` stopped after 8 steps."""
    directory = tmp_path_factory.mktemp("four banks")
    visit((4, BANK), [(directory / "straight", STEPS), (directory / "half", 8)])
    return directory


CONTINUATIONS: dict[str, Place] = {
    "bank4": (4, BANK),
    "single": SINGLE,
    "bank3": (3, BANK),
    "bank2": (2, BANK),
    "ddp2": (2, DDP),
    "row3": (3, ROW),
    "2x2-row": (4, [*HSDP, *ROW]),
}
QUICK = {"bank4", "single"}


@pytest.mark.parametrize(
    "name",
    [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in CONTINUATIONS],
)
def test_a_run_of_four_ranks_continues_anywhere(
    four_banks: Path, single: Outcome, tmp_path: Path, name: str
) -> None:
    """All that was saved is found; the end is one process's, and on the same four bit for bit."""
    run = tmp_path / "run"
    shutil.copytree(four_banks / "half", run, symlinks=True)
    facts, tensors = stored(run)
    assert facts["step"] == 8
    [visits] = visit(CONTINUATIONS[name], [(run, STEPS)])
    assert_found_everything(visits, facts, tensors)
    assert_end_of_one_process(run, single)
    if name == "bank4":
        undisturbed, expected = stored(four_banks / "straight")
        ended, ours = stored(run)
        assert ended == undisturbed
        assert_same_bits(ours, expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    "place",
    [(3, ROW), (2, DDP), (4, HSDP), (4, [*HSDP, *ROW]), (3, [*BANK, "parallel.accumulation=2"])],
    ids=["row3", "ddp2", "2x2-bank", "2x2-row", "bank3-in-parts"],
)
def test_stopping_and_resuming_changes_no_bit(tmp_path: Path, place: Place) -> None:
    """Between Lookahead steps, in the middle of an epoch and at its end, under every engine."""
    visit(place, [(tmp_path / "straight", STEPS), (tmp_path / "stopped", 8)])
    visit(place, [(tmp_path / "stopped", 15)])
    visit(place, [(tmp_path / "stopped", STEPS)])
    facts, tensors = stored(tmp_path / "stopped")
    undisturbed, expected = stored(tmp_path / "straight")
    assert facts == undisturbed
    assert_same_bits(tensors, expected)


@pytest.mark.slow
def test_a_run_may_move_again_and_again(single: Outcome, tmp_path: Path) -> None:
    """bank(4) → row(3) → ddp(2) → bank(4) → single: nothing lost on any of the moves."""
    run = tmp_path / "run"
    journey = [((4, BANK), 5), ((3, ROW), 10), ((2, DDP), 14), ((4, BANK), 17), (SINGLE, STEPS)]
    for index, (place, last_step) in enumerate(journey):
        before = stored(run) if index else None
        [visits] = visit(place, [(run, last_step)])
        if before is not None:
            assert_found_everything(visits, *before)
        facts, tensors = stored(run)
        assert facts["step"] == last_step
        assert_same_bits(joined([visit.left for visit in visits]), tensors)
    assert_end_of_one_process(run, single)


@pytest.mark.slow
def test_checkpoints_written_aside_are_the_same(tmp_path: Path) -> None:
    """async_checkpoint: the training goes on while each of many is written, and changes none."""
    settings = [*ROW, "run.checkpoint_every=1", "run.keep_every=1"]
    runs = [
        (tmp_path / name, 7, [*settings, f"run.async_checkpoint={name}"])
        for name in ("true", "false")
    ]
    run_processes(2, continue_each, runs)
    for step in range(1, 8):
        aside, at_once = (
            checkpoint_content(path / "checkpoints" / f"step-{step:09d}") for path, _, _ in runs
        )
        assert aside[0] == at_once[0]
        assert_same_bits(aside[1], at_once[1])


@pytest.mark.slow
def test_regular_checkpoints_stay_as_configured(tmp_path: Path) -> None:
    """Written every 3 steps and at the end; the newest stays, and every sixth step's."""
    settings = ["run.checkpoint_every=3", "run.keep_checkpoints=1", "run.keep_every=6"]
    run_processes(2, continue_each, [(tmp_path / "run", STEPS, settings)])
    names = sorted(path.name for path in (tmp_path / "run" / "checkpoints").glob("step-*"))
    assert names == [f"step-{step:09d}" for step in (6, 12, 18, 20)]


def start_from(rank: int, world_size: int, directory: Path, export: Path) -> list[StateShards]:
    """The pieces of runs that start from an export: bank and row layout."""
    found = []
    for layout in ("bank", "row"):
        overrides = [f"parallel.weight_layout={layout}", f"run.init_from={export}"]
        with arithmetic(torch.float64):
            trainer = build_trainer(directory / layout, *overrides)
            assert trainer.step == 0
            require_rows_of_owners(trainer)
        found.append(held_pieces(trainer))
    return found


@pytest.mark.parametrize("layout", ["bank", pytest.param("row", marks=pytest.mark.slow)])
def test_a_trained_model_is_read_exported_and_continued(
    four_banks: Path, tmp_path: Path, layout: str
) -> None:
    """The slow weights of four ranks are the model of the run; an export starts sharded runs."""
    run = four_banks / "straight"
    if layout == "row":
        run = tmp_path / "run"
        visit((4, ROW), [(run, 8)])
    tensors = stored(run)[1]
    with arithmetic(torch.float64):
        model = load_run_model(RunDirectory(run))
    weights = {name: tensor.detach() for name, tensor in stable_parameters(model).items()}
    assert_same_bits(weights, named(tensors, "slow"))
    assert not torch.equal(weights["head.weight"], tensors["model.head.weight"])
    save_export(model, tmp_path / "model.safetensors")
    ranks = run_processes(3, start_from, tmp_path / "new", tmp_path / "model.safetensors")
    for pieces in zip(*ranks, strict=True):
        started = joined(pieces)
        assert_same_bits(named(started, "model"), weights)
        assert_same_bits(named(started, "slow"), weights)


def named(tensors: dict[str, Tensor], kind: str) -> dict[str, Tensor]:
    """The tensors of a kind, by the names of the weights."""
    prefix = f"{kind}."
    return {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
