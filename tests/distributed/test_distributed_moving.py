"""Runs that move: stopped under one engine, layout and number of ranks, continued under another.

Everything goes through the run directory on disk, as with `lipnext_scale.train`. A run that is only
interrupted ends with the same bits. A run that moves loads the bits that were saved, and ends as
one process does, within the bounds of engine_runs.py.
"""

import base64
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_runs import (
    BOUND,
    ROUNDING,
    SMOOTH,
    STEPS,
    ULP,
    Configurations,
    Visit,
    arithmetic,
    assert_same_bits,
    build_trainer,
    checkpointed,
    continue_each,
    continue_run,
    dtype_of,
    held_shards,
    joined,
    require_rows_of_owners,
    rounding_alone,
    stored,
    tensor_errors,
    train,
)
from gloo import run_processes
from torch import Tensor
from training.small import checkpoint_content

from lipnext_scale.checkpoint import StateShards
from lipnext_scale.checkpoint.exports import save_export, stable_parameters
from lipnext_scale.config.run_directory import RunDirectory

pytestmark = pytest.mark.slow
ROW, DDP = ["parallel.weight_layout=row"], ["parallel.engine=ddp"]
HSDP, TWICE = ["parallel.shard_size=2"], ["parallel.accumulation=2"]
ALONE = ["parallel.share_step=false"]
OFFLOAD, BF16 = "parallel.offload_optimizer=true", "parallel.precision=bf16"
ZERO = {
    stage: [*SMOOTH, "parallel.engine=deepspeed", f"parallel.zero_stage={stage}"]
    for stage in (1, 2, 3)
}
Place = tuple[int, list[str]]  # ranks (0: one process without any group), overrides


def visit(place: Place, run: Path, last_step: int) -> list[Visit]:
    """Continue a run up to a step; the visits of all ranks."""
    world_size, overrides = place
    if world_size == 0:
        return [continue_run(run, last_step, *overrides)]
    ranks = run_processes(world_size, continue_each, [(run, last_step, overrides)])
    return [visits[0] for visits in ranks]


def assert_found_everything(visits: list[Visit], facts: dict[str, Any], tensors: Any) -> None:
    """Bit for bit what the checkpoint holds: tensors, counters, place in the data, generator."""
    assert_same_bits(checkpointed(joined([visit.found for visit in visits])), tensors)
    for visit in visits:
        assert visit.first_step == facts["step"]
        assert visit.counters["loader"] == facts["loader"]
        assert visit.counters["optimizers"] == facts["optimizers"] != {}
        assert visit.counters["steps"] == {facts["step"]}
        assert bytes(visit.counters["rng"]) == base64.b64decode(facts["rng"])


JOURNEYS: dict[str, list[tuple[Place, int]]] = {
    "float64": [
        ((4, []), 2),
        ((3, ROW), 4),
        ((2, DDP), 5),
        ((3, [*DDP, *ALONE]), 6),
        ((4, [*HSDP, *ROW]), 7),
        ((4, HSDP), 8),
        ((4, [*HSDP, *ALONE]), 9),
        ((3, [*DDP, *TWICE]), 10),
        ((0, []), STEPS),
    ],
    "deepspeed": [
        ((2, ZERO[2]), 2),
        ((2, [*ZERO[3], *TWICE]), 4),
        ((4, ZERO[1]), 5),
        ((0, SMOOTH), 6),
        ((2, [*ZERO[3], OFFLOAD]), 8),
        ((3, [*SMOOTH, *ROW]), 9),
        ((1, ZERO[2]), STEPS),
    ],
}


@pytest.mark.parametrize("name", JOURNEYS)
def test_a_run_moves_between_all_engines(name: str, tmp_path: Path) -> None:
    """Each finds the bits that the one before left: weights, moments, buffers, slow weights."""
    if name == "deepspeed":
        pytest.importorskip("deepspeed")
    run, before = tmp_path / "run", None
    for place, last_step in JOURNEYS[name]:
        visits = visit(place, run, last_step)
        if before is not None:
            assert_found_everything(visits, *before)
        facts, tensors = before = stored(run)
        assert facts["step"] == last_step
        assert_same_bits(checkpointed(joined([visit.left for visit in visits])), tensors)
    single = train(tmp_path / "single", *(SMOOTH if name == "deepspeed" else []))
    assert facts["optimizers"] == single.counters
    errors = tensor_errors(tensors, checkpointed(single.tensors))
    if name == "deepspeed":
        rounding = rounding_alone(tmp_path, single)
        assert all(error <= ROUNDING * max(rounding[k], ULP) for k, error in errors.items())
    else:
        assert max(errors.values()) <= BOUND, errors


STOPPED: dict[int, Configurations] = {
    2: {"ddp": [*DDP, *TWICE], "2 offloaded": [*ZERO[2], OFFLOAD], "3 bf16": [*ZERO[3], BF16]},
    4: {"bank": [], "2x2 bank": HSDP, "2x2 row": [*HSDP, *ROW]},
}


@pytest.mark.parametrize("world_size", STOPPED)
def test_stopping_and_resuming_changes_no_bit(tmp_path: Path, world_size: int) -> None:
    """Between Lookahead steps and at an epoch's end."""
    pytest.importorskip("deepspeed")
    straight, stopped = tmp_path / "straight", tmp_path / "stopped"
    cases = STOPPED[world_size]
    runs = [(straight, STEPS), (stopped, 4)]
    first = [(path / n, step, overrides) for path, step in runs for n, overrides in cases.items()]
    run_processes(world_size, continue_each, first, timeout=200)
    for step in (5, STEPS):
        run_processes(world_size, continue_each, [(stopped / n, step, o) for n, o in cases.items()])
    for name in cases:
        facts, tensors = stored(stopped / name)
        undisturbed, expected = stored(straight / name)
        assert facts == undisturbed
        assert_same_bits(tensors, expected)


def test_asynchronous_checkpoints_are_the_same(tmp_path: Path) -> None:
    """Training goes on while each of many is written, and changes none."""
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


def start_from(
    rank: int, world_size: int, directory: Path, export: Path, places: list[list[str]]
) -> list[StateShards]:
    """What runs hold that start from an export."""
    found = []
    for index, overrides in enumerate(places):
        with arithmetic(dtype_of(overrides)):
            trainer = build_trainer(directory / f"{index}", *overrides, f"run.init_from={export}")
            assert trainer.step == 0
            require_rows_of_owners(trainer)
        found.append(held_shards(trainer))
    return found


@pytest.mark.parametrize(
    "trained, started",
    [((4, []), [[], ROW]), ((2, ZERO[3]), list(ZERO.values()))],
    ids=["fsdp", "deepspeed"],
)
def test_a_trained_model_is_exported_and_starts_runs(
    trained: Place, started: list[list[str]], tmp_path: Path
) -> None:
    """The slow weights of all ranks are the model of the run; an export of it starts others."""
    if trained[1]:
        pytest.importorskip("deepspeed")
    run, export = tmp_path / "run", tmp_path / "model.safetensors"
    visit(trained, run, 4)
    tensors = stored(run)[1]
    with arithmetic(dtype_of(trained[1])):
        model = RunDirectory(run).load_model()
    weights = {name: tensor.detach() for name, tensor in stable_parameters(model).items()}
    slow = named(tensors, "slow")
    for name in [name for name in slow if name.endswith(".M")]:
        block = name.removesuffix("M")
        slow[f"{block}W"] = slow.pop(name) @ slow[f"{block}R"].mT
    assert_same_weights(weights, slow)
    assert not torch.equal(weights["head.weight"], tensors["model.head.weight"])
    save_export(model, export)
    for shards in zip(*run_processes(2, start_from, tmp_path, export, started), strict=True):
        loaded = joined(shards)
        found = named(loaded, "model")
        slow = named(loaded, "slow")
        assert all(torch.equal(tensor, found[name]) for name, tensor in slow.items())
        for name in [name for name in found if name.endswith(".M")]:
            del found[name]
        assert_same_weights(found, weights)


def assert_same_weights(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Bit for bit, but for products of orthogonal matrices, of d terms each.

    M·Rᵀ is one; of an export it is (W·R)·Rᵀ, and RᵀR is I but for as much.
    """
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        products = 3 * name.endswith(".W")
        allowed = products * tensor.shape[-1] * torch.finfo(tensor.dtype).eps
        assert (found[name] - tensor).abs().max() <= allowed, name


def named(tensors: dict[str, Tensor], kind: str) -> dict[str, Tensor]:
    """The tensors of a kind, by the names of the weights."""
    prefix = f"{kind}."
    return {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
