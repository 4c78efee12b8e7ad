"""Models whose certificates are tight, and ones whose certificate would be wrong with K = 1."""

import torch
from torch import Tensor

from lipnext_scale.manifold import random_orthogonal
from lipnext_scale.models import LipNeXt, LipNeXtConfig


def tight_model(seed: int = 0) -> LipNeXt:
    """No channel beyond the pixels of a patch, so the network is an isometry but for its kinks.

    The gradient of a margin then has the length ‖w_i - w_j‖ almost everywhere, and near a boundary
    the certified radius is the distance to it.
    """
    config = LipNeXtConfig(3, 16, 4, 4, 1, 2)
    model = LipNeXt(config, seed=seed).double()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for matrix in model.groups[0].bank.flatten(0, 1):
            matrix.copy_(random_orthogonal(16, generator, torch.float64))
    return model


def bring_close(model: LipNeXt, image: Tensor) -> None:
    """Give the better of two classes a margin of 0.02 at the image, by the head's bias."""
    with torch.no_grad():
        logits = model(image[None])[0]
        top = int(logits.argmax())
        model.head.bias[1 - top] += logits[top] - logits[1 - top] - 0.02


def broken_model(image: Tensor, seed: int = 0) -> LipNeXt:
    """Certified with K = 1 it changes within the radius of this image, by 5 %.

    One W has one singular value of 1.05, where the image's margin feels it most: with a single
    token the gradient of a block's bias is that of W's output, and the margin falls the fastest
    along it.
    """
    model = tight_model(seed)
    bring_close(model, image)
    logits, group = model(image[None])[0], model.block_groups()[0]
    (gradient,) = torch.autograd.grad(logits[0] - logits[1], group.bias)
    direction = gradient[1] / gradient[1].norm()
    with torch.no_grad():
        weight = group.bank[1, 1]
        weight += 0.05 * torch.outer(direction, weight.mT @ direction)
    bring_close(model, image)
    return model
