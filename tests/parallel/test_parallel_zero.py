"""ZeRO-1, 2 and 3 of DeepSpeed train as one process does; what else is particular to them.

In float32, DeepSpeed's only full precision, so the bound is what another order of summation does in
one process (`SMOOTH` of engine_runs.py). An evaluation with the slow weights in the middle of each
finds weights that were left behind.
"""

import subprocess
import sys
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
    of_all_ranks,
    recipe,
    relative_errors,
    rounding_alone,
    train,
)
from gloo import run_processes
from torch import Tensor, nn

from lipnext_scale.errors import RunFailed
from lipnext_scale.manifold import orthogonality_error
from lipnext_scale.models import LipNeXt
from lipnext_scale.parallel import DeepSpeedEngine, training_pieces
from lipnext_scale.trainer import Trainer

pytestmark = pytest.mark.slow

ZERO = {
    stage: [*SMOOTH, "parallel.engine=deepspeed", f"parallel.zero_stage={stage}"]
    for stage in (1, 2, 3)
}
OFFLOAD, BF16 = "parallel.offload_optimizer=true", "parallel.precision=bf16"
TWO_RANKS: Configurations = {
    "1": ZERO[1],
    "2": ZERO[2],
    "3": ZERO[3],
    "1 in parts": [*ZERO[1], "parallel.accumulation=2"],
    "2 in parts": [*ZERO[2], "parallel.accumulation=3"],
    "3 in parts": [*ZERO[3], "parallel.accumulation=3"],
    "1 offloaded": [*ZERO[1], OFFLOAD],
    "2 offloaded": [*ZERO[2], OFFLOAD, "parallel.accumulation=2"],
    "3 offloaded": [*ZERO[3], OFFLOAD, "parallel.accumulation=2"],
    "2 small banks": [*ZERO[2], "model.blocks_per_bank=1"],
    "3 small banks": [*ZERO[3], "model.blocks_per_bank=1", "parallel.recompute_activations=true"],
    "fsdp": [*SMOOTH, "parallel.engine=fsdp"],
}
FOUR_RANKS: Configurations = {"1": ZERO[1], "2": ZERO[2]}
# Models that other numbers of ranks cut differently: compared with one process of their own.
OTHERS: dict[str, tuple[int, list[str], Configurations]] = {
    "depth 4": (4, ["model.depth=4"], {"2": ZERO[2], "3": ZERO[3]}),
    "odd width": (2, ["model.width=17"], {"1": ZERO[1], "2": ZERO[2], "3": ZERO[3]}),
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


def require_whole_weights(trainer: Trainer) -> None:
    """Padding is what it was, and (ZeRO-1 and 2) the model has the numbers of the partitions."""
    engine = trainer.engine
    if not isinstance(engine, DeepSpeedEngine):
        return
    weights = dict(trainer.model.named_parameters())
    for partition in engine.partitions:
        for slot in partition.slots:
            name, here = partition.names[slot.index], partition.flat.detach()[slot.there]
            if not name:
                width = partition.view.shape[-1]
                for matrix in here.view(-1, width, width):
                    assert torch.equal(matrix, torch.eye(width))
            elif trainer.recipe.parallel.zero_stage < 3:
                published = weights[name].detach().flatten()[slot.of_parameter]
                assert torch.equal(published, here.to(published.dtype)), name


def train_all(
    rank: int, world_size: int, directory: Path, configurations: Configurations
) -> dict[str, Outcome]:
    outcomes = {}
    for name, overrides in configurations.items():
        trainers: list[Trainer] = []
        path = directory / f"{world_size} {name}"
        outcomes[name] = train(path, *overrides, change=trainers.append)
        require_whole_weights(trainers[0])
    return outcomes


def run_all(world_size: int, directory: Path, configurations: Configurations) -> dict[str, Outcome]:
    ranks = run_processes(world_size, train_all, directory, configurations, timeout=300)
    return {name: of_all_ranks([outcomes[name] for outcomes in ranks]) for name in configurations}


@pytest.fixture(scope="module")
def runs(directory: Path) -> dict[int, dict[str, Outcome]]:
    return {
        2: run_all(2, directory, TWO_RANKS),
        4: run_all(4, directory, FOUR_RANKS),
    }


@pytest.mark.parametrize(
    "world_size, name", [*((2, n) for n in TWO_RANKS), *((4, n) for n in FOUR_RANKS)]
)
def test_zero_trains_as_one_process_does(
    runs: dict[int, dict[str, Outcome]],
    single: Outcome,
    rounding: dict[str, float],
    world_size: int,
    name: str,
) -> None:
    """Every stage: in parts, clipping, offloaded, padded (6 matrices on 4 ranks), recomputing."""
    ours = runs[world_size][name]
    if name != "fsdp":
        offloaded = ", optimizer on the CPU" if "offloaded" in name else ""
        assert ours.engine == f"deepspeed ZeRO-{name[0]} × {world_size}{offloaded}, fp32"
    assert_parity_in_float32(ours, single, rounding)


def test_every_start_is_that_of_the_model(
    runs: dict[int, dict[str, Outcome]], tmp_path: Path
) -> None:
    """Bit for bit the weights of LipNeXt(config, seed), as with every other engine."""
    configured = recipe(tmp_path)
    pieces = training_pieces(LipNeXt(configured.model, configured.run.seed), None)
    expected = {name: piece.tensor.detach() for name, piece in pieces.items()}
    for outcomes in runs.values():
        for outcome in outcomes.values():
            assert_same_bits(outcome.weights_at_start, expected)


@pytest.mark.parametrize("name", OTHERS)
def test_zero_trains_other_shapes_as_one_process_does(directory: Path, name: str) -> None:
    """ZeRO-3 on four ranks; matrices with an odd count of numbers, which DeepSpeed would shift."""
    world_size, model, configurations = OTHERS[name]
    alone = train(directory / name / "single", *SMOOTH, *model)
    rounding = rounding_alone(directory / name, alone, *model)
    together = {key: [*model, *overrides] for key, overrides in configurations.items()}
    for ours in run_all(world_size, directory / name, together).values():
        assert_parity_in_float32(ours, alone, rounding)


def test_bf16_computes_with_rounded_weights_and_keeps_float32(
    directory: Path, single: Outcome, rounding: dict[str, float]
) -> None:
    """Within a rounding of FSDP's bf16; the float32 matrices orthogonal to float32's rounding."""
    configurations = {
        "fsdp": [*SMOOTH, BF16],
        "1": [*ZERO[1], BF16],
        "1 in parts": [*ZERO[1], BF16, "parallel.accumulation=2"],
        "1 offloaded": [*ZERO[1], BF16, OFFLOAD],
        "2": [*ZERO[2], BF16],
        "3": [*ZERO[3], BF16],
        "3 offloaded": [*ZERO[3], BF16, OFFLOAD],
    }
    ours = run_all(2, directory / "bf16", configurations)
    for name in configurations.keys() - {"fsdp"}:
        assert 0 < relative_errors(ours[name], ours["fsdp"])["model"] < 2.0**-9
        assert relative_errors(ours[name], single)["model"] > 100 * rounding["model"]
        for key, tensor in ours[name].tensors.items():
            if key.startswith("model.") and key.endswith((".R", ".M")):
                assert orthogonality_error(tensor) < 1e-6
                assert not torch.equal(tensor, tensor.bfloat16().float())


class InfiniteGradient(torch.autograd.Function):
    """Adds nothing, and gives what it was made from a gradient that is not finite."""

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
    """What is said when one rank has an infinite gradient for one parameter."""
    said = []
    for index, overrides in enumerate([*ZERO.values(), [*ZERO[2], OFFLOAD]]):
        trainer = build_trainer(directory / f"{index}", *overrides)
        if rank == 1:
            trainer.model.head.register_forward_pre_hook(spoil)
        with pytest.raises(RunFailed) as failure:
            trainer.train_step(next(iter(trainer.loader)))
        said.append(str(failure.value))
    return said


def test_a_gradient_that_is_not_finite_is_named(tmp_path: Path) -> None:
    """By its parameter, on all ranks, before the step, though it lies in a flat partition."""
    expected = "step 1: the gradient of head.bias is not finite; the weights were not updated"
    for said in run_processes(2, train_spoilt, tmp_path, timeout=200):
        assert said == [expected] * 4


def test_deepspeed_is_imported_by_its_engine_alone() -> None:
    """The rest starts without it, whether or not it is installed."""
    program = "import sys, lipnext_scale.trainer; sys.exit('deepspeed' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
