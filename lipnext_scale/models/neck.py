"""From tokens to features by dense layers, as in LiResNet (Hu et al., NeurIPS 2023, ICLR 2024).

    t = K·patches(x)      K [C, s²·C]: every s×s square of tokens becomes one
    f = act(V·t + b₀)     V [D, (n/s)²·C], of all tokens at once
    f = act(A_i·f + b_i)  A_i [D, D], `depth` times

The rows of every matrix are orthonormal, L⁻¹X with LLᵀ = XXᵀ of a free X. L2 pooling, the other way
(`blocks.l2_pool`), has no parameters and does not see where something is.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lipnext_scale.models.blocks import BlockSpec, activated
from lipnext_scale.models.layers.base import gaussian
from lipnext_scale.models.layers.cholesky import orthogonalised
from lipnext_scale.utils.products import linear

SQUARE = 4  # tokens on a side of what K makes one of, at most


def square_side(side: int) -> int:
    return math.gcd(side, SQUARE)


class Neck(nn.Module):
    """frozen: the parameters are the matrices themselves (`freeze`), no longer the free X."""

    def __init__(
        self, side: int, width: int, features: int, depth: int, spec: BlockSpec, frozen: bool
    ) -> None:
        super().__init__()
        self.square, self.spec, self.frozen = square_side(side), spec, frozen
        self.sizes = width, features, depth  # of the whole, of which a process may hold less
        self.joint = (side // self.square) ** 2 * width  # numbers behind K
        self.squares = nn.Parameter(torch.empty(width, self.square**2 * width))
        self.vector = nn.Parameter(torch.empty(features, self.joint))
        self.dense = nn.Parameter(torch.empty(depth, features, features)) if depth else None
        self.bias = nn.Parameter(torch.empty(1 + depth, features))

    def matrices(self, dtype: torch.dtype) -> list[Tensor]:
        """K, V and all A_i, made in this type."""
        free = [
            matrix.to(dtype)
            for matrix in (self.squares, self.vector, self.dense)
            if matrix is not None
        ]
        squares, vector, *dense = free if self.frozen else map(orthogonalised, free)
        return [squares, vector, *(matrix for stack in dense for matrix in stack.unbind(0))]

    def forward(self, x: Tensor) -> Tensor:
        """[N, n, n, C] → [N, D], in float32 or better."""
        made = self.matrices(torch.promote_types(self.bias.dtype, torch.float32))
        squares, *matrices = (matrix.to(x.dtype) for matrix in made)
        biases, size = self.bias.to(x.dtype).unbind(0), self.square
        patches = x.unflatten(2, (-1, size)).unflatten(1, (-1, size)).transpose(2, 3).flatten(3)
        x = linear(patches.flatten(0, 2), squares).view(len(x), -1)
        for matrix, bias in zip(matrices, biases, strict=True):
            x = activated(F.linear(x, matrix, bias), self.spec)
        return x.to(torch.promote_types(x.dtype, torch.float32))

    def initial(self, seed: int) -> dict[str, Tensor]:
        """Of every parameter: K near the mean of a square, where most of an image is; V random;
        A_i = I."""
        generator = torch.Generator().manual_seed((seed * 1_000_003 + 999_979) % 2**63)
        width, features, depth = self.sizes
        taps = self.square**2 * width
        mean = torch.eye(width).repeat(1, self.square**2) / self.square
        found = {
            "squares": mean + 0.1 * gaussian(generator, width, taps) / taps**0.5,
            "vector": gaussian(generator, features, self.joint) / self.joint**0.5,
            "bias": torch.zeros(1 + depth, features),
        }
        dense = {"dense": torch.eye(features).expand(depth, -1, -1)} if depth else {}
        return found | dense

    @torch.no_grad()
    def reset_parameters(self, seed: int) -> None:
        for name, value in self.initial(seed).items():
            getattr(self, name).copy_(value)

    @torch.no_grad()
    def store(self, other: "Neck") -> None:
        """Take another one's matrices, made in float64."""
        for stored, made in zip(
            self.matrices(self.bias.dtype), other.matrices(torch.float64), strict=True
        ):
            stored.copy_(made)
        self.bias.copy_(other.bias)
