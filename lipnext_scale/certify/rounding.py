"""How far computed features can be from the exact ones: a bound carried along the layers.

Everything that the forward pass does is a sum of products in some order, an addition, or exact
(shift, |·|, MinMax): the standard bounds |fl(A·x) - A·x| ≤ γ_n·|A||x| and |fl(a + b) - (a + b)| ≤
u·|a + b| hold for every order of summation, with and without fused multiply-adds. Norms and errors
are affine functions of n = ‖x - ½‖, so the bound is computed once for a model and costs nothing per
image.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from lipnext_scale.certify.layers import BlockFacts
from lipnext_scale.certify.lipschitz import gamma
from lipnext_scale.models import LipNeXtConfig

# A thousandth more covers the rounding of computing the bound itself.
OWN_ROUNDING = 1.001


@dataclass(frozen=True)
class Affine:
    """offset + slope·n, both at least 0."""

    offset: float
    slope: float

    def __add__(self, other: "Affine | float") -> "Affine":
        if isinstance(other, Affine):
            return Affine(self.offset + other.offset, self.slope + other.slope)
        return Affine(self.offset + other, self.slope)

    def __mul__(self, factor: float) -> "Affine":
        return Affine(self.offset * factor, self.slope * factor)

    def at(self, n: torch.Tensor) -> torch.Tensor:
        return self.offset + self.slope * n


def feature_rounding(
    blocks: Iterable[BlockFacts], config: LipNeXtConfig, dtype: torch.dtype
) -> Affine:
    """A bound of ‖features as computed in dtype - exact features‖ for images with ‖x - ½‖ = n.

    "Exact" begins at pixels p/255; weights are what they are in dtype.
    """
    info = torch.finfo(dtype)
    unit, tiny = info.eps / 2, info.smallest_normal
    width, tokens = config.width, (config.image_size // config.patch_size) ** 2
    pixels = config.in_channels * config.image_size**2
    # Products below the smallest normal number may be lost, C in each of C·T sums.
    underflow = width * math.sqrt(width * tokens) * tiny

    norm = Affine(0.0, 1.0)  # of the exact values; ‖x‖ ≤ ‖x - ½‖ + ½·√pixels
    error = Affine(unit * math.sqrt(pixels) / 2, 2 * unit)  # p/255, then - ½
    for block in blocks:
        if block.pos:
            norm = norm + block.pos
            error = error + (norm + error) * unit
        # R·x: γ_C·‖|R|‖₂·‖x‖, and ‖|R|‖₂ ≤ ‖R‖_F.
        lost = (norm + error) * (gamma(width, unit) * block.rotation_frobenius)
        error = error * block.rotation + lost + underflow
        norm = norm * block.rotation
        # W·x + b: one more term in each sum.
        bias = math.sqrt(tokens) * block.bias
        lost = ((norm + error) * block.weight_frobenius + bias) * gamma(width + 1, unit)
        error = error * block.weight + lost + underflow
        norm = norm * block.weight + bias
    # The pooling: a sum of T squares and a root; squares that underflow leave at most √(T·tiny).
    error = error + (norm + error) * gamma(tokens + 4, unit)
    return (error + math.sqrt(width * tokens * tiny)) * OWN_ROUNDING
