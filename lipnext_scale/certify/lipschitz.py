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
    deviation.diagonal().sub_(1)
    # |fl(XᵀX) - XᵀX| ≤ γ·|X|ᵀ|X| entry by entry, whose Frobenius norm is at most γ·‖X‖_F²; taking
    # 1 off the diagonal rounds each of its entries once more.
    slack = _gamma(x.shape[-2]) * _frobenius_above(x) ** 2
    slack += 2 * UNIT_ROUNDOFF * deviation.diagonal().abs().max().item()
    return _above(math.sqrt(_above(1 + gram_bound(deviation) + slack)))


def gram_bound(matrix: Tensor) -> float:
    """An upper bound of ‖E‖₂ by Gram iteration: ‖E‖₂² = ‖EᵀE‖₂, repeated, ending in ‖·‖₂ ≤ ‖·‖_F.

    Each iteration halves the logarithm of what the Frobenius norm overestimates. With M_{t+1} the
    computed Gram matrix of M_t/c_t and c_t = ‖M_t‖_F, rounding enters as
    ‖M_t‖₂² ≤ c_t²·(‖M_{t+1}‖₂ + γ).
    """
    current = matrix
    scales: list[float] = []
    for _ in range(MAX_ITERATIONS):
        norm = torch.linalg.matrix_norm(current).item()
        if norm == 0 or _unwind(current, scales) < GOOD_ENOUGH:
            break
        scales.append(norm)
        scaled = current / norm
        current = scaled.mT @ scaled
    return _unwind(current, scales)


def _unwind(last: Tensor, scales: list[float]) -> float:
    """From the last iterate's Frobenius norm back to a bound of ‖M_0‖₂."""
    bound = _frobenius_above(last)
    # γ for the product, and two roundings of each entry by the division; 1 % more than ‖M/c‖_F² = 1
    # needs covers the rounding of the norm c itself.
    rounding = 1.01 * _gamma(last.shape[-1] + 4)
    for scale in reversed(scales):
        bound = _above(scale * math.sqrt(_above(bound + rounding)))
    return bound


def _gamma(terms: int) -> float:
    """γ_n = n·u/(1 - n·u): the relative error of a sum of n products, added in any order."""
    return terms * UNIT_ROUNDOFF / (1 - terms * UNIT_ROUNDOFF)


def _frobenius_above(matrix: Tensor) -> float:
    """‖M‖_F, raised by what summing all its squares in any order can have lost."""
    return torch.linalg.matrix_norm(matrix).item() * (1 + _gamma(matrix.numel() + 8))


def _above(value: float) -> float:
    """Raise a computed scalar by eight units in the last place: more than its operations lost."""
    return value * (1 + 16 * UNIT_ROUNDOFF)


@torch.no_grad()
def lipschitz_bound(model: LipNeXt) -> float:
    """K of `model.features`: 1 + a little after training. Weights must be finite."""
    bound = 1.0
    for name, parameter in model.named_parameters():
        if not parameter.isfinite().all():
            raise UserError(f"{name}: holds values that are not finite; nothing can be certified")
    with torch.autocast(model.head.weight.device.type, enabled=False):
        for group in model.block_groups():
            # W as the forward pass computes it, so that the rounding of M·Rᵀ is inside the bound.
            for layer in group.layers():
                for matrix in layer:
                    bound = _above(bound * spectral_norm_bound(matrix))
    if not math.isfinite(bound):
        raise UserError(
            "the weights are so large that their norm overflows; nothing can be certified"
        )
    return bound
