"""Projected gradient descent on the margin, in the l2 norm: pure functions on tensors."""

from collections.abc import Callable

import torch
from torch import Tensor

Classifier = Callable[[Tensor], Tensor]  # NCHW images → logits

FIRST_STEP = 0.5  # of the radius


def pgd(
    model: Classifier,
    images: Tensor,
    labels: Tensor,
    radii: Tensor,
    starts: Tensor,
    steps: int,
    clip: bool = False,
) -> Tensor:
    """Perturbations within `radii`, one each, that minimise the smallest margin of `labels`.

    starts: where to begin, in the unit ball. clip: images + perturbations stay in [0, 1], where
    images must be. Steps go down to nothing on a straight line; the best point on the way is kept.
    Perturbations and not images come back, for they have more digits than their sum with an image.
    """
    radii = radii.to(images.dtype).view(-1, 1, 1, 1)
    delta = into_reach(starts * radii, images, radii, clip)
    best = Best(delta)
    for step in range(steps):
        margins, gradient = margins_and_gradient(model, images, labels, delta)
        best.see(delta, margins)
        length = FIRST_STEP * (1 - step / steps) * radii
        delta = into_reach(delta - length * unit(gradient), images, radii, clip)
    best.see(delta, margins_at(model, images, labels, delta))
    return best.delta


class Best:
    """Of every image the perturbation with the smallest margin so far."""

    def __init__(self, delta: Tensor) -> None:
        self.delta = delta
        self.margins = torch.full_like(delta[:, 0, 0, 0], float("inf"))

    def see(self, delta: Tensor, margins: Tensor) -> Tensor:
        """Keep what is better; which images that were."""
        better = margins < self.margins
        self.margins = torch.where(better, margins, self.margins)
        self.delta = torch.where(better.view(-1, 1, 1, 1), delta, self.delta)
        return better


def margins_and_gradient(
    model: Classifier, images: Tensor, labels: Tensor, delta: Tensor
) -> tuple[Tensor, Tensor]:
    """The smallest margins at images + delta, and their gradients in delta alone."""
    with torch.enable_grad():
        delta = delta.detach().requires_grad_(True)
        margins = smallest_margins(model(images + delta), labels)
        (gradient,) = torch.autograd.grad(margins.sum(), delta)
    return margins.detach(), gradient


@torch.no_grad()
def margins_at(model: Classifier, images: Tensor, labels: Tensor, delta: Tensor) -> Tensor:
    return smallest_margins(model(images + delta), labels)


def smallest_margins(logits: Tensor, labels: Tensor) -> Tensor:
    """logit_label - max of the others: negative where the prediction has changed."""
    own = logits.gather(1, labels[:, None]).squeeze(1)
    others = logits.scatter(1, labels[:, None], float("-inf"))
    return own - others.max(1).values


def into_reach(delta: Tensor, images: Tensor, radii: Tensor, clip: bool) -> Tensor:
    """Into the ball of `radii` and, if asked, the box [0, 1].

    The box first: drawing a point nearer to its image, as the ball then may, does not leave a
    convex box that has the image in it.
    """
    if clip:
        delta = (images + delta).clamp(0, 1) - images
    return delta * (radii / norms(delta)).clamp(max=1)


def norms(delta: Tensor) -> Tensor:
    """l2 norms as [N, 1, 1, 1], never 0."""
    return delta.flatten(1).norm(dim=1).clamp_min(1e-30).view(-1, 1, 1, 1)


def unit(gradient: Tensor) -> Tensor:
    """Its direction; where there is none, 0."""
    return gradient / norms(gradient)
