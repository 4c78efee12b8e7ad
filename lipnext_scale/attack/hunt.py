"""What attacks are for: to look for a wrong certificate, for robust accuracy, for pictures."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lipnext_scale.attack.attacker import Attacker, AttackSettings, Points, Targets
from lipnext_scale.certify import Certifier
from lipnext_scale.models import LipNeXt

INSIDE = 0.9999
GROWTH, FURTHEST_FACTOR, BISECTIONS = 1.25, 20.0, 4
SMALLEST_LOOK = 1 / 255
FRACTIONS = 32


def hunt(attacker: Attacker, targets: Targets, inside: float = INSIDE) -> list[Points]:
    """Attack each target at `inside` of its radius with everything; the violations that are found.

    Not clipped to [0, 1]: the certificate speaks of the whole ball. A radius of 0 is no claim, and
    there is nothing to attack.
    """
    targets, violations = targets.only(targets.radii > 0), []
    for method, restart in attacker.settings.attacks if len(targets) else []:
        points = attacker.attack(method, restart, targets, inside * targets.radii, clip=False)
        violations.append(points.only(points.violated))
    return violations


@dataclass(frozen=True)
class Robustness:
    """By ε and target [E, N]: no attack changed it; how many attacks were run on it."""

    robust: Tensor
    attacks: Tensor
    violations: list[Points]


def robust_at(attacker: Attacker, targets: Targets, epsilons: tuple[float, ...]) -> Robustness:
    """Which targets keep their label under every attack within ε, with pixels in [0, 1].

    targets: those that the model has right. One that broke at an ε is broken at every larger one,
    and one that is certified at ε is robust there: neither is attacked. (`hunt` attacks the latter
    all the same.)
    """
    shape = (len(epsilons), len(targets))
    robust = torch.ones(shape, dtype=torch.bool, device=attacker.device)
    attacks = torch.zeros(shape, dtype=torch.int64, device=attacker.device)
    whole = torch.ones(len(targets), dtype=torch.bool, device=attacker.device)
    violations = []
    for row in sorted(range(len(epsilons)), key=epsilons.__getitem__):
        open_question = targets.radii < epsilons[row]
        for method, restart in attacker.settings.attacks:
            (chosen,) = (whole & open_question).nonzero(as_tuple=True)
            if not len(chosen):
                break
            limits = torch.full_like(targets.radii[chosen], epsilons[row])
            points = attacker.attack(method, restart, targets.only(chosen), limits, clip=True)
            attacks[row, chosen] += 1
            whole[chosen[points.changed]] = False
            # A change so near is wrong whoever finds it.
            violations.append(points.only(points.violated))
        robust[row] = whole
    return Robustness(robust, attacks, violations)


@dataclass(frozen=True)
class AttackExample:
    """An image [C, H, W] and the nearest image found that has another label."""

    sample: int
    image: Tensor
    attacked: Tensor
    distance: float
    radius: float
    label_before: int
    label_after: int


def nearest_change(
    certifier: Certifier,
    image: Tensor,
    label: int,
    radius: float,
    sample: int = 0,
    settings: AttackSettings | None = None,
    search: LipNeXt | None = None,
) -> AttackExample | None:
    """The smallest perturbation found that changes an image's label; None if none was found.

    image: [C, H, W], uint8 or in [0, 1]; label, radius: as the certifier gives them. The attack's
    radius grows from the certified one until it succeeds, and is then bisected. search: what
    `search_copy` makes, to make it once for several images.
    """
    attacker = Attacker(certifier, settings or AttackSettings(("apgd",), restarts=1), search)
    target = attacker.targets(image[None], torch.tensor([sample]))
    assert target.labels.item() == label, "the certifier has another label for this image"
    limit = max(radius, SMALLEST_LOOK)
    # Beyond the diagonal of [0, 1] there is nothing new.
    last = min(limit * FURTHEST_FACTOR, math.sqrt(image.numel()))
    failed, found = radius, None
    while found is None and limit < last:
        limit *= GROWTH
        found = _nearest_within(attacker, target, limit)
        failed = limit if found is None else failed
    if found is None:
        return None
    for _ in range(BISECTIONS):
        failed = min(failed, found.distances.item())
        limit = (failed + found.distances.item()) / 2
        nearer = _nearest_within(attacker, target, limit)
        found, failed = (found, limit) if nearer is None else (nearer, failed)
    return _example(found, radius)


def _nearest_within(attacker: Attacker, target: Targets, limit: float) -> Points | None:
    """The nearest change on the way from the image to where an attack got; None if it got none."""
    limits = torch.full_like(target.radii, limit)
    for method, restart in attacker.settings.attacks:
        points = attacker.attack(method, restart, target, limits, clip=True)
        if not points.changed.item():
            continue
        fractions = torch.arange(1, FRACTIONS + 1, device=attacker.device) / FRACTIONS
        steps = fractions.to(target.images).view(-1, 1, 1, 1) * (points.attacked - target.images)
        repeated = target.only(torch.zeros(FRACTIONS, dtype=torch.int64, device=attacker.device))
        way = attacker.look(repeated, target.images + steps)
        # The end itself is changed, up to the rounding of another batch.
        changed = way.only(way.changed)
        return changed.only(torch.tensor([0])) if len(changed.labels) else points
    return None


def _example(found: Points, radius: float) -> AttackExample:
    return AttackExample(
        sample=int(found.targets.ids.item()),
        image=found.targets.images[0].cpu(),
        attacked=found.attacked[0].cpu(),
        distance=found.distances.item(),
        radius=radius,
        label_before=int(found.targets.labels.item()),
        label_after=int(found.labels.item()),
    )
