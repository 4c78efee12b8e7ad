"""(I - A)(I + A)⁻¹ with A = X - Xᵀ skew: Cayley's transform (Trockman & Kolter, ICLR 2021)."""

import torch
from torch import Tensor

from lipnext_scale.models.layers.base import (
    Linear,
    Parameters,
    gaussian,
    identity_like,
    skew_part,
)

# A larger A is scaled down to this: its eigenvalues are -1 to a millionth, and I + A keeps its I.
LARGEST = 1e6


def cayley(x: Tensor) -> Tensor:
    a, one = skew_part(x), identity_like(x)
    size = a.abs().sum(-1).amax(-1)[..., None, None]  # ≥ ‖A‖₂
    a = a * (LARGEST / size.clamp_min(LARGEST))
    solution, _ = torch.linalg.solve_ex(one + a, one - a)  # both commute
    return solution


def made(free: Parameters) -> dict[str, Tensor]:
    return {"matrix": cayley(free["X"])}


def initial(width: int, generator: torch.Generator) -> dict[str, Tensor]:
    """‖A‖ is about 2. Of -A comes the transpose: mix₂ = mix₁ᵀ, as manifold starts."""
    x = gaussian(generator, width, width) / (2 * width) ** 0.5
    return {"X": torch.stack([x, -x])}


CAYLEY = Linear(lambda width: {"X": (width, width)}, initial, made)
