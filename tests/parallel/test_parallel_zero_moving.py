"""Runs under DeepSpeed stop, resume and move to and from other engines by our own checkpoints."""

import shutil
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from engine_runs import (
    ROUNDING,
    SMOOTH,
    STEPS,
    ULP,
    Configurations,
    Outcome,
    assert_same_bits,
    build_trainer,
    continue_each,
    held_pieces,
    joined,
    rounding_alone,
    stored,
    tensor_errors,
    train,
)
from gloo import run_processes
from test_parallel_moving import (
    Place,
    assert_found_everything,
    named,
    visit,
)

from lipnext_scale.certify import Certifier
from lipnext_scale.checkpoint import StateShards
from lipnext_scale.data import read_samples
from lipnext_scale.run_directory import RunDirectory
from lipnext_scale.weights import load_run_model, save_export, stable_parameters

pytestmark = pytest.mark.slow

ZERO = {
    stage: [*SMOOTH, "parallel.engine=deepspeed", f"parallel.zero_stage={stage}"]
    for stage in (1, 2, 3)
}
OFFLOAD, BF16 = "parallel.offload_optimizer=true", "parallel.precision=bf16"
FSDP = [*SMOOTH, "parallel.engine=fsdp"]
ROW = [*FSDP, "parallel.weight_layout=row"]
SINGLE: Place = (0, SMOOTH)


@pytest.fixture(scope="module", autouse=True)
def deepspeed() -> None:
    pytest.importorskip("deepspeed")


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return train(tmp_path_factory.mktemp("zero moving") / "single", *SMOOTH)


@pytest.fixture(scope="module")
def rounding(tmp_path_factory: pytest.TempPathFactory, single: Outcome) -> dict[str, float]:
    return rounding_alone(tmp_path_factory.mktemp("zero rounding"), single)


def assert_end_of_one_process(run: Path, single: Outcome, rounding: dict[str, float]) -> None:
    facts, tensors = stored(run)
    assert (facts["step"], facts["optimizers"]) == (STEPS, single.counters)
    for kind, error in tensor_errors(tensors, single.tensors).items():
        assert error <= ROUNDING * max(rounding[kind], ULP), kind


@pytest.fixture(scope="module")
def half(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten steps of ZeRO-3 on two ranks."""
    run = tmp_path_factory.mktemp("zero 3") / "run"
    visit((2, ZERO[3]), [(run, 10)])
    return run


def test_zero_3_on_two_ranks_goes_on_under_fsdp_on_three(
    half: Path, single: Outcome, rounding: dict[str, float], tmp_path: Path
) -> None:
    """All is found, the end is that of one process, and the run is certified as any other."""
    run = tmp_path / "run"
    shutil.copytree(half, run, symlinks=True)
    facts, tensors = stored(run)
    [visits] = visit((3, FSDP), [(run, STEPS)])
    assert_found_everything(visits, facts, tensors)
    assert_end_of_one_process(run, single, rounding)
    certifier = Certifier.load(str(run))
    images = read_samples("builtin:digits/test-*.tar.gz", "data.test").images[:50]
    labels, radii = certifier(images)
    assert 0 < certifier.lipschitz_bound - 1 < 1e-4
    assert len(labels) == len(radii) == 50 and bool((radii > 0).any())


JOURNEY: list[tuple[Place, int]] = [
    ((2, ZERO[2]), 4),
    ((2, [*ZERO[3], "parallel.accumulation=2"]), 10),
    ((4, ZERO[1]), 13),
    (SINGLE, 14),
    ((2, [*ZERO[3], OFFLOAD]), 16),
    ((3, ROW), 17),
    ((1, ZERO[2]), 18),
    ((2, [*ZERO[2], OFFLOAD]), STEPS),
]


def test_a_run_moves_between_all_engines(
    single: Outcome, rounding: dict[str, float], tmp_path: Path
) -> None:
    """Each finds the bits that the one before left: weights, moments, buffers, slow weights."""
    run = tmp_path / "run"
    for index, (place, last_step) in enumerate(JOURNEY):
        before = stored(run) if index else None
        [visits] = visit(place, [(run, last_step)])
        if before is not None:
            assert_found_everything(visits, *before)
        facts, tensors = stored(run)
        assert facts["step"] == last_step
        assert_same_bits(joined([visit.left for visit in visits]), tensors)
    assert_end_of_one_process(run, single, rounding)


STOPPED: Configurations = {
    "1": ZERO[1],
    "2 offloaded": [*ZERO[2], OFFLOAD],
    "3": ZERO[3],
    "3 bf16": [*ZERO[3], BF16],
}


def test_stopping_and_resuming_changes_no_bit(tmp_path: Path) -> None:
    """Between Lookahead steps, in the middle of an epoch and at its end."""
    straight, stopped = tmp_path / "straight", tmp_path / "stopped"
    run_processes(2, continue_each, [(straight / n, STEPS, o) for n, o in STOPPED.items()])
    for step in (8, 15, STEPS):
        run_processes(2, continue_each, [(stopped / n, step, o) for n, o in STOPPED.items()])
    for name in STOPPED:
        facts, tensors = stored(stopped / name)
        undisturbed, expected = stored(straight / name)
        assert facts == undisturbed
        assert_same_bits(tensors, expected)


def own_group(rank: int, world_size: int, directory: Path) -> bool:
    linear = torch.nn.functional.linear
    trainer = build_trainer(directory, *ZERO[3], "run.hang_timeout=700")
    group = trainer.engine.deepspeed.data_parallel_group  # type: ignore[attr-defined]
    backend = group._get_backend(torch.device("cpu"))
    assert backend.options._timeout == timedelta(seconds=12 * 700)
    return torch.nn.functional.linear is linear


def test_deepspeed_leaves_other_things_alone(tmp_path: Path) -> None:
    """Its group waits as long as ours do, so that the watchdog speaks first, and torch's functions
    stay what they are."""
    assert run_processes(2, own_group, tmp_path) == [True, True]


def start_from(rank: int, world_size: int, directory: Path, export: Path) -> list[StateShards]:
    found = []
    for stage, overrides in ZERO.items():
        trainer = build_trainer(directory / f"{stage}", *overrides, f"run.init_from={export}")
        assert trainer.step == 0
        found.append(held_pieces(trainer))
    return found


def test_a_trained_model_is_exported_and_starts_runs(half: Path, tmp_path: Path) -> None:
    """The slow weights of ZeRO-3 are the model of the run; an export of it starts every stage."""
    tensors = stored(half)[1]
    model = load_run_model(RunDirectory(half))
    weights = {name: tensor.detach() for name, tensor in stable_parameters(model).items()}
    assert_same_bits(weights, named(tensors, "slow"))
    assert not torch.equal(weights["head.weight"], tensors["model.head.weight"])
    save_export(model, tmp_path / "model.safetensors")
    ranks = run_processes(2, start_from, tmp_path / "new", tmp_path / "model.safetensors")
    for pieces in zip(*ranks, strict=True):
        started = joined(pieces)
        assert_same_bits(named(started, "model"), weights)
        assert_same_bits(named(started, "slow"), weights)
