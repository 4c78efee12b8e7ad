"""Auto-PGD (Croce and Hein, 2020) for the l2 norm: it finds its step lengths by itself.

The margin itself is minimised. The paper's DLR loss divides it by a difference of other logits, so
that the loss does not depend on the scale of the logits, as cross-entropy does. Here only a
gradient's direction is used, step by step and image by image: a factor would change nothing, and
the gradient of the denominator would lead away from the boundary. It is also the margin that a
certificate bounds.
"""

import torch
from torch import Tensor

from lipnext_scale.attack.pgd import (
    Best,
    Classifier,
    into_reach,
    margins_and_gradient,
    margins_at,
    unit,
)

FIRST_STEP = 2.0  # of the radius
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
    lengths = _StepLengths(FIRST_STEP * radii, best.margins, checkpoints(steps))
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
