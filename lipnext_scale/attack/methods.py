"""Random points to begin at: of (seed, sample, restart, method) alone.

So neither the batch that a sample is in nor the process that attacks it changes what is found.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from lipnext_scale.data.order import sample_bits


def random_starts(
    shape: tuple[int, ...], seed: int, ids: Tensor, restart: int, stream: int
) -> Tensor:
    """Points of the unit ball [N, *shape], in float32 on the CPU.

    The direction is uniform, the length too: in many dimensions points that are uniform in a ball
    all lie on its surface, and the image's own neighbourhood would never be looked at.
    """
    starts = torch.empty(len(ids), *shape)
    for start, bits in zip(
        starts, sample_bits(seed, restart, ids.cpu().numpy(), stream), strict=True
    ):
        generator = torch.Generator().manual_seed(int(bits) >> 1)
        start.normal_(generator=generator)
        start.mul_(torch.rand((), generator=generator) / start.norm().clamp_min(1e-30))
    return starts


# --------------------------------------------------------------------------------------------------
# Projected gradient descent on the margin, in the l2 norm: pure functions on tensors.

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


# --------------------------------------------------------------------------------------------------
# Auto-PGD (Croce and Hein, 2020) for the l2 norm: it finds its step lengths by itself.
#
# The margin itself is minimised. The paper's DLR loss divides it by a difference of other logits,
# so that the loss does not depend on the scale of the logits, as cross-entropy does. Here only a
# gradient's direction is used, step by step and image by image: a factor would change nothing,
# and the gradient of the denominator would lead away from the boundary. It is also the margin
# that a certificate bounds.

FIRST_LENGTH = 2.0  # of the radius
NEW_SHARE = 0.75  # of a move; the rest goes on in the direction of the move before
GOOD_SHARE = 0.75  # of the steps between two checkpoints that should have lowered the margin


def apgd(
    model: Classifier,
    images: Tensor,
    labels: Tensor,
    radii: Tensor,
    starts: Tensor,
    steps: int,
    clip: bool = False,
) -> Tensor:
    """As `pgd`: perturbations within `radii` that minimise the smallest margin of `labels`."""
    radii = radii.to(images.dtype).view(-1, 1, 1, 1)
    delta = before = into_reach(starts * radii, images, radii, clip)
    margins, gradient = margins_and_gradient(model, images, labels, delta)
    best, best_gradient = Best(delta), gradient
    best.see(delta, margins)
    lengths = _StepLengths(FIRST_LENGTH * radii, best.margins, checkpoints(steps))
    for step in range(1, steps + 1):
        moved = into_reach(delta - lengths.now * unit(gradient), images, radii, clip)
        move = NEW_SHARE * (moved - delta) + (1 - NEW_SHARE) * (delta - before)
        # The first move has none before it, and is taken whole.
        moved = moved if step == 1 else into_reach(delta + move, images, radii, clip)
        before, delta, last = delta, moved, margins
        if step == steps:  # there is no further move that a gradient were for
            best.see(delta, margins_at(model, images, labels, delta))
            break
        margins, gradient = margins_and_gradient(model, images, labels, delta)
        better = best.see(delta, margins)
        best_gradient = _where(better, gradient, best_gradient)
        back = lengths.after(step, margins < last, best.margins)
        # Those that stall go on from their best point, at rest.
        delta, before = _where(back, best.delta, delta), _where(back, best.delta, before)
        gradient = _where(back, best_gradient, gradient)
        margins = torch.where(back, best.margins, margins)
    return best.delta


def checkpoints(steps: int) -> list[int]:
    """The steps at which lengths are looked at: first after 22 %, then more and more often."""
    places, last, place = [], 0, 22
    while place < 100:
        places.append(-(-place * steps // 100))
        last, place = place, place + max(place - last - 3, 6)
    return sorted(set(places))


class _StepLengths:
    """The step length of every image: halved at a checkpoint where its search has stalled."""

    def __init__(self, lengths: Tensor, best: Tensor, places: list[int]) -> None:
        self.now = lengths
        self._places, self._last_place = places, 0
        self._best_then, self._lowered = best, torch.zeros_like(best)
        # As if just halved, so that the first stretch counts by its good steps alone.
        self._halved_then = torch.ones_like(best, dtype=torch.bool)

    def after(self, step: int, lowered: Tensor, best: Tensor) -> Tensor:
        """Tell which steps lowered the margin; which images were halved and are to go back."""
        self._lowered = self._lowered + lowered
        if step not in self._places:
            return torch.zeros_like(self._halved_then)
        few = self._lowered < GOOD_SHARE * (step - self._last_place)
        idle = ~self._halved_then & (best >= self._best_then)
        halved = few | idle
        self.now = _where(halved, self.now / 2, self.now)
        self._halved_then, self._best_then = halved, best
        self._lowered, self._last_place = torch.zeros_like(best), step
        return halved


def _where(mask: Tensor, one: Tensor, other: Tensor) -> Tensor:
    return torch.where(mask.view(-1, 1, 1, 1), one, other)
