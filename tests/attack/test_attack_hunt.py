"""The hunt finds wrong certificates and only those; robust accuracy; nearest changes."""

import pytest
import torch
from tight_models import bring_close, broken_model, tight_model
from torch import Tensor

from lipnext_scale.attacks import (
    Attacker,
    AttackSettings,
    Points,
    Targets,
    hunt,
    nearest_change,
    robust_at,
)
from lipnext_scale.certification import Certifier
from lipnext_scale.models import LipNeXt, LipNeXtConfig

QUICK = AttackSettings(restarts=1, steps=10)


def images_of(count: int, side: int = 4, channels: int = 1, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(count, channels, side, side, generator=generator).double()


def prepared(
    model: LipNeXt, images: Tensor, lipschitz: float | None = None
) -> tuple[Attacker, Targets]:
    attacker = Attacker(Certifier(model, lipschitz=lipschitz), QUICK)
    return attacker, attacker.targets(images, torch.arange(len(images)))


def count(violations: list[Points]) -> int:
    return sum(len(points.labels) for points in violations)


@pytest.mark.parametrize("in_a_corner", [False, True])
@pytest.mark.parametrize("seed", [0, 1])
def test_a_model_that_breaks_its_certificate_is_caught(seed: int, in_a_corner: bool) -> None:
    """One singular value of 1.05 and K taken as 1. With K computed, 1.05, the radii hold.

    In a corner of [0, 1] as well, where the change lies outside the box.
    """
    images = images_of(8).round() if in_a_corner else images_of(8)
    model = broken_model(images[0], seed)
    attacker, targets = prepared(model, images, lipschitz=1.0)
    violations = [points for points in hunt(attacker, targets) if len(points.labels)]
    assert any(0 in points.targets.ids for points in violations)
    for points in violations:
        originals = images[points.targets.ids]
        labels, radii = Certifier(model, lipschitz=1.0)(originals)
        assert (model(points.attacked).argmax(1) != labels).all()
        assert ((points.attacked - originals).flatten(1).norm(dim=1) <= radii).all()
    attacker, targets = prepared(model, images)
    assert attacker.certifier.lipschitz_bound == pytest.approx(1.05, abs=1e-6)
    assert count(hunt(attacker, targets)) == 0


def test_a_large_model_is_attacked_in_parts() -> None:
    """Three images at a time get what all get together, up to the rounding of float32."""
    model = LipNeXt(LipNeXtConfig(3, 16, 8, 2, 1, 4), seed=2).double()
    attacker, targets = prepared(model, images_of(10, 8))
    together = attacker.attack("apgd", 1, targets, 2 * targets.radii, clip=True)
    attacker.batch = 3
    parts = attacker.targets(targets.images, targets.ids)
    torch.testing.assert_close(parts.radii, targets.radii, rtol=1e-9, atol=0)
    points = attacker.attack("apgd", 1, parts, 2 * targets.radii, clip=True)
    torch.testing.assert_close(points.attacked, together.attacked, rtol=0, atol=1e-3)
    assert torch.equal(points.labels, together.labels)


def test_a_point_outside_the_radius_or_without_a_claim_is_no_violation() -> None:
    """Only another label, at a distance of at most the radius, and not of a radius of 0."""
    images, zeros = torch.zeros(4, 1, 1, 1), torch.zeros(4, dtype=torch.int64)
    radii = torch.tensor([1.0, 1.0, 0.0, 1.0]).double()
    labels = torch.tensor([1, 1, 1, 0])
    distances = torch.tensor([0.999, 1.0, 0.0, 0.5]).double()
    points = Points(Targets(images, zeros, radii, torch.arange(4)), images, labels, distances)
    assert points.changed.tolist() == [True, True, True, False]
    assert points.violated.tolist() == [True, False, False, False]


def test_a_label_that_nothing_can_change() -> None:
    """Equal rows, unequal biases: the largest radius there is, and searches have an end."""
    model = LipNeXt(LipNeXtConfig(1, 8, 4, 2, 1, 2), seed=0).double()
    with torch.no_grad():
        model.head.weight[1] = model.head.weight[0]
        model.head.bias[0] = 1.0
    attacker, targets = prepared(model, images_of(3))
    assert (targets.radii > 100).all() and count(hunt(attacker, targets)) == 0
    assert nearest_change(attacker, targets.only(torch.tensor([0]))) is None
    assert robust_at(attacker, targets, targets.labels == targets.labels, (0.1, 1e300))[0].all()


def test_robust_accuracy_lies_between_certified_and_clean() -> None:
    """Broken stays broken at larger ε, certified is robust without an attack, the rest is tried."""
    model = LipNeXt(LipNeXtConfig(3, 16, 8, 2, 1, 4), seed=2).double()
    attacker, targets = prepared(model, images_of(40, 8))
    middle = targets.radii.median().item()
    epsilons = (8 * middle, 0.0, middle, 2 * middle)
    correct = torch.arange(40) > 0
    rows, attacks, violations = robust_at(attacker, targets, correct, epsilons)
    assert not rows[:, 0].any() and not attacks[:, 0].any()
    rows, attacks, targets = rows[:, correct], attacks[:, correct], targets.only(correct)
    robust = dict(zip(epsilons, rows, strict=True))
    assert robust[0.0].all() and not attacks[1].any()
    assert not (robust[2 * middle] & ~robust[middle]).any()
    assert not (robust[8 * middle] & ~robust[2 * middle]).any()
    certified = targets.radii >= middle
    assert robust[middle][certified].all() and not attacks[2][certified].any()
    assert (attacks[2][~certified] >= 1).all()
    assert robust[8 * middle].double().mean() < 0.3
    # Attacked to the end if robust, and not any more once broken.
    tried = len(QUICK.attacks)
    assert (attacks[3][robust[2 * middle] & (targets.radii < 2 * middle)] == tried).all()
    assert not attacks[0][~robust[2 * middle]].any()
    assert count(violations) == 0


def test_robust_accuracy_notices_a_violation_too() -> None:
    """A change nearer than a radius counts, though the search went far beyond the radius."""
    model = LipNeXt(LipNeXtConfig(3, 16, 8, 2, 1, 4), seed=2).double()
    attacker, targets = prepared(model, images_of(5, 8))
    lies = Targets(targets.images, targets.labels, torch.full_like(targets.radii, 99), targets.ids)
    robust, _, violations = robust_at(attacker, lies, torch.ones(5, dtype=torch.bool), (100.0,))
    assert count(violations) == (~robust).sum() > 0


def test_the_nearest_change_is_near_where_the_certificate_is_tight() -> None:
    """Within 2 % of the radius, of another label as the certifier sees it, and inside [0, 1]."""
    image, model = images_of(1), tight_model(0)
    bring_close(model, image[0])
    attacker, target = prepared(model, image)
    found = nearest_change(attacker, target)
    assert found is not None and found.changed.all()
    assert torch.equal(attacker.certifier(found.attacked)[0], found.labels)
    assert found.distances.item() == (found.attacked - image).norm().item()
    assert target.radii < found.distances < 1.02 * target.radii
    assert found.attacked.min() >= 0 and found.attacked.max() <= 1
