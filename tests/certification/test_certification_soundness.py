"""The certificate of a trained model is true: attacks inside it fail, and pairs obey K."""

from pathlib import Path

import pytest
import torch

from lipnext_scale.attacks import pgd, random_starts, smallest_margins
from lipnext_scale.certification import certified_radii, lipschitz_bound, load_model
from lipnext_scale.data import Samples, read_samples
from lipnext_scale.models import LipNeXt

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model(demo_run: Path) -> LipNeXt:
    return load_model(demo_run).double()


@pytest.fixture(scope="module")
def digits() -> Samples:
    return read_samples("builtin:digits/test-*.tar.gz", "data.test")


def starts(images: torch.Tensor, restart: int = 0) -> torch.Tensor:
    ids = torch.arange(len(images))
    return random_starts(images[0].shape, 0, ids, restart, stream=0).to(images)


def test_no_attack_inside_the_radius_changes_a_prediction(model: LipNeXt, digits: Samples) -> None:
    """PGD with restarts at 0.999 of every radius; at four times the radius it changes most."""
    images = digits.images.double() / 255
    labels, radii = certified_radii(model, images)
    for restart in range(3):
        delta = pgd(model, images, labels, 0.999 * radii, starts(images, restart), steps=25)
        assert (delta.flatten(1).norm(dim=1) <= 0.999 * radii * (1 + 1e-9) + 1e-12).all()
        assert (smallest_margins(model(images + delta), labels) > 0).all()
    delta = pgd(model, images, labels, 4 * radii, starts(images), steps=25)
    assert (smallest_margins(model(images + delta), labels) < 0).double().mean() > 0.8


def test_trained_features_obey_the_bound_on_thousands_of_pairs(
    model: LipNeXt, digits: Samples
) -> None:
    """‖f(x) - f(y)‖ ≤ K·‖x - y‖ for real pairs, random pairs and close pairs."""
    bound = lipschitz_bound(model)
    generator = torch.Generator().manual_seed(0)
    real = digits.images.double() / 255
    noise = torch.rand(real.shape, generator=generator, dtype=torch.float64)
    others = [real + step * (noise - 0.5) for step in (1e-6, 1e-3, 0.1)]
    others += [images.roll(shift, 0) for images in (real, noise) for shift in range(1, 8)]
    with torch.no_grad():
        for other in others:
            change = (model.features(real) - model.features(other)).norm(dim=1)
            # 1e-12: the rounding of the two float64 forward passes.
            assert (change <= bound * (real - other).flatten(1).norm(dim=1) + 1e-12).all()


def test_gradient_ascent_on_the_ratio_stays_below_the_bound(
    model: LipNeXt, digits: Samples
) -> None:
    """Maximising ‖f(x) - f(y)‖/‖x - y‖ over pairs comes close to K and not above it."""
    bound = lipschitz_bound(model)
    start = digits.images[:40].double() / 255
    generator = torch.Generator().manual_seed(1)
    x = start.clone().requires_grad_(True)
    y = (start + 0.05 * torch.randn(start.shape, generator=generator)).double().requires_grad_(True)
    optimizer = torch.optim.Adam([x, y], lr=0.02)
    highest = 0.0
    for _ in range(60):
        ratio = (model.features(x) - model.features(y)).norm(dim=1)
        ratio = ratio / (x - y).flatten(1).norm(dim=1)
        highest = max(highest, ratio.max().item())
        optimizer.zero_grad()
        (-ratio.sum()).backward()
        optimizer.step()
    assert 0.8 < highest <= bound + 1e-9
