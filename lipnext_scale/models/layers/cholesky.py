"""L⁻¹A with LLᵀ = AAᵀ: Cholesky's orthogonalisation, as in LiResNet++ (Hu et al., ICLR 2024)."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lipnext_scale.models.layers.base import (
    Linear,
    Parameters,
    gram_cholesky,
    identity_like,
    largest_entry,
)
from lipnext_scale.models.layers.lot import initial
from lipnext_scale.utils.products import product


def orthogonalised(a: Tensor) -> Tensor:
    """Rows of [..., m, n], m ≤ n, made orthonormal; it contracts where they are dependent."""
    a = a / largest_entry(a)
    if a.dim() == 2 and a.shape[0] < a.shape[1] and not a.is_complex():
        return _Wide.apply(a)
    return orthogonalised_reference(a)


def orthogonalised_reference(a: Tensor) -> Tensor:
    factor = gram_cholesky(a)
    if a.shape[-1] == a.shape[-2]:
        return torch.linalg.solve_triangular(factor, a, upper=False)
    # Faster where it is wide: the inverse is small, and a product is fast.
    return torch.linalg.solve_triangular(factor, identity_like(factor), upper=False) @ a


class _Wide(torch.autograd.Function):
    """`orthogonalised_reference` of a wide matrix, with three large products in the backward pass.

    With W = L⁻¹A, E = L⁻¹dA and Φ(S) = S's lower triangle with half its diagonal,

        dW = E - Φ(EWᵀ + WEᵀ)·W,    dA = L⁻ᵀ(G - Q·W) for G of W,

    where Q is symmetric and has the lower triangle of GWᵀ.
    """

    @staticmethod
    def forward(ctx: Any, a: Tensor) -> Tensor:
        factor = gram_cholesky(a)
        inverse = torch.linalg.solve_triangular(factor, identity_like(factor), upper=False)
        made = product(inverse, a.mT)
        ctx.save_for_backward(inverse, made)
        return made

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        inverse, made = ctx.saved_tensors
        lower = product(grad, made).tril()
        symmetric = lower + lower.tril(-1).mT
        return product(inverse.mT, (grad - product(symmetric, made.mT)).mT)


def made(free: Parameters) -> dict[str, Tensor]:
    return {"matrix": orthogonalised(free["A"])}


CHOLESKY = Linear(lambda width: {"A": (width, width)}, initial, made)
