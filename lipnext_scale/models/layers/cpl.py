"""x - 2/‖A‖²·Aᵀσ(Ax + b): convex potential layers (Meunier et al., ICML 2022)."""

import torch
from torch import Tensor

from lipnext_scale.models.layers.base import Gated, Parameters, gaussian, gram_norm, largest_entry


def made(free: Parameters) -> dict[str, Tensor]:
    """Q = A/‖A‖ and c = b/‖A‖, since σ(t·x) = t·σ(x); ‖A‖ bounded from above."""
    scale = largest_entry(free["A"])
    a = free["A"] / scale
    norm = gram_norm(a).clamp_min(1)  # no entry of A is above it, but those of 0
    return {"Q": a / norm, "c": free["b"] / (scale * norm).squeeze(-1)}


def initial(width: int, generator: torch.Generator) -> dict[str, Tensor]:
    a = gaussian(generator, 2, width, width) / width**0.5
    return {"A": a, "b": torch.zeros(2, width)}


CPL = Gated(lambda width: {"A": (width, width), "b": (width,)}, initial, made)
