"""The hunt finds certificates that are wrong and none that are right; robust accuracy; examples."""

import pytest
import torch
from tight_models import bring_close, broken_model, tight_model
from torch import Tensor

from lipnext_scale.attack import (
    Attacker,
    AttackSettings,
    Points,
    Targets,
    hunt,
    nearest_change,
    robust_at,
)
from lipnext_scale.attack.hunt import images_at_once
from lipnext_scale.certify import Certifier
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
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_model_that_breaks_its_certificate_is_caught(seed: int, in_a_corner: bool) -> None:
    """One singular value of 1.05 and K taken as 1: the sample it was made for, verified here.

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


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_same_model_with_its_own_bound_is_not(seed: int) -> None:
    """K is 1.05 then, and the radii hold."""
    images = images_of(8)
    attacker, targets = prepared(broken_model(images[0], seed), images)
    assert attacker.certifier.lipschitz_bound == pytest.approx(1.05, abs=1e-6)
    assert count(hunt(attacker, targets)) == 0


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"activation": "minmax"},
        {"padding": "zero", "positional_embedding": False},
        {"parametrisation": "merged", "blocks_per_bank": 1},
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sound_models_are_not_violated(options: dict[str, object], dtype: torch.dtype) -> None:
    """Random networks of every kind, in both arithmetics that can be certified."""
    model = LipNeXt(LipNeXtConfig(3, 16, 8, 2, 3, 4, **options), seed=3).to(dtype)
    attacker, targets = prepared(model, images_of(20, 8, 3))
    assert (targets.radii > 0).sum() >= 18
    assert count(hunt(attacker, targets)) == 0


def test_tight_certificates_break_just_outside_and_not_inside() -> None:
    """Near a boundary the radius of such a model is the distance: 1 % further the label changes."""
    images = images_of(3)
    model = tight_model(0)
    bring_close(model, images[0])
    attacker, targets = prepared(model, images[:1])
    for method in ("pgd", "apgd"):
        for factor, changes in ((0.9999, False), (1.01, True)):
            points = attacker.attack(method, 0, targets, factor * targets.radii, clip=False)
            assert points.changed.item() == changes
            assert points.distances <= factor * targets.radii


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
    config = LipNeXtConfig()
    assert images_at_once(config, 2**40) == 256 and images_at_once(config, 1) == 1


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
    image, radius = images_of(1)[0], targets.radii[0].item()
    assert nearest_change(attacker.certifier, image, 0, radius, settings=QUICK) is None
    assert robust_at(attacker, targets, (0.1, 1e300)).robust.all()


def test_robust_accuracy_lies_between_certified_and_clean() -> None:
    """Broken stays broken at larger ε, certified is robust without an attack, the rest is tried."""
    model = LipNeXt(LipNeXtConfig(3, 16, 8, 2, 1, 4), seed=2).double()
    attacker, targets = prepared(model, images_of(40, 8))
    middle = targets.radii.median().item()
    epsilons = (8 * middle, 0.0, middle, 2 * middle)
    outcome = robust_at(attacker, targets, epsilons)
    robust, attacks = dict(zip(epsilons, outcome.robust, strict=True)), outcome.attacks
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
    assert count(outcome.violations) == 0


def test_robust_accuracy_notices_a_violation_too() -> None:
    """A change nearer than a radius is told, though it was looked for far beyond the radius."""
    model = LipNeXt(LipNeXtConfig(3, 16, 8, 2, 1, 4), seed=2).double()
    attacker, targets = prepared(model, images_of(5, 8))
    lies = Targets(targets.images, targets.labels, torch.full_like(targets.radii, 99), targets.ids)
    outcome = robust_at(attacker, lies, (100.0,))
    assert count(outcome.violations) == (~outcome.robust).sum() > 0


def test_the_nearest_change_is_near_where_the_certificate_is_tight() -> None:
    """Within 2 % of the radius, of another label as the certifier sees it, and inside [0, 1]."""
    image = images_of(1)[0]
    model = tight_model(0)
    bring_close(model, image)
    certifier = Certifier(model)
    labels, radii = certifier(image[None])
    label, radius = int(labels), radii.item()
    example = nearest_change(certifier, image, label, radius, sample=17)
    assert example is not None and example.sample == 17 and example.radius == radius
    assert example.label_before == label
    assert int(certifier(example.attacked[None])[0]) == example.label_after != label
    assert example.distance == (example.attacked - example.image).norm().item()
    assert radius < example.distance < 1.02 * radius
    assert example.attacked.min() >= 0 and example.attacked.max() <= 1
