"""The products of a manifold step on tensor cores: bfloat16 operands, float32 sums.

X ← X·exp(A) = X + X·C with C = exp(A) - I. Rounding the operands of X·C costs ‖C‖ times their
rounding, and nothing divides it later, so this product takes each operand as hi + lo:

    bf16     hi·hi                      XᵀG, A², the tail of the series: their errors are small
    bf16x3   hi·hi + hi·lo + lo·hi      X·C, and M·Rᵀ: one product of three times the inner length

The exponent A is itself rounded to bfloat16. Rounding is odd, so A stays exactly skew, and A² is
then made of exact operands: what is lost is a part of the step's direction, not of orthogonality.

The host learns nothing and decides nothing here: the order is 4, the squarings follow from the
learning rate, and a matrix whose A is too large for them is moved less far (`reach_of`).
"""

import math

import torch
from torch import Tensor

from lipnext_scale.manifold import kernels
from lipnext_scale.manifold.exponential import loss_after_squaring

# ‖EᵀE - I‖₂ that truncating the series may cost a step: less than rounding costs it.
TOLERANCE = 1e-6
# What the entries of Adam's Δ/η are taken to be at most, in the mean: 0.13 to 0.23 were measured.
USUAL_ENTRY = 0.5


def product(left: Tensor, right: Tensor) -> Tensor:
    """left·right of bfloat16 stacks, in float32. Emulated where there are no tensor cores."""
    if left.is_cuda:
        return torch.bmm(left, right, out_dtype=torch.float32)
    return left.float() @ right.float()


def rounded_product(left: Tensor, right: Tensor, add: Tensor | None = None) -> Tensor:
    """left·right, plus `add`, all in bfloat16."""
    if left.is_cuda:
        return torch.bmm(left, right) if add is None else torch.baddbmm(add, left, right)
    exact = product(left, right)
    return (exact if add is None else exact + add).bfloat16()


def add_product_(x: Tensor, left: Tensor, right: Tensor, times: float = 1) -> Tensor:
    """x ← times·x + left·right for a float32 stack x."""
    if x.is_cuda:
        return torch.baddbmm(x, left, right, beta=times, out_dtype=torch.float32, out=x)
    return x.baddbmm_(left.float(), right.float(), beta=times)


def product_x3(left: Tensor, right: Tensor) -> Tensor:
    """left·right of float32 stacks to 2⁻¹⁵ of its terms at most; `right` may be transposed."""
    if right.stride(1) == 1:
        return product(kernels.split_left(left), kernels.split_transposed(right.mT).mT)
    return product(kernels.split_left(left), kernels.split_right(right))


def squarings_for(lr: float, width: int, steps: float) -> int:
    """How often to square, for an exponent that is the sum of so many steps.

    A random skew matrix with entries of size a has the norm 2a√d.
    """
    rho, squarings = 2 * USUAL_ENTRY * lr * math.sqrt(width) * steps, 0
    while loss_after_squaring(rho, squarings) > TOLERANCE:
        squarings += 1
    return squarings


def reach_of(width: int, squarings: int) -> float:
    """ρ = (‖A²‖_F²/2)^¼ of an exponent A up to which the squarings are good enough.

    ρ ≥ ‖A‖₂, as eigenvalues come in pairs; for a random A it is d^¼/2 times as large, which the
    limit allows for. An A beyond it is shrunk: a step far larger than Adam's usual ones.
    """
    reach = (72 * TOLERANCE) ** (1 / 6) * 2**squarings  # ρ⁶/72 of order 4
    return reach * max(1.0, width**0.25 / 2)


def exp_operand(exponent: Tensor, squarings: int) -> tuple[Tensor, Tensor]:
    """(C = exp(t·A) - I as the right operand of a bf16x3 product, t) for bfloat16 skew stacks A."""
    square = product(exponent, exponent)
    shrink = kernels.shrink(kernels.norm_parts(square), reach_of(square.shape[-1], squarings))
    scale = shrink * 0.5**squarings if squarings else shrink
    tail = rounded_product(*kernels.tail_operands(square, exponent, scale))
    operand = kernels.change_right(square, exponent, tail, scale)
    for _ in range(squarings):  # (I+C)² - I = 2C + C²
        hi, lo, _ = operand.chunk(3, dim=1)
        left, change = torch.cat([hi, hi, lo], dim=2), hi.float().add_(lo)
        operand = kernels.split_right(add_product_(change, left, operand, times=2))
    return operand, shrink


def high_part(left: Tensor) -> Tensor:
    """bf16(X), the first part of the left operand of a bf16x3 product."""
    return left[..., : left.shape[-2]]
