"""RowManifoldAdam on parameters that FSDP2 has sharded."""

import pytest
import torch
import torch.distributed as dist
from gloo import run_processes
from row_matrices import name_of, starts
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from lipnext_scale.optim import ManifoldAdam
from lipnext_scale.parallel.rows import RowManifoldAdam

SIDE, COUNT, STEPS = 10, 5, 7
OPTIONS = {"lr": 0.02, "lookahead": 3}


class Chain(nn.Module):
    """x·W₀·W₁·…, with one matrix that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.matrices = nn.ParameterList(torch.empty(SIDE, SIDE) for _ in range(COUNT))

    def forward(self, x: Tensor) -> Tensor:
        for matrix in list(self.matrices)[:-1]:
            x = (x @ matrix).abs()
        return x


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    images, wanted = torch.randn(2, 16, SIDE, generator=generator)
    return images, wanted


def weights_of(name: str) -> Tensor:
    return starts([SIDE] * COUNT)[name_of(int(name.rpartition(".")[2]))]


def train(rank: int, ranks: int, mesh_shape: tuple[int, ...], precision: str) -> list[Tensor]:
    """Every rank has the same batch; ManifoldAdam gets the whole gradients beside it."""
    mesh = init_device_mesh(
        "cpu", mesh_shape, mesh_dim_names=("replicate", "shard")[-len(mesh_shape) :]
    )
    bf16 = precision == "bf16"
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16) if bf16 else MixedPrecisionPolicy()
    with torch.device("meta"):
        model = Chain()
    fully_shard(model, mesh=mesh, mp_policy=policy)
    model.to_empty(device="cpu")
    named = list(model.named_parameters())
    optimizer = RowManifoldAdam(
        named,
        mesh["shard"].get_group(),
        return_dtype=torch.bfloat16 if bf16 else torch.float32,
        bucket_bytes=1,
        **OPTIONS,
    )
    optimizer.initialise(lambda name, matrix: matrix.copy_(weights_of(name)))
    beside = [nn.Parameter(weights_of(name).contiguous()) for name, _ in named]
    reference = ManifoldAdam(beside, **OPTIONS)
    for step in range(STEPS):
        images, wanted = batch(step)
        (model(images) - wanted).square().mean().backward()
        for whole, (_, parameter) in zip(beside, named, strict=True):
            gradient = parameter.grad
            assert gradient is None or isinstance(gradient, DTensor)
            whole.grad = None if gradient is None else gradient.full_tensor()
        optimizer.step()
        optimizer.zero_grad()
        reference.step()
    assert sum(whole.grad is None for whole in beside) == 1
    for name, matrix in optimizer.owned.items():
        assert torch.equal(matrix, beside[int(name.rpartition(".")[2])])
    return [parameter.full_tensor().detach() for _, parameter in named]


def alone() -> list[Tensor]:
    model = Chain()
    for name, parameter in model.named_parameters():
        parameter.data.copy_(weights_of(name))
    optimizer = ManifoldAdam(model.parameters(), **OPTIONS)
    for step in range(STEPS):
        images, wanted = batch(step)
        optimizer.zero_grad()
        (model(images) - wanted).square().mean().backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


@pytest.mark.parametrize("mesh_shape", [(1,), (2,), (4,), (2, 2)])
def test_training_is_that_of_one_process(mesh_shape):
    """Shards of 3, 3, 3 and 1 rows, an unused matrix, HSDP: as in one process, to round-off.

    The optimizer itself adds none: given FSDP's gradients whole, ManifoldAdam has the same bits.
    """
    world_size = torch.Size(mesh_shape).numel()
    results = run_processes(world_size, train, mesh_shape, "fp32")
    for result in results:
        for index, (matrix, expected) in enumerate(zip(result, alone(), strict=True)):
            assert torch.equal(matrix, results[0][index])
            torch.testing.assert_close(matrix, expected, rtol=0, atol=2e-5)
            unused = index == COUNT - 1
            moved = not torch.equal(matrix, weights_of(f"matrices.{index}"))
            assert moved != unused


def test_rows_return_in_the_type_that_computes():
    """With bfloat16 forward passes the rows are rounded weights, while the owners keep float32."""
    for result in run_processes(2, train, (2,), "bf16"):
        for matrix in result:
            assert matrix.dtype == torch.float32
            assert torch.equal(matrix, matrix.bfloat16().float())


def take_the_wrong_group(rank: int, ranks: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = Chain()
    fully_shard(model, mesh=mesh)
    with pytest.raises(AssertionError, match="not sharded over the group"):
        RowManifoldAdam(list(model.named_parameters()), dist.group.WORLD)


def test_the_group_must_be_the_one_that_shards():
    """Rows of a replicated model are exchanged within one copy of it, not among all ranks."""
    run_processes(4, take_the_wrong_group)
