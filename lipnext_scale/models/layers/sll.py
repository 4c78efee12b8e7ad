"""x - 2A·T⁻¹σ(Aᵀx + b), T_ii = Σ_j |AᵀA|_ij·q_j/q_i: SLL (Araujo et al., ICLR 2023)."""

import torch
from torch import Tensor

from lipnext_scale.models.layers.aol import row_sums
from lipnext_scale.models.layers.base import Gated, Parameters, Shapes, largest_entry
from lipnext_scale.models.layers.cpl import initial as initial_cpl

LARGEST = 20.0  # of log q, so that q_j/q_i is finite in float32


def made(free: Parameters) -> dict[str, Tensor]:
    """Q = T^-½Aᵀ and c = T^-½b, since σ(t·x) = t·σ(x)."""
    scale = largest_entry(free["A"])
    a, q = free["A"] / scale, free["log_q"].clamp(-LARGEST, LARGEST)
    ratios = (q[..., None, :] - q[..., :, None]).exp()
    root = row_sums(a.mT @ a * ratios).sqrt()
    return {"Q": a.mT / root[..., None], "c": free["b"] / (scale.squeeze(-1) * root)}


def shapes(width: int) -> Shapes:
    return {"A": (width, width), "log_q": (width,), "b": (width,)}


def initial(width: int, generator: torch.Generator) -> dict[str, Tensor]:
    return {**initial_cpl(width, generator), "log_q": torch.zeros(2, width)}


SLL = Gated(shapes, initial, made)
