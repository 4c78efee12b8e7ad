"""A guaranteed upper bound of a matrix's spectral norm, tight for matrices near O(d).

Computed in float64, with the rounding of the computation itself added: a bound, not an estimate.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from lipnext_scale.models import LipNeXt
from lipnext_scale.models.blocks import matrix_list
from lipnext_scale.utils.errors import UserError

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
        if norm == 0 or not math.isfinite(norm):
            break
        if _unwind(current, scales) * (1 - least) < GOOD_ENOUGH:
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


# --------------------------------------------------------------------------------------------------
# The facts of the weights that a certificate needs, block by block, and K, which follows from them.
#
# features = pool ∘ block_L ∘ … ∘ block_1 ∘ stem. The stem, the shift, the activation and the
# pooling are 1-Lipschitz for all weights, so K = Π ‖R_i‖₂·‖W_i‖₂.


@dataclass(frozen=True)
class BlockFacts:
    """Upper bounds of a block's norms; those of the bias and of pos are l2 norms."""

    rotation: float  # ‖R‖₂
    weight: float  # ‖W‖₂
    rotation_frobenius: float
    weight_frobenius: float
    bias: float
    pos: float


@torch.no_grad()
def measure_blocks(model: LipNeXt, part: int = 0, parts: int = 1) -> dict[int, BlockFacts]:
    """The facts of every `parts`-th block from `part` on: several processes share the work."""
    for name, parameter in model.named_parameters():
        if not parameter.isfinite().all():
            raise UserError(f"{name}: holds values that are not finite; nothing can be certified")
    found = {}
    for group in model.block_groups():
        matrices = matrix_list(group.orthogonal_weights())
        for index in range(group.count):
            if (group.first + index) % parts != part:
                continue
            rotation, weight = matrices[2 * index], matrices[2 * index + 1]
            pos = None if group.pos is None else group.pos[index]
            found[group.first + index] = BlockFacts(
                rotation=spectral_norm_bound(rotation),
                weight=spectral_norm_bound(weight),
                rotation_frobenius=frobenius_above(rotation.double()),
                weight_frobenius=frobenius_above(weight.double()),
                bias=_norm_above(group.bias[index]),
                pos=0.0 if pos is None else _norm_above(pos),
            )
    return found


def product_loss(
    terms: int, numbers: int, frobenius: float, dtype: torch.dtype
) -> tuple[float, float]:
    """‖fl(A·X) - A·X‖_F ≤ share·‖X‖_F + beside, for A [n, n] of this norm and X of so many numbers.

    |fl(A·X) - A·X| ≤ γ_n·|A||X| entry by entry, whatever the order of the sums. Beside it, what
    lies below the smallest normal number may be lost: of products and sums (4n of them, which
    leaves room for γ), of the entries of A, of those of X.
    """
    info = torch.finfo(dtype)
    tiny = info.smallest_normal
    share = gamma(terms, info.eps / 2) * frobenius + terms * tiny
    return share, (4 * terms + frobenius) * math.sqrt(numbers) * tiny


def _norm_above(vector: Tensor) -> float:
    return frobenius_above(vector.detach().double().reshape(1, -1))


def network_bound(blocks: Iterable[BlockFacts]) -> float:
    """K = Π ‖R_i‖₂·‖W_i‖₂."""
    bound = 1.0
    for block in blocks:
        bound = above(above(bound * block.rotation) * block.weight)
    if not math.isfinite(bound):
        raise UserError(
            "the weights are so large that their norm overflows; nothing can be certified"
        )
    return bound


def lipschitz_bound(model: LipNeXt) -> float:
    """K of `model.features`: 1 + a little after training. Weights must be finite."""
    blocks = measure_blocks(model)
    return network_bound(blocks[number] for number in sorted(blocks))
