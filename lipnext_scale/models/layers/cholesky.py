"""L⁻¹A with LLᵀ = AAᵀ: Cholesky's orthogonalisation, as in LiResNet++ (Hu et al., ICLR 2024)."""

import torch
from torch import Tensor

from lipnext_scale.models.layers.base import Linear, Parameters, gram_cholesky, largest_entry
from lipnext_scale.models.layers.lot import initial


def orthogonalised(a: Tensor) -> Tensor:
    """Rows of [..., m, n], m ≤ n, made orthonormal; it contracts where they are dependent."""
    a = a / largest_entry(a)
    return torch.linalg.solve_triangular(gram_cholesky(a), a, upper=False)


def made(free: Parameters) -> dict[str, Tensor]:
    return {"matrix": orthogonalised(free["A"])}


CHOLESKY = Linear(lambda width: {"A": (width, width)}, initial, made)
