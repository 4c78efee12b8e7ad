"""I - 2V(VᵀV)⁻¹Vᵀ with V [C, C/4]: the block reflector of BRO (Lai et al., ICML 2025)."""

import torch
from torch import Tensor

from lipnext_scale.models.layers.base import Linear, Parameters, Shapes, gaussian, identity_like
from lipnext_scale.models.layers.cholesky import orthogonalised


def rank(width: int) -> int:
    return max(1, width // 4)


def reflector(v: Tensor) -> Tensor:
    """With Q = L⁻¹Vᵀ, LLᵀ = VᵀV, it is I - 2QᵀQ."""
    q = orthogonalised(v.mH)
    gram = q.mH @ q
    return identity_like(gram) - 2 * gram


def shapes(width: int) -> Shapes:
    return {"V": (width, rank(width))}


def made(free: Parameters) -> dict[str, Tensor]:
    return {"matrix": reflector(free["V"])}


def initial(width: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Both mixers alike: a reflector is its own transpose."""
    v = gaussian(generator, width, rank(width)) / width**0.5
    return {"V": torch.stack([v, v])}


BRO = Linear(shapes, initial, made)
