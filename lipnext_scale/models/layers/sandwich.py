"""√2·AᵀΨσ(√2·Ψ⁻¹Bx + b), AAᵀ + BBᵀ = I: sandwich layers (Wang & Manchester, ICML 2023)."""

import torch
from torch import Tensor

from lipnext_scale.manifold import random_orthogonal
from lipnext_scale.models.layers.base import (
    Gated,
    Parameters,
    Shapes,
    identity_like,
    skew_part,
)

# X and Y are scaled down to this, as cayley's A.
LARGEST = 1e3


def row_orthonormal(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """(A, B) of Z = X - Xᵀ + YᵀY: Aᵀ = (I - Z)(I + Z)⁻¹, Bᵀ = -2Y(I + Z)⁻¹."""
    size = torch.stack([t.abs().sum(-1).amax(-1) for t in (x, y)]).amax(0)[..., None, None]
    scale = LARGEST / size.clamp_min(LARGEST)
    x, y = x * scale, y * scale
    z, one = skew_part(x) + y.mT @ y, identity_like(x)
    inverse, _ = torch.linalg.inv_ex(one + z)
    return ((one - z) @ inverse).mT, (-2 * y @ inverse).mT


def made(free: Parameters) -> dict[str, Tensor]:
    """2Aᵀσ(Bx + c) with c = Ψb/√2, since σ(t·x) = t·σ(x)."""
    a, b = row_orthonormal(free["X"], free["Y"])
    return {"A": a, "B": b, "c": free["log_psi"].exp() * free["b"] / 2**0.5}


def shapes(width: int) -> Shapes:
    square = (width, width)
    return {"X": square, "Y": square, "log_psi": (width,), "b": (width,)}


def initial(width: int, generator: torch.Generator) -> dict[str, Tensor]:
    """A = I/√2 and B = R/√2, then R = I: together σ(σ(R·x))."""
    rotation, one = random_orthogonal(width, generator), torch.eye(width)
    zeros = torch.zeros(2, width)
    y = (1 - 2**0.5) * torch.stack([rotation.mT, one])
    return {"X": torch.zeros(2, width, width), "Y": y, "log_psi": zeros, "b": zeros}


SANDWICH = Gated(shapes, initial, made, residual=False)
