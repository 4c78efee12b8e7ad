"""L⁻¹A with LLᵀ = AAᵀ: Cholesky's orthogonalisation, as in LiResNet++ (Hu et al., ICLR 2024)."""

import torch
from torch import Tensor

from lipnext_scale.models.layers.base import (
    Linear,
    Parameters,
    gram_cholesky,
    identity_like,
    largest_entry,
)
from lipnext_scale.models.layers.lot import initial
from lipnext_scale.utils.products import linear


def orthogonalised(a: Tensor) -> Tensor:
    """Rows of [..., m, n], m ≤ n, made orthonormal; it contracts where they are dependent."""
    a = a / largest_entry(a)
    factor = gram_cholesky(a)
    if a.shape[-1] == a.shape[-2]:
        return torch.linalg.solve_triangular(factor, a, upper=False)
    # Faster where it is wide: the inverse is small, and a product is fast.
    inverse = torch.linalg.solve_triangular(factor, identity_like(factor), upper=False)
    return linear(inverse, a.mT) if a.dim() == 2 else inverse @ a


def made(free: Parameters) -> dict[str, Tensor]:
    return {"matrix": orthogonalised(free["A"])}


CHOLESKY = Linear(lambda width: {"A": (width, width)}, initial, made)
