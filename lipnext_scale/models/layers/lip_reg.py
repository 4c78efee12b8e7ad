"""x + A·x, whose norm is held by the loss: LiResNet's (Hu et al., NeurIPS 2023).

Nothing makes I + A a contraction. The loss and radii see class distances times K = Π‖I + A‖
(`LipNeXt.forward`), as LiResNet's EMMA does: that is what keeps K small.
"""

import torch
from torch import Tensor

from lipnext_scale.models.layers.base import Linear, Parameters, gaussian, identity_like

ITERATIONS = 16


def power_norm(matrix: Tensor) -> Tensor:
    """‖X‖₂ by power iteration, from below, with gradient; for the loss alone."""
    x = matrix.detach()
    vector = torch.ones_like(x[..., :1])
    for _ in range(ITERATIONS):
        vector = x.mT @ (x @ vector)
        vector = vector / torch.linalg.vector_norm(vector, dim=-2, keepdim=True).clamp_min(1e-30)
    return torch.linalg.vector_norm(matrix @ vector, dim=-2).squeeze(-1)


def made(free: Parameters) -> dict[str, Tensor]:
    a = free["A"]
    return {"matrix": identity_like(a) + a}


def initial(width: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Near the identity."""
    return {"A": 0.05 * gaussian(generator, 2, width, width) / width**0.5}


LIP_REG = Linear(lambda width: {"A": (width, width)}, initial, made, norm=power_norm)
