"""x + A·x, whose norm is held by the loss: LiResNet's (Hu et al., NeurIPS 2023).

Nothing makes I + A a contraction. The loss and radii see class distances times K = Π‖I + A‖
(`LipNeXt.forward`), as LiResNet's EMMA does: that is what keeps K small.
"""

import torch
from torch import Tensor

from lipnext_scale.models.layers.base import (
    Linear,
    Parameters,
    gaussian,
    gram_norm,
    identity_like,
)


def norm(matrix: Tensor) -> Tensor:
    """‖X‖₂ from above, with gradient: √‖XᵀX‖ and √(1 + ‖XᵀX - I‖), which is tight near O(d).

    Not by power iteration: training turns the large singular values away from its start.
    """
    gram = matrix.mH @ matrix
    squared = torch.minimum(gram_norm(gram), 1 + gram_norm(gram - identity_like(gram)))
    return squared.sqrt()


def made(free: Parameters) -> dict[str, Tensor]:
    a = free["A"]
    return {"matrix": identity_like(a) + a}


def initial(width: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Near the identity."""
    return {"A": 0.05 * gaussian(generator, 2, width, width) / width**0.5}


LIP_REG = Linear(
    lambda width: {"A": (width, width)}, initial, made, lambda made: norm(made["matrix"])
)
