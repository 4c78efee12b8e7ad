"""What a family of layers says, and what several need of a matrix.

A block has two channel mixers, Z = act(mix₂(S(mix₁(X + pos))) + b). A family says how one mixer of
width C is made of free parameters, which the Euclidean optimizer learns.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from lipnext_scale.utils.products import linear

Shapes = dict[str, tuple[int, ...]]
Parameters = Mapping[str, Tensor]  # by name, [..., *shape]: any number of mixers at once


@dataclass(frozen=True)
class Family:
    """shapes: of the free parameters of one mixer, by width. initial: their first values for both
    mixers of a block, [2, *shape]. made: the tensors that a mixer computes with, of its free ones.
    norm: a bound of a mixer's norm, of its made tensors and with gradient, where that is not 1 by
    construction.

    What is made of a matrix may be made of complex ones too: `conv.py` has one a frequency.
    """

    shapes: Callable[[int], Shapes]
    initial: Callable[[int, torch.Generator], dict[str, Tensor]]
    made: Callable[[Parameters], dict[str, Tensor]]
    norm: Callable[[Parameters], Tensor] | None = None

    def made_shapes(self, width: int) -> Shapes:
        return {"matrix": (width, width)}

    def stored(self, made: Parameters) -> Parameters:
        """What a frozen mixer has of `made`."""
        return made


@dataclass(frozen=True)
class Linear(Family):
    """A product with `made`'s matrix [..., C, C]."""


@dataclass(frozen=True)
class Gated(Family):
    """x - 2·Qᵀσ(Q·x + c) with ‖Q‖ ≤ 1 (residual), or 2·Aᵀσ(B·x + c) with ‖[A B]‖ ≤ 1; σ = ReLU.

    Both are 1-Lipschitz: docs/layers.md has the proofs.
    """

    residual: bool = True

    def made_shapes(self, width: int) -> Shapes:
        matrices = ("Q",) if self.residual else ("A", "B")
        return {**{name: (width, width) for name in matrices}, "c": (width,)}

    def mix(self, made: Parameters, x: Tensor) -> Tensor:
        """Of x [..., C], with the made tensors of one mixer."""
        if self.residual:
            return torch.add(x, F.relu(F.linear(x, made["Q"], made["c"])) @ made["Q"], alpha=-2)
        return 2 * (F.relu(F.linear(x, made["B"], made["c"])) @ made["A"])


# --------------------------------------------------------------------------------------------------


def skew_part(x: Tensor) -> Tensor:
    return x - x.mH


def identity_like(x: Tensor) -> Tensor:
    return torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)


def gaussian(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator, device="cpu")


def largest_entry(x: Tensor) -> Tensor:
    """max |x| of each matrix, 1 for zeros, [..., 1, 1]: x/max neither overflows nor vanishes.

    Without a gradient: what is made of x does not change with its scale.
    """
    largest = x.detach().abs().amax((-2, -1), keepdim=True)
    return torch.where(largest > 0, largest, 1)


GRAM_ITERATIONS = 5


def gram_norm(x: Tensor) -> Tensor:
    """An upper bound of ‖X‖₂, [..., 1, 1], with gradient: ‖X‖₂² = ‖XᴴX‖₂, repeated, ending in
    ‖·‖₂ ≤ ‖·‖_F (Delattre et al. 2023). It is at most d^(1/64) times as large."""
    scales = []
    for _ in range(GRAM_ITERATIONS):
        scales.append(largest_entry(x))
        x = x / scales[-1]
        x = x.mH @ x
    tiny = torch.finfo(x.dtype).tiny
    bound = torch.linalg.matrix_norm(x, keepdim=True).clamp_min(tiny)
    for scale in reversed(scales):
        bound = scale * bound.sqrt()
    return bound


def gram_cholesky(x: Tensor) -> Tensor:
    """L with LLᴴ = XXᴴ + ε·I: ε is what rounding may have taken from the least eigenvalue."""
    gram = linear(x, x) if x.dim() == 2 and not x.is_complex() else x @ x.mH
    trace = gram.diagonal(dim1=-2, dim2=-1).real.sum(-1)[..., None, None]
    info = torch.finfo(x.dtype)
    gram = gram + (4 * info.eps * trace + info.tiny) * identity_like(gram)
    factor, failed = torch.linalg.cholesky_ex(gram)
    # NaN, which the run's policy handles, without the host's waiting for the answer.
    return torch.where((failed == 0)[..., None, None], factor, torch.nan)
