"""A guaranteed upper bound of a matrix's spectral norm, tight for matrices near O(d).

Computed in float64, with the rounding of the computation itself added: a bound, not an estimate.
"""

import math

import torch
from torch import Tensor

UNIT_ROUNDOFF = 2.0**-53
MAX_ITERATIONS = 7
# Tightening a factor of K by half of this would not show in a radius.
GOOD_ENOUGH = 1e-6


@torch.no_grad()
def spectral_norm_bound(matrix: Tensor) -> float:
    """An upper bound of ‖X‖₂ for one matrix near O(d): √(1 + ‖XᵀX - I‖₂), bounded from above."""
    x = matrix.detach().double()
    deviation = x.mT @ x
    deviation.diagonal().sub_(1)
    # |fl(XᵀX) - XᵀX| ≤ γ·|X|ᵀ|X| entry by entry, whose Frobenius norm is at most γ·‖X‖_F²; taking
    # 1 off the diagonal rounds each of its entries once more.
    frobenius = frobenius_above(x)
    slack = gamma(x.shape[-2]) * frobenius * frobenius
    slack += 2 * UNIT_ROUNDOFF * deviation.diagonal().abs().max().item()
    return above(math.sqrt(above(1 + gram_bound(deviation) + slack)))


def gram_bound(matrix: Tensor) -> float:
    """An upper bound of ‖E‖₂ by Gram iteration: ‖E‖₂² = ‖EᵀE‖₂, repeated, ending in ‖·‖₂ ≤ ‖·‖_F.

    Each iteration halves the logarithm of what the Frobenius norm overestimates. With M_{t+1} the
    computed Gram matrix of M_t/c_t and c_t = ‖M_t‖_F, rounding enters as
    ‖M_t‖₂² ≤ c_t²·(‖M_{t+1}‖₂ + γ).
    """
    current = matrix
    scales: list[float] = []
    for iteration in range(MAX_ITERATIONS):
        norm = torch.linalg.matrix_norm(current).item()
        # ‖·‖_F ≤ √d·‖·‖₂, and each iteration has taken a root of that factor.
        least = matrix.shape[-1] ** (-(0.5 ** (iteration + 1)))
        if (
            norm == 0
            or not math.isfinite(norm)
            or _unwind(current, scales) * (1 - least) < GOOD_ENOUGH
        ):
            break
        scales.append(norm)
        scaled = current / norm
        current = scaled.mT @ scaled
    return _unwind(current, scales)


def _unwind(last: Tensor, scales: list[float]) -> float:
    """From the last iterate's Frobenius norm back to a bound of ‖M_0‖₂."""
    bound = frobenius_above(last)
    # γ for the product, and two roundings of each entry by the division; 1 % more than ‖M/c‖_F² = 1
    # needs covers the rounding of the norm c itself.
    rounding = 1.01 * gamma(last.shape[-1] + 4)
    for scale in reversed(scales):
        bound = above(scale * math.sqrt(above(bound + rounding)))
    return bound


def gamma(terms: int, unit: float = UNIT_ROUNDOFF) -> float:
    """γ_n = n·u/(1 - n·u): the relative error of a sum of n products, added in any order."""
    return terms * unit / (1 - terms * unit) if terms * unit < 1 else math.inf


def frobenius_above(matrix: Tensor) -> float:
    """‖M‖_F, raised by what its sum of squares, in any order, can have lost."""
    if not matrix.any():
        return 0.0
    norm = torch.linalg.matrix_norm(matrix).item() * (1 + gamma(matrix.numel() + 8))
    return norm + math.sqrt(2 * matrix.numel() * torch.finfo(matrix.dtype).smallest_normal)


def above(value: float) -> float:
    """Raise a computed scalar by eight units in the last place: more than its operations lost."""
    return value * (1 + 16 * UNIT_ROUNDOFF)
