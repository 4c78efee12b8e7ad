"""Models whose certificates are tight, and ones whose certificate would be wrong with K = 1."""

import torch
from torch import Tensor

from lipnext_scale.manifold import random_orthogonal
from lipnext_scale.models import LipNeXt, LipNeXtConfig

STRETCH = 1.05
MARGIN = 0.02


def tight_model(seed: int = 0, image_size: int = 4, num_classes: int = 2) -> LipNeXt:
    """No channel beyond the pixels of a patch, so the network is an isometry but for its kinks.

    The gradient of a margin then has the length ‖w_i - w_j‖ almost everywhere, and near a boundary
    the certified radius is the distance to it.
    """
    config = LipNeXtConfig(3, 16, image_size, 4, 1, num_classes)
    model = LipNeXt(config, seed=seed).double()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for matrix in model.groups[0].bank.flatten(0, 1):
            matrix.copy_(random_orthogonal(16, generator, torch.float64))
    return model


def bring_close(model: LipNeXt, image: Tensor, margin: float = MARGIN) -> None:
    """Give the better of two classes this margin at the image, by the head's bias."""
    with torch.no_grad():
        logits = model(image[None])[0]
        top = int(logits.argmax())
        model.head.bias[1 - top] += logits[top] - logits[1 - top] - margin


def stretch_one_direction(model: LipNeXt, image: Tensor) -> None:
    """Give one W one singular value of 1.05, where the image's margin feels it most.

    With a single token the gradient of a block's bias is that of W's output: the margin falls the
    fastest along it. The margin is then set again.
    """
    assert model.config.image_size == model.config.patch_size, "for images of one token"
    logits = model(image[None])[0]
    group = model.block_groups()[0]
    (gradient,) = torch.autograd.grad(logits[0] - logits[1], group.bias)
    direction = gradient[1] / gradient[1].norm()
    with torch.no_grad():
        weight = group.bank[1, 1]
        weight += (STRETCH - 1) * torch.outer(direction, weight.mT @ direction)
    bring_close(model, image)


def broken_model(image: Tensor, seed: int = 0) -> LipNeXt:
    """Certified with K = 1 it changes within the radius of this image, by 5 %."""
    model = tight_model(seed)
    bring_close(model, image)
    stretch_one_direction(model, image)
    return model
