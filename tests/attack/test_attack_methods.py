"""PGD and Auto-PGD: inside ball and box, near the optimum, and the same in every batch."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lipnext_scale.attacks import METHODS, random_starts, smallest_margins
from lipnext_scale.models import LipNeXt, LipNeXtConfig

each_method = pytest.mark.parametrize("method", METHODS.values(), ids=list(METHODS))
Method = Callable[..., Tensor]


def images_of(count: int, side: int = 4, seed: int = 0) -> Tensor:
    return torch.rand(count, 1, side, side, generator=torch.Generator().manual_seed(seed))


def starts_of(images: Tensor, restart: int = 0) -> Tensor:
    return random_starts(images[0].shape, 0, torch.arange(len(images)), restart, 0).to(images)


@each_method
@pytest.mark.parametrize("classes", [2, 5])
def test_comes_close_to_the_optimum_where_that_is_known(method: Method, classes: int) -> None:
    """A linear model: with 3 % more than the distance to the boundary all change, with less none.

    With five classes the smallest margin may be that of another boundary: some may be missed.
    """
    images = images_of(40).double()
    rows = torch.randn(classes, 16, generator=torch.Generator().manual_seed(0)).double()

    def model(attacked: Tensor) -> Tensor:
        return F.linear(attacked.flatten(1), rows)

    logits, labels = model(images), model(images).argmax(1)
    # min_j margin_j/‖gradient of margin_j‖
    ratios = (logits.gather(1, labels[:, None]) - logits) / torch.cdist(rows[labels], rows)
    distances = ratios.scatter(1, labels[:, None], float("inf")).min(1).values
    for factor, share in ((0.999, 0.0), (1.03, 1.0 if classes == 2 else 0.85)):
        delta = method(model, images, labels, factor * distances, starts_of(images), steps=20)
        changed = (smallest_margins(model(images + delta), labels) < 0).double().mean()
        assert changed == 0 if share == 0 else changed >= share


@each_method
def test_finds_a_valley_inside_the_ball(method: Method) -> None:
    """A margin of |y - c|² with c within the ball: steps get short, and end near c."""
    images, radius = images_of(20).double(), 2.0
    valley = images + 0.3 * starts_of(images, restart=5) * radius
    labels, limits = torch.zeros(20, dtype=torch.int64), torch.full((20,), radius)

    def model(attacked: Tensor) -> Tensor:
        squares = (attacked - valley).flatten(1).square().sum(1)
        return torch.stack([squares, torch.zeros_like(squares)], 1)

    delta = method(model, images, labels, limits, starts_of(images), steps=40)
    assert ((images + delta - valley).flatten(1).norm(dim=1) < 0.03 * radius).all()


@settings(deadline=None, max_examples=40)
@given(
    name=st.sampled_from(list(METHODS)),
    seed=st.integers(0, 2**32),
    steps=st.integers(1, 6),
    clip=st.booleans(),
    extreme=st.booleans(),
    radii=st.lists(st.floats(0, 30), min_size=1, max_size=4),
)
def test_stays_inside_the_ball_and_the_box(
    name: str, seed: int, steps: int, clip: bool, extreme: bool, radii: list[float]
) -> None:
    """For every radius, 0 too; images in the corners of the box too."""
    images = images_of(len(radii), seed=seed)
    images = images.round() if extreme else images
    limits = torch.tensor(radii)
    model = LipNeXt(LipNeXtConfig(2, 8, 4, 2, 1, 3), seed=0)
    labels = model(images).argmax(1)
    delta = METHODS[name](model, images, labels, limits, starts_of(images), steps, clip)
    assert delta.isfinite().all()
    assert (delta.flatten(1).norm(dim=1) <= limits * (1 + 1e-5)).all()
    if clip:
        attacked = images + delta
        assert attacked.min() >= -1e-6 and attacked.max() <= 1 + 1e-6


@each_method
def test_the_best_point_on_the_way_is_kept(method: Method) -> None:
    """No returned margin is above that of the start, nor that of a search with fewer steps."""
    model = LipNeXt(LipNeXtConfig(3, 16, 8, 2, 1, 5), seed=1).double()
    images = images_of(30, side=8).double()
    labels, limits = model(images).argmax(1), torch.full((30,), 0.5)
    seen: list[Tensor] = []

    def watched(attacked: Tensor) -> Tensor:
        logits = model(attacked)
        seen.append(smallest_margins(logits.detach(), labels))
        return logits

    delta = method(watched, images, labels, limits, starts_of(images), steps=7)
    final = smallest_margins(model(images + delta), labels)
    assert len(seen) == 8  # the start and each of the seven moves
    torch.testing.assert_close(final, torch.stack(seen).min(0).values, rtol=0, atol=1e-12)


def test_a_start_depends_on_the_sample_alone_and_not_on_its_batch() -> None:
    """Sample 7 begins at the same place with others and alone; restarts, seeds, methods differ."""
    together = random_starts((1, 4, 4), 0, torch.tensor([3, 7, 9]), 1, 0)
    alone = random_starts((1, 4, 4), 0, torch.tensor([7]), 1, 0)
    assert torch.equal(together[1], alone[0])
    assert (together.flatten(1).norm(dim=1) <= 1).all()
    for seed, restart, stream in ((1, 1, 0), (0, 0, 0), (0, 1, 1)):
        other = random_starts((1, 4, 4), seed, torch.tensor([7]), restart, stream)
        assert not torch.equal(alone, other)
