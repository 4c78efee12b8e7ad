"""How far computed features can be from the exact ones: a bound carried along the layers.

Everything that the forward pass does is a sum of products in some order, an addition, or exact
(shift, |·|, MinMax): the standard bounds |fl(A·x) - A·x| ≤ γ_n·|A||x| and |fl(a + b) - (a + b)| ≤
u·|a + b| hold for every order of summation, with and without fused multiply-adds. Norms and errors
are affine functions of n = ‖x - ½‖, so the bound is computed once for a model and costs nothing per
image. Nothing here assumes that the weights are orthogonal (docs/certificate.md).
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from lipnext_scale.certification.bounds import BlockFacts, gamma, product_loss
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

    def at(self, n: Tensor) -> Tensor:
        return self.offset + self.slope * n

    def or_larger(self, other: "Affine") -> "Affine":
        """At least both, for every n ≥ 0."""
        return Affine(max(self.offset, other.offset), max(self.slope, other.slope))


@dataclass(frozen=True)
class FeatureRounding:
    """Of images with ‖x - ½‖ = n, in one arithmetic.

    error: bounds ‖features as computed - exact features‖. largest: bounds every number on the way,
    partial sums included. size: bounds the norm of what the pooling squares.
    """

    error: Affine
    largest: Affine
    size: Affine
    dtype: torch.dtype

    def overflows(self, n: Tensor) -> Tensor:
        """Where some number on the way might not be finite, so that `error` says nothing."""
        limit = torch.finfo(self.dtype).max / 4
        return ~((self.largest.at(n) <= limit) & (self.size.at(n) <= math.sqrt(limit)))


def feature_rounding(
    blocks: Iterable[BlockFacts], config: LipNeXtConfig, dtype: torch.dtype
) -> FeatureRounding:
    """The exact network begins at pixels p/255 and has weights in dtype."""
    info = torch.finfo(dtype)
    unit, tiny = info.eps / 2, info.smallest_normal
    width, tokens = config.width, (config.image_size // config.patch_size) ** 2
    numbers, pixels = width * tokens, config.in_channels * config.image_size**2

    flushed = 2 * math.sqrt(numbers) * tiny  # by one addition to every number
    norm = Affine(0.0, 1.0)  # of the exact values; ‖x‖ ≤ ‖x - ½‖ + ½·√pixels
    # p/255 may round twice, for CUDA multiplies by a rounded 1/255; then - ½.
    error = Affine(unit * math.sqrt(pixels) + flushed, 3 * unit)
    largest = norm + error
    for block in blocks:
        if block.pos:
            # pos is one number for all C channels of a token.
            norm = norm + math.sqrt(width) * block.pos
            error = error + (norm + error) * unit + flushed

        computed = norm + error
        largest = largest.or_larger(computed * (2 * block.rotation_frobenius + 2))
        share, beside = product_loss(width, numbers, block.rotation_frobenius, dtype)
        error = error * block.rotation + computed * share + beside
        norm = norm * block.rotation

        # The bias is one more term in each sum.
        computed, bias = norm + error, math.sqrt(tokens) * block.bias
        largest = largest.or_larger((computed * block.weight_frobenius + bias) * 2)
        share, beside = product_loss(width + 1, numbers, block.weight_frobenius, dtype)
        error = error * block.weight + computed * share + beside + gamma(width + 1, unit) * bias
        norm = norm * block.weight + bias
    # The pooling: a sum of T squares and a root. Squares that underflow leave at most √(2·T·tiny).
    size = norm + error
    error = error + size * gamma(tokens + 4, unit) + math.sqrt(2 * numbers * tiny)
    return FeatureRounding(error * OWN_ROUNDING, largest, size, dtype)
