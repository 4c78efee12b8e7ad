"""An l2 attack, to look for changes of a prediction that its certificate rules out."""

import torch
from torch import Tensor

from lipnext_scale.models import LipNeXt


def pgd_l2(
    model: LipNeXt, images: Tensor, labels: Tensor, radii: Tensor, steps: int, seed: int
) -> Tensor:
    """Perturbed images within `radii` (one each) that minimise the smallest margin of `labels`.

    Projected gradient descent from a random point of the ball, not clipped to [0, 1]: the
    certificate speaks of all of the ball. The best point on the way is kept.
    """
    generator = torch.Generator().manual_seed(seed)
    shape = (-1, 1, 1, 1)
    radii = radii.to(images.dtype)
    start = torch.randn(images.shape, generator=generator, dtype=images.dtype)
    delta = start / start.flatten(1).norm(dim=1).view(shape) * radii.view(shape)
    best, best_margin = images + delta, torch.full_like(radii, float("inf"))
    for step in range(steps):
        delta.requires_grad_(True)
        margin = smallest_margin(model(images + delta), labels)
        (gradient,) = torch.autograd.grad(margin.sum(), delta)
        with torch.no_grad():
            better = margin < best_margin
            best_margin = torch.where(better, margin, best_margin)
            best = torch.where(better.view(shape), images + delta, best)
            direction = gradient / gradient.flatten(1).norm(dim=1).clamp_min(1e-30).view(shape)
            length = radii.view(shape) * 0.5 * (1 - step / steps)
            moved = delta - length * direction
            norms = moved.flatten(1).norm(dim=1)
            delta = moved * (radii / norms.clamp_min(1e-30)).clamp(max=1).view(shape)
    return best


def smallest_margin(logits: Tensor, labels: Tensor) -> Tensor:
    """logit_label - max of the others: negative where the prediction has changed."""
    own = logits.gather(1, labels[:, None]).squeeze(1)
    others = logits.scatter(1, labels[:, None], float("-inf"))
    return own - others.max(1).values
