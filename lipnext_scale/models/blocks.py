"""LipNeXt blocks (paper §3.3) as readable functions; `fused.py` has the fast form of a group."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from lipnext_scale.models import ops

# The orthogonal matrices of a group in turn, R₀, M₀, R₁, M₁, …: as one bank [2g, C, C] or one each.
Matrices = Tensor | Sequence[Tensor]


@dataclass(frozen=True)
class BlockSpec:
    """What the blocks of a network have in common beside their weights."""

    shift_part: int
    padding: str
    activation: str
    beta: float
    parametrisation: str


def block_reference(
    x: Tensor, rotation: Tensor, mixing: Tensor, bias: Tensor, pos: Tensor | None, spec: BlockSpec
) -> Tensor:
    """Z = act(W·S(R·(X + pos)) + b) on [N, H, W, C], W = M·Rᵀ (product) or W itself (merged)."""
    weight = mixing @ rotation.mT if spec.parametrisation == "product" else mixing
    if pos is not None:
        x = x + pos
    x = F.linear(x, rotation)
    x = ops.spatial_shift(x, spec.shift_part, spec.padding)
    x = F.linear(x, weight, bias)
    return ops.beta_abs(x, spec.beta) if spec.activation == "beta_abs" else ops.minmax(x)


def matrix_list(matrices: Matrices) -> Sequence[Tensor]:
    """The matrices one by one.

    One unbind, not indexing: each index would cost a zero-filled bank in the backward pass.
    """
    return matrices.unbind(0) if isinstance(matrices, Tensor) else matrices


def group_reference(
    x: Tensor, matrices: Matrices, bias: Tensor, pos: Tensor | None, spec: BlockSpec
) -> Tensor:
    """The blocks of a group one after the other."""
    matrices = matrix_list(matrices)
    positions = [None] * len(bias) if pos is None else pos.unbind(0)
    for index, (block_bias, block_pos) in enumerate(zip(bias.unbind(0), positions, strict=True)):
        rotation, mixing = matrices[2 * index], matrices[2 * index + 1]
        x = block_reference(x, rotation, mixing, block_bias, block_pos, spec)
    return x
