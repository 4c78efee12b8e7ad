"""A guaranteed upper bound K of the network's Lipschitz constant, from the stored weights.

features = pool ∘ block_L ∘ … ∘ block_1 ∘ stem. The stem, the shift, the activation and the pooling
are 1-Lipschitz whatever the weights, so K = Π ‖R_i‖₂·‖W_i‖₂. Each factor is bounded in float64,
with the rounding of the bound's own computation added: an upper bound, not an estimate.
"""

import math

import torch
from torch import Tensor

from lipnext_scale.errors import UserError
from lipnext_scale.models import LipNeXt

UNIT_ROUNDOFF = 2.0**-53
MAX_ITERATIONS = 7
# Further tightening by less than this would not show in a radius.
GOOD_ENOUGH = 1e-9


def spectral_norm_bound(matrix: Tensor) -> float:
    """An upper bound of ‖X‖₂ for one matrix near O(d): √(1 + ‖XᵀX - I‖₂), bounded from above."""
    x = matrix.detach().double()
    deviation = x.mT @ x
    # |fl(XᵀX) - XᵀX| ≤ γ·|X|ᵀ|X| entry by entry, whose Frobenius norm is at most γ·‖X‖_F².
    slack = _gamma(x.shape[-2]) * _above(torch.linalg.matrix_norm(x).item() ** 2)
    deviation.diagonal().sub_(1)
    slack += 2 * UNIT_ROUNDOFF * (1 + deviation.diagonal().abs().max().item()) * x.shape[-1]
    return _above(math.sqrt(_above(1 + gram_bound(deviation) + slack)))


def gram_bound(matrix: Tensor) -> float:
    """An upper bound of ‖E‖₂ by Gram iteration: ‖E‖₂² = ‖EᵀE‖₂, repeated, ending in ‖·‖₂ ≤ ‖·‖_F.

    Each iteration halves the logarithm of what the Frobenius norm overestimates. With M_{t+1} the
    computed Gram matrix over c_t = ‖M_t‖_F², its rounding enters as ‖M_t‖₂² ≤ c_t·(‖M_{t+1}‖₂ + γ).
    """
    current = matrix
    scales: list[float] = []
    for _ in range(MAX_ITERATIONS):
        norm = torch.linalg.matrix_norm(current).item()
        if norm == 0 or _unwind(_above(norm), scales, matrix.shape[-1]) < GOOD_ENOUGH:
            break
        scales.append(_above(norm * norm))
        current = (current / norm).mT @ (current / norm)
    return _unwind(_above(torch.linalg.matrix_norm(current).item()), scales, matrix.shape[-1])


def _unwind(bound: float, scales: list[float], dimension: int) -> float:
    """From a bound of ‖M_T‖₂ back to one of ‖M_0‖₂."""
    for scale in reversed(scales):
        # Beside the product's γ, the division by the norm rounds every entry once (twice, squared).
        bound = _above(math.sqrt(_above(scale * (bound + _gamma(dimension + 4)))))
    return bound


def _gamma(terms: int) -> float:
    """γ_n = n·u/(1 - n·u): the relative error of a sum of n products in any order."""
    return terms * UNIT_ROUNDOFF / (1 - terms * UNIT_ROUNDOFF)


def _above(value: float) -> float:
    """Round a computed scalar up by more than its own last operations can have lost.

    A Frobenius norm of n numbers is summed with a relative error far below 1e-12 for every n here.
    """
    return value * (1 + 1e-12)


@torch.no_grad()
def lipschitz_bound(model: LipNeXt) -> float:
    """K of `model.features`: 1 + a little after training. Weights must be finite."""
    bound = 1.0
    for name, parameter in model.named_parameters():
        if not parameter.isfinite().all():
            raise UserError(f"{name}: holds values that are not finite; nothing can be certified")
    for group in model.block_groups():
        # W as the forward pass computes it, so that the rounding of M·Rᵀ is inside the bound.
        for stack in group.layers():
            for matrix in stack:
                bound = _above(bound * spectral_norm_bound(matrix))
    return bound
