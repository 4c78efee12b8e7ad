"""exp(A) with A = X - Xᵀ skew, by Taylor's series: SOC's dense form (Singla & Feizi, ICML 2021).

The series ends after eight terms and is squared three times. What is cut off is within the bound
of the stored matrix, as any other distance from O(d).
"""

import math

from torch import Tensor

from lipnext_scale.models.layers.base import (
    Linear,
    Parameters,
    gram_norm,
    identity_like,
    skew_part,
)
from lipnext_scale.models.layers.cayley import initial

SQUARINGS = 3


def taylor(a: Tensor) -> Tensor:
    """Σ_{k≤8} Aᵏ/k! in four products. Of ‖A‖ ≤ π/8 it leaves at most (π/8)⁹/9!·1.1 = 7e-10."""
    square = a @ a
    cube, fourth = square @ a, square @ square
    one = identity_like(a)
    low = one + a + square / 2 + cube / 6
    return low + fourth @ (one / 24 + a / 120 + square / 720 + cube / 5040 + fourth / 40320)


def exponential(x: Tensor) -> Tensor:
    """A longer A than π is scaled down to it: every rotation has one that is not longer."""
    a = skew_part(x)
    a = a * (math.pi / gram_norm(a).clamp_min(math.pi))
    result = taylor(a / 2**SQUARINGS)
    for _ in range(SQUARINGS):
        result = result @ result
    return result


def made(free: Parameters) -> dict[str, Tensor]:
    return {"matrix": exponential(free["X"])}


EXP = Linear(lambda width: {"X": (width, width)}, initial, made)
