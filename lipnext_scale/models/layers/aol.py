"""A·diag(Σ_j |AᵀA|_ij)^-½: almost-orthogonal layers (Prach & Lampert, ECCV 2022)."""

import torch
from torch import Tensor

from lipnext_scale.models.layers.base import Linear, Parameters, largest_entry
from lipnext_scale.models.layers.lot import initial


def row_sums(gram: Tensor) -> Tensor:
    """Σ_j |G_ij|, above 0 also for columns that vanish."""
    return gram.abs().sum(-1).clamp_min(torch.finfo(gram.dtype).tiny ** 0.75)


def rescaled(a: Tensor) -> Tensor:
    a = a / largest_entry(a)
    return a / row_sums(a.mT @ a).sqrt()[..., None, :]


def made(free: Parameters) -> dict[str, Tensor]:
    return {"matrix": rescaled(free["A"])}


AOL = Linear(lambda width: {"A": (width, width)}, initial, made)
