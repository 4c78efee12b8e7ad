"""(AAᵀ)^-½·A, A's polar factor, by Newton-Schulz: LOT (Xu et al., NeurIPS 2022)."""

import torch
from torch import Tensor

from lipnext_scale.manifold import random_orthogonal
from lipnext_scale.models.layers.base import Linear, Parameters, gram_norm, largest_entry

# Singular values above ‖A‖/25 come to 1 within 1e-8; smaller ones stay below 1.
ITERATIONS = 12


def polar(a: Tensor) -> Tensor:
    """X ← X(3I - XᵀX)/2 from A/‖A‖: the same factor as of LOT's inverse root, in two products."""
    x = a / largest_entry(a)
    x = x / gram_norm(x)
    for _ in range(ITERATIONS):
        x = 1.5 * x - 0.5 * x @ (x.mH @ x)
    return x


def made(free: Parameters) -> dict[str, Tensor]:
    return {"matrix": polar(free["A"])}


def initial(width: int, generator: torch.Generator) -> dict[str, Tensor]:
    """R uniform on O(C), and Rᵀ: as manifold starts."""
    rotation = random_orthogonal(width, generator)
    return {"A": torch.stack([rotation, rotation.mT])}


LOT = Linear(lambda width: {"A": (width, width)}, initial, made)
