"""The products of a manifold step on tensor cores: bfloat16 operands, float32 sums.

X ← X·exp(A) = X + X·C with C = exp(A) - I. Rounding the operands of X·C costs ‖C‖ times their
rounding, and nothing divides it later, so this product takes each operand as hi + lo:

    bf16     hi·hi                      XᵀG, A², the tail of the series: their errors are small
    bf16x3   hi·hi + hi·lo + lo·hi      X·C, and M·Rᵀ: one product of three times the inner length

XᵀG is rounded to bfloat16 too: its entries are as large as those of G, which were rounded alike.
The exponent A is itself rounded to bfloat16. Rounding is odd, so A stays exactly skew, and A² is
then made of exact operands: what is lost is a part of the step's direction, not of orthogonality.

The host learns nothing and decides nothing here: the squarings follow from the learning rate, and a
matrix whose A is too large for them is moved less far (`exp_operand`).
"""

import math

import torch
from torch import Tensor

from lipnext_scale.manifold import kernels

# ‖EᵀE - I‖₂ that the end of the series may cost a step of the usual size: less than rounding costs
# it. The fast weights of Lookahead forget theirs when they next follow the slow ones.
TOLERANCE, FAST_TOLERANCE = 1e-6, 3e-4
# A step larger than usual may cost so many times as much, and is shortened beyond that.
LARGEST = 4
# |p(iλ)|² - 1 = LOSS·λ⁸, see `kernels.tail_operands`.
LOSS = kernels.CUBIC**4


def product(left: Tensor, right: Tensor, out: Tensor | None = None) -> Tensor:
    """left·right of bfloat16 stacks, in float32. Emulated where there are no tensor cores."""
    if left.is_cuda:
        return torch.bmm(left, right, out_dtype=torch.float32, out=out)
    return torch.bmm(left.float(), right.float(), out=out)


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


def reach(squarings: int, tolerance: float) -> float:
    """The ‖A‖₂ up to which ‖EᵀE - I‖₂ is within the tolerance: 2ˢ times the loss of A/2ˢ."""
    parts = 2.0**squarings
    return parts * float(tolerance / parts / LOSS) ** (1 / 8)


def usual_entry(beta1: float, step: int) -> float:
    """The entries of Adam's Δ/η in the mean square, if gradients are noise: 0.23 in the end, with
    bias correction 1 at first. 0.13 to 0.23 were measured.
    """
    forgotten = beta1**step
    return math.sqrt((1 - beta1) / (1 + beta1) * (1 + forgotten) / (1 - forgotten))


def squarings_for(entry: float, width: int, tolerance: float = TOLERANCE) -> int:
    """How often to square for an exponent A with such entries in the mean square.

    Eigenvalues come in pairs, so ‖A‖₂ ≤ ‖A‖_F/√2. Early training comes near that: one plane makes
    up most of Δ.
    """
    rho, squarings = entry * width / math.sqrt(2), 0
    while reach(squarings, tolerance) < rho:
        squarings += 1
    return squarings


def exp_operand(
    exponent: Tensor, parts: Tensor, squarings: int, tolerance: float = TOLERANCE, lo: int = 1
) -> tuple[Tensor, Tensor]:
    """(C = exp(t·A) - I as the right operand of a bf16x3 product, t) for bfloat16 skew stacks A.

    parts: rows of numbers that add up to ‖A‖_F². lo: the third of the operand that is lo.
    t ≤ 1 of each matrix is such that t·A costs at most `LARGEST` times the tolerance.
    """
    shrink = kernels.shrink(parts, reach(squarings, LARGEST * tolerance))
    square = product(exponent, exponent)
    scale = shrink * 0.5**squarings if squarings else shrink
    # Squaring would multiply the rounding of the tail.
    multiply = product if squarings else rounded_product
    tail = multiply(*kernels.tail_operands(square, exponent, scale))
    operand = kernels.change_right(square, exponent, tail, scale, 1 if squarings else lo)
    for left_over in reversed(range(squarings)):  # (I+C)² - I = 2C + C²
        hi, rest, _ = operand.chunk(3, dim=1)
        left, change = torch.cat([hi, hi, rest], dim=2), hi.float().add_(rest)
        add_product_(change, left, operand, times=2)
        operand = kernels.split_right(change, 1 if left_over else lo)
    return operand, shrink


def high_part(left: Tensor) -> Tensor:
    """bf16(X), the first part of the left operand of a bf16x3 product."""
    return left[..., : left.shape[-2]]
