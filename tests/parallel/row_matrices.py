"""Matrices in rows over ranks: weights, gradients, and the optimizer for them on a rank."""

from collections.abc import Collection
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lipnext_scale.manifold import random_orthogonal
from lipnext_scale.optim import ManifoldAdam
from lipnext_scale.parallel.rows import RowManifoldAdam, row_range


def name_of(index: int) -> str:
    return f"matrix{index}"


def starts(sides: list[int]) -> dict[str, Tensor]:
    """name → an orthogonal matrix, the same on every rank."""
    return {
        name_of(index): random_orthogonal(side, torch.Generator().manual_seed(index))
        for index, side in enumerate(sides)
    }


def gradients(sides: list[int], step: int) -> list[Tensor]:
    """The whole gradients of a step, the same on every rank."""
    generator = torch.Generator().manual_seed(1000 + step)
    return [torch.randn(side, side, generator=generator) for side in sides]


def rows(whole: Tensor, rank: int, ranks: int) -> Tensor:
    start, stop = row_range(whole.shape[0], ranks, rank)
    return whole[start:stop].clone()


def give(parameters: list[nn.Parameter], wholes: list[Tensor], frozen: Collection[int] = ()):
    """Each parameter gets its rows of its gradient, but for those that are frozen."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    for index, (parameter, whole) in enumerate(zip(parameters, wholes, strict=True)):
        parameter.grad = None if index in frozen else rows(whole, rank, ranks)


def unfilled(sides: list[int]) -> list[nn.Parameter]:
    """This rank's rows of matrices that nobody has filled."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    return [nn.Parameter(rows(torch.full((side, side), torch.nan), rank, ranks)) for side in sides]


def named(parameters: list[nn.Parameter]) -> list[tuple[str, nn.Parameter]]:
    return [(name_of(index), parameter) for index, parameter in enumerate(parameters)]


def build(sides: list[int], **options: Any) -> tuple[list[nn.Parameter], RowManifoldAdam]:
    """This rank's rows and their optimizer, with the weights of `starts`."""
    parameters, weights = unfilled(sides), starts(sides)
    optimizer = RowManifoldAdam(named(parameters), dist.group.WORLD, **options)
    optimizer.initialise(lambda name, matrix: matrix.copy_(weights[name]))
    return parameters, optimizer


def held(parameters: list[nn.Parameter]) -> list[Tensor]:
    """A copy of what this rank holds of every matrix."""
    return [parameter.detach().clone() for parameter in parameters]


def one_process(sides: list[int], **options: Any) -> tuple[list[nn.Parameter], ManifoldAdam]:
    """The same matrices whole, and ManifoldAdam for them."""
    parameters = [nn.Parameter(matrix.contiguous()) for matrix in starts(sides).values()]
    return parameters, ManifoldAdam(named(parameters), **options)


def joined(results: list[list[Tensor]]) -> list[Tensor]:
    """Whole matrices from the rows that the ranks hold: results[rank][matrix]."""
    return [torch.cat(parts) for parts in zip(*results, strict=True)]
