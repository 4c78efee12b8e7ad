"""What a certificate has to know of the weights, block by block, and K, which follows from it.

features = pool ∘ block_L ∘ … ∘ block_1 ∘ stem. The stem, the shift, the activation and the pooling
are 1-Lipschitz whatever the weights, so K = Π ‖R_i‖₂·‖W_i‖₂.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from lipnext_scale.certify.lipschitz import above, frobenius_above, gamma, spectral_norm_bound
from lipnext_scale.checkpoint import Pieces
from lipnext_scale.errors import UserError
from lipnext_scale.models import LipNeXt
from lipnext_scale.models.blocks import matrix_list


@dataclass(frozen=True)
class BlockFacts:
    """Upper bounds of a block's norms; those of the bias and of pos are l2 norms."""

    rotation: float  # ‖R‖₂
    weight: float  # ‖W‖₂
    rotation_frobenius: float
    weight_frobenius: float
    weight_rounding: float  # ‖W as computed - M·Rᵀ‖_F; 0 where W is stored
    weight_largest: float  # of the numbers met in computing W
    bias: float
    pos: float


@torch.no_grad()
def measure_blocks(model: LipNeXt, part: int = 0, parts: int = 1) -> dict[int, BlockFacts]:
    """The facts of every `parts`-th block from `part` on: several processes share the work."""
    require_finite(model)
    found = {}
    for group in model.block_groups():
        matrices = matrix_list(group.orthogonal_weights())
        for index in range(group.count):
            if (group.first + index) % parts != part:
                continue
            rotation, second = matrices[2 * index], matrices[2 * index + 1]
            pos = None if group.pos is None else group.pos[index]
            is_product = group.spec.parametrisation == "product"
            facts = block_facts(rotation, second, group.bias[index], pos, is_product)
            found[group.first + index] = facts
    return found


def block_facts(
    rotation: Tensor, second: Tensor, bias: Tensor, pos: Tensor | None, is_product: bool
) -> BlockFacts:
    """second: M of the product form, W = M·Rᵀ, or W itself.

    Every forward pass multiplies M·Rᵀ, and every machine in its own order. So W means the exact
    product, ‖W‖ ≤ ‖M‖·‖R‖, and how far a computed one can be from it counts as rounding.
    """
    r, r_frobenius = spectral_norm_bound(rotation), frobenius_above(rotation.double())
    weight, frobenius = spectral_norm_bound(second), frobenius_above(second.double())
    rounding = largest = 0.0
    if is_product:
        width = rotation.shape[-1]
        share, beside = product_loss(width, width**2, frobenius, rotation.dtype)
        rounding, largest = above(share * r_frobenius + beside), above(frobenius * r_frobenius)
        weight, frobenius = above(weight * r), above(weight * r_frobenius)
    return BlockFacts(
        rotation=r,
        weight=weight,
        rotation_frobenius=r_frobenius,
        weight_frobenius=frobenius,
        weight_rounding=rounding,
        weight_largest=largest,
        bias=_norm_above(bias),
        pos=0.0 if pos is None else _norm_above(pos),
    )


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


def require_finite(model: LipNeXt) -> None:
    for name, parameter in model.named_parameters():
        if not parameter.isfinite().all():
            raise UserError(f"{name}: holds values that are not finite; nothing can be certified")


def network_bound(blocks: Iterable[BlockFacts]) -> float:
    """K = Π ‖R_i‖₂·‖W_i‖₂."""
    return _product(factor for block in blocks for factor in (block.rotation, block.weight))


def _product(factors: Iterable[float]) -> float:
    bound = 1.0
    for factor in factors:
        bound = above(bound * factor)
    if not math.isfinite(bound):
        raise UserError(
            "the weights are so large that their norm overflows; nothing can be certified"
        )
    return bound


def lipschitz_bound(model: LipNeXt) -> float:
    """K of `model.features`: 1 + a little after training. Weights must be finite."""
    blocks = measure_blocks(model)
    return network_bound(blocks[number] for number in sorted(blocks))


@torch.no_grad()
def owned_norms(pieces: Pieces, kind: str = "model") -> dict[str, float]:
    """Bounds of the matrices that this process holds whole, by stable name.

    For sharded models, whose ranks own whole matrices: nothing is gathered. kind: `model`, or
    `slow` for the slow weights.
    """
    prefix = f"{kind}.blocks."
    found = {}
    for name, piece in pieces.items():
        if name.startswith(prefix) and name.endswith((".R", ".M", ".W")):
            assert tuple(piece.tensor.shape) == piece.shape, f"{name} is not whole here"
            found[name.removeprefix(f"{kind}.")] = spectral_norm_bound(piece.tensor)
    return found


def bound_of_norms(norms: dict[str, float]) -> float:
    """K from the norms of all ranks together.

    In the product form ‖W‖ ≤ ‖M‖·‖R‖ is used, for M and R may be on different ranks: near O(d)
    that loses nothing to speak of.
    """
    factors = []
    for name in sorted(norms):
        block, _, which = name.rpartition(".")
        factors.append(norms[name])
        if which == "M":
            factors.append(norms[f"{block}.R"])
    return _product(factors)
