"""ZeRO-1, 2 and 3 of DeepSpeed train as one process does; what else is particular to them.

In float32, DeepSpeed's only full precision, so the bound is what another order of summation does in
one process (`SMOOTH` of engine_runs.py).
"""

import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_runs import (
    SMOOTH,
    Configurations,
    Outcome,
    assert_parity_in_float32,
    assert_same_bits,
    build_trainer,
    relative_errors,
    rounding_alone,
    run_each,
    train,
)
from gloo import run_processes
from torch import Tensor, nn

from lipnext_scale.manifold import orthogonality_error
from lipnext_scale.utils.errors import RunFailed

pytestmark = pytest.mark.slow

ZERO = {
    stage: [*SMOOTH, "parallel.engine=deepspeed", f"parallel.zero_stage={stage}"]
    for stage in (1, 2, 3)
}
OFFLOAD, BF16 = "parallel.offload_optimizer=true", "parallel.precision=bf16"
TWICE, SMALL_BANKS = "parallel.accumulation=2", "model.blocks_per_bank=2"
RUNS: dict[int, Configurations] = {
    2: {
        "1": ZERO[1],
        "2 in parts": [*ZERO[2], "parallel.accumulation=3"],
        "3 in parts": [*ZERO[3], "parallel.accumulation=3"],
        "2 offloaded": [*ZERO[2], OFFLOAD, TWICE],
        "3 offloaded": [*ZERO[3], OFFLOAD, TWICE],
        "3 small banks": [*ZERO[3], SMALL_BANKS, "parallel.recompute_activations=true"],
    },
    4: {"1": ZERO[1], "2": ZERO[2]},  # 6 matrices and padding
}
# Eight matrices with an odd count of numbers, which DeepSpeed would shift without more padding.
ODD = ["model.depth=4", "model.width=17"]
ODD_RUNS: dict[int, Configurations] = {
    3: {"2": [*ZERO[2], *ODD]},
    4: {"3": [*ZERO[3], *ODD]},
}


@pytest.fixture(scope="module", autouse=True)
def deepspeed() -> None:
    pytest.importorskip("deepspeed")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("zero")


@pytest.fixture(scope="module")
def single(directory: Path) -> Outcome:
    return train(directory / "single", *SMOOTH)


@pytest.fixture(scope="module")
def rounding(directory: Path, single: Outcome) -> dict[str, float]:
    return rounding_alone(directory, single)


@pytest.fixture(scope="module")
def runs(directory: Path) -> dict[int, dict[str, Outcome]]:
    return {world_size: run_each(world_size, directory, RUNS[world_size]) for world_size in RUNS}


@pytest.mark.parametrize(
    "world_size, name", [(w, name) for w, names in RUNS.items() for name in names]
)
def test_zero_trains_as_one_process_does(
    runs: dict[int, dict[str, Outcome]],
    single: Outcome,
    rounding: dict[str, float],
    world_size: int,
    name: str,
) -> None:
    """Every stage: in parts, clipping, offloaded, padded (6 matrices on 4 ranks), recomputing.

    The start is bit for bit that of LipNeXt(config, seed), as with every other engine.
    """
    ours = runs[world_size][name]
    offloaded = ", optimizer on the CPU" if "offloaded" in name else ""
    assert ours.engine == f"deepspeed ZeRO-{name[0]} × {world_size}{offloaded}, fp32"
    assert_same_bits(ours.weights_at_start, single.weights_at_start)
    assert_parity_in_float32(ours, single, rounding)


def test_zero_trains_odd_matrices_as_one_process_does(directory: Path) -> None:
    alone = train(directory / "odd" / "single", *SMOOTH, *ODD)
    rounding = rounding_alone(directory / "odd", alone, *ODD)
    for world_size, configurations in ODD_RUNS.items():
        for ours in run_each(world_size, directory / "odd", configurations).values():
            assert_parity_in_float32(ours, alone, rounding)


def test_bf16_computes_with_rounded_weights_and_keeps_float32(
    directory: Path, single: Outcome, rounding: dict[str, float]
) -> None:
    """Within a rounding of FSDP's bf16; the float32 matrices orthogonal to float32's rounding."""
    configurations = {
        "fsdp": [*SMOOTH, BF16, TWICE],
        "1": [*ZERO[1], BF16, TWICE],
        "2": [*ZERO[2], BF16, TWICE],
        "3 offloaded": [*ZERO[3], BF16, OFFLOAD],
    }
    ours = run_each(2, directory / "bf16", configurations)
    for name in configurations.keys() - {"fsdp"}:
        # Each is as far from float32 as bf16 makes it, so from another at most twice as far.
        lost = relative_errors(ours["fsdp"], single)["model"]
        assert 0 < relative_errors(ours[name], ours["fsdp"])["model"] < 2 * lost
        assert relative_errors(ours[name], single)["model"] > 100 * rounding["model"]
        for key, tensor in ours[name].tensors.items():
            if key.startswith("model.") and key.endswith((".R", ".M")):
                assert orthogonality_error(tensor) < 1e-6
                assert not torch.equal(tensor, tensor.bfloat16().float())


class InfiniteGradient(torch.autograd.Function):
    """Zero, whose gradient for its input is not finite."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor) -> Tensor:
        ctx.like = parameter.shape
        return parameter.new_zeros(())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient.new_full(ctx.like, float("inf"))


def spoil(head: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
    return (inputs[0] + InfiniteGradient.apply(head.bias),)


def train_spoilt(rank: int, world_size: int, directory: Path) -> list[str]:
    """The errors when one rank has an infinite gradient for one parameter."""
    errors = []
    for index, overrides in enumerate([*ZERO.values(), [*ZERO[2], OFFLOAD]]):
        trainer = build_trainer(directory / f"{index}", *overrides)
        if rank == 1:
            trainer.model.head.register_forward_pre_hook(spoil)
        with pytest.raises(RunFailed) as failure:
            trainer.train_step(next(iter(trainer.loader)))
        errors.append(str(failure.value))
    return errors


def test_a_gradient_that_is_not_finite_is_named(tmp_path: Path) -> None:
    """By its parameter, on all ranks, before the step, though it lies in a flat partition."""
    expected = "step 1: the gradient of head.bias is not finite; the weights were not updated"
    for errors in run_processes(2, train_spoilt, tmp_path, timeout=200):
        assert errors == [expected] * 4


def own_group(rank: int, world_size: int, directory: Path) -> bool:
    linear = torch.nn.functional.linear
    trainer = build_trainer(directory, *ZERO[3], "run.hang_timeout=700")
    group = trainer.engine.deepspeed.data_parallel_group  # type: ignore[attr-defined]
    backend = group._get_backend(torch.device("cpu"))
    assert backend.options._timeout == timedelta(seconds=12 * 700)
    assert sys.modules["deepspeed"].ops.__compatible_ops__ == {}
    return torch.nn.functional.linear is linear


def test_deepspeed_leaves_other_things_alone(tmp_path: Path) -> None:
    """Its group has our timeout, so that the watchdog reports first; torch's functions stay; no
    compiler is probed, which prints a warning for each operation; only its engine imports it."""
    assert run_processes(2, own_group, tmp_path) == [True, True]
    program = "import sys, lipnext_scale.training.trainer; sys.exit('deepspeed' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def threads_of(rank: int, world_size: int, directory: Path, *overrides: str) -> int:
    os.environ["OMP_NUM_THREADS"] = "1"  # as torchrun says
    build_trainer(directory, *ZERO[2], *overrides)
    return torch.get_num_threads()


def test_a_step_on_the_host_has_the_cores(tmp_path: Path) -> None:
    """And only that one: elsewhere a rank has the one thread of its launcher."""
    cores = len(os.sched_getaffinity(0))
    assert run_processes(1, threads_of, tmp_path / "offloaded", OFFLOAD) == [cores]
    assert run_processes(1, threads_of, tmp_path / "kept") == [1]
