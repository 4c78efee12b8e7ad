"""Augmentation: what it can give, from what it is drawn, and how evenly."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from shard_making import noise

from lipnext_scale.data import AugmentConfig, to_unit_range
from lipnext_scale.data.augment import augment, draw_params, resize_short_side
from lipnext_scale.data.decode import BadSample
from lipnext_scale.data.order import below, number_below, sample_bits, uniform
from lipnext_scale.utils.config import ConfigError

seeds = st.integers(0, 2**70)
epochs = st.integers(0, 2**40)
id_lists = st.lists(st.integers(0, 2**40), min_size=1, max_size=8)
CROP = AugmentConfig(crop_padding=2)
FLIP = AugmentConfig(flip=True)
RESIZE = AugmentConfig(resize=(6, 9))
ALL = [
    CROP,
    FLIP,
    RESIZE,
    AugmentConfig(resize=(6, 9), flip=True, rand_augment=1.0),
    AugmentConfig(crop_padding=1, flip=True, rand_augment=0.5),
]


def image_of(sample: int, *shape: int) -> np.ndarray:
    """An image of non-zero pixels, the same for the same sample."""
    return noise(*shape, seed=sample % 2**32) | np.uint8(1)


def apply(config: AugmentConfig, images: list, ids, seed=0, epoch=0, size: int = 6) -> np.ndarray:
    drawn = draw_params(config, seed, epoch, np.asarray(ids))
    out = np.empty((len(drawn), size, size, images[0].shape[2]), dtype=np.uint8)
    for image, params, place in zip(images, drawn, out, strict=True):
        augment(image, config, params, place)
    return out


def all_crops(image: np.ndarray, padding: int) -> list[np.ndarray]:
    size = image.shape[0]
    padded = np.pad(image, ((padding, padding), (padding, padding), (0, 0)))
    places = range(2 * padding + 1)
    return [padded[top : top + size, left : left + size] for top in places for left in places]


# --- what comes out ---------------------------------------------------------------------------


@settings(deadline=None, max_examples=60)
@given(id_lists, st.integers(1, 5), st.sampled_from([1, 3]), seeds, epochs)
def test_crops_and_flips_are_among_the_possible_ones(ids, padding, channels, seed, epoch):
    """One of the (2p+1)² windows of the zero-padded image; the image or its mirror."""
    images = [image_of(i, 6, 6, channels) for i in ids]
    cropped = apply(AugmentConfig(crop_padding=padding), images, ids, seed, epoch)
    flipped = apply(FLIP, images, ids, seed, epoch)
    for image, crop, flip in zip(images, cropped, flipped, strict=True):
        assert any(np.array_equal(crop, window) for window in all_crops(image, padding))
        assert np.array_equal(flip, image) or np.array_equal(flip, image[:, ::-1])


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 40), st.integers(1, 40), st.sampled_from([1, 3]), st.integers(6, 30))
def test_resizing_keeps_the_shape_of_the_picture(height, width, channels, side):
    """The short side is the one asked for, the long one keeps the proportion."""
    resized = resize_short_side(image_of(0, height, width, channels), side)
    assert min(resized.shape[:2]) == side and resized.shape[2] == channels
    expected = max(side, round(max(height, width) * side / min(height, width)))
    assert max(resized.shape[:2]) == expected and (width > height) <= (
        resized.shape[1] >= resized.shape[0]
    )


@settings(deadline=None, max_examples=60)
@given(id_lists, st.integers(50, 90), st.integers(50, 90), seeds)
def test_resize_and_crop_is_a_window_of_a_resized_image(ids, height, width, seed):
    """Of one of the sizes between the two, cut out at one of the places, to within a pixel.

    In an image whose colours grow with the place, a colour shows the place that it comes from.
    """
    rows, columns = np.mgrid[:height, :width] * 2
    image = np.stack([rows, columns, np.full_like(rows, 9)], axis=2).astype(np.uint8)
    config = AugmentConfig(resize=(40, 60))
    drawn = draw_params(config, seed, 0, np.array(ids))
    results = apply(config, [image] * len(ids), ids, seed, size=40)
    for result, params in zip(results, drawn, strict=True):
        scale = min(height, width) / params.short_side
        down, right = (np.diff(result[:, :, c].astype(float), axis=c) for c in (0, 1))
        assert abs(down.mean() - 2 * scale) < 0.06 and abs(right.mean() - 2 * scale) < 0.06
        assert (result[:, :, 2] == 9).all()
        inside = 2 * (np.array([height, width]) - 1)
        assert (result[-1, -1, :2] <= inside + 1).all()


def test_shrinking_takes_means_and_does_not_alias():
    """A fine chessboard becomes grey, as it would not by picking pixels."""
    board = np.indices((64, 64)).sum(0) % 2 * np.uint8(255)
    shrunk = resize_short_side(np.repeat(board[:, :, None].astype(np.uint8), 3, 2), 16)
    assert abs(shrunk.astype(int) - 127).max() <= 1


def test_images_that_cannot_be_augmented_are_bad_samples():
    """Too long for RandAugment's coordinates, whatever the random numbers; of another size."""
    config = AugmentConfig(resize=(224, 288), flip=True, rand_augment=0.5)
    out = np.empty((224, 224, 3), dtype=np.uint8)
    for params in draw_params(config, 0, 0, np.arange(10)):
        with pytest.raises(BadSample, match="is 100×5700: more than 56 times as long"):
            augment(np.zeros((100, 5700, 3), np.uint8), config, params, out)
        augment(np.zeros((100, 5600, 3), np.uint8), config, params, out)
    with pytest.raises(BadSample, match="is 3×6×7, and the model takes 6×6"):
        apply(FLIP, [image_of(0, 6, 7, 3)], [0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_pixels_in_the_unit_range(dtype):
    """p / 255, correctly rounded; images in [0, 1] already only change their type."""
    pixels = torch.arange(256, dtype=torch.uint8)
    unit = to_unit_range(pixels, "cpu", dtype)
    expected = np.arange(256, dtype=np.longdouble) / 255
    assert unit.dtype == dtype and np.array_equal(unit.numpy(), expected.astype(unit.numpy().dtype))
    assert torch.equal(to_unit_range(unit, dtype=torch.float64), unit.double())
    assert to_unit_range(pixels).dtype == torch.get_default_dtype()


# --- from what it is drawn --------------------------------------------------------------------


@pytest.mark.parametrize("config", ALL, ids=range(len(ALL)))
@settings(deadline=None, max_examples=20)
@given(ids=id_lists, seed=seeds, epoch=epochs, data=st.data())
def test_a_sample_does_not_see_its_batch(config, ids, seed, epoch, data):
    """From (seed, epoch, id) alone: in any order, and alone, a sample comes out the same."""
    images = [image_of(i, 6, 6, 3) for i in ids]
    for image in images:
        image.flags.writeable = False  # raw pixels may be mapped from a file
    together = apply(config, images, ids, seed, epoch)
    np.random.rand(5)
    order = data.draw(st.permutations(range(len(ids))))
    shuffled = apply(config, [images[i] for i in order], [ids[i] for i in order], seed, epoch)
    assert np.array_equal(shuffled, together[list(order)])


@pytest.mark.parametrize("config", [CROP, FLIP, RESIZE, AugmentConfig(rand_augment=0.9)])
def test_seed_epoch_and_sample_all_matter(config):
    """One image, 128 times: other seeds, epochs or ids give others, also with two exchanged."""
    images, ids = [image_of(0, 6, 6, 3)] * 128, np.arange(128)
    draws = [(ids, 1, 2), (ids, 2, 2), (ids, 1, 3), (ids, 2, 1), (ids + 128, 1, 2)]
    results = [apply(config, images, *drawn) for drawn in draws]
    for i, one in enumerate(results):
        for other in results[:i]:
            assert (one == other).all(axis=(1, 2, 3)).mean() < 0.7


def test_streams_are_independent():
    """Whether an image is mirrored says nothing of where it is cut."""
    ids = np.arange(20_000)
    bits = [sample_bits(3, 5, ids, stream) >> np.uint64(63) for stream in range(1, 7)]
    for i, one in enumerate(bits):
        for other in bits[:i]:
            assert abs((one == other).mean() - 0.5) < 0.02


# --- how evenly -------------------------------------------------------------------------------


@pytest.mark.parametrize("by", ["sample", "epoch"])
def test_offsets_are_uniform(by):
    """Over samples of an epoch, or epochs of a sample, each of the 25 places has its share."""
    image, count = image_of(0, 6, 6, 1), 2500
    if by == "sample":
        cropped = apply(CROP, [image] * count, np.arange(count), seed=3, epoch=7)
    else:
        cropped = np.concatenate([apply(CROP, [image], [9], 3, epoch) for epoch in range(count)])
    windows = all_crops(image, 2)
    counts = [int((cropped == window).all(axis=(1, 2, 3)).sum()) for window in windows]
    assert sum(counts) == count  # the windows are all different
    chi_squared = sum((observed - count / 25) ** 2 / (count / 25) for observed in counts)
    assert chi_squared < 60  # 24 degrees of freedom: above 60 once in 10,000 draws


@pytest.mark.parametrize("share", [0.0, 0.25, 1.0])
def test_shares_and_sizes_are_what_was_asked_for(share):
    """A half is mirrored, `rand_augment` of them are augmented, all sizes come equally often."""
    config = AugmentConfig(resize=(224, 288), flip=True, rand_augment=share)
    drawn = draw_params(config, 1, 2, np.arange(65_000))
    assert abs(np.mean([params.flip for params in drawn]) - 0.5) < 0.01
    assert abs(np.mean([params.rand_augment for params in drawn]) - share) < 0.01
    counts = np.bincount([params.short_side for params in drawn])[224:]
    assert len(counts) == 65 and abs(counts - 1000).max() < 150


@given(st.integers(0, 2**64 - 1), st.integers(1, 2**32 - 1))
def test_numbers_below_a_limit(bits, limit):
    """One sample's number is that of the vectorised form, and below its limit."""
    number = number_below(bits, limit)
    assert 0 <= number < limit
    assert number == int(below(np.array([bits], dtype=np.uint64), limit)[0])
    assert 0 <= float(uniform(np.array([bits], dtype=np.uint64))[0]) < 1


@pytest.mark.parametrize("config", [AugmentConfig(crop_padding=8), AugmentConfig(resize=(7, 9))])
def test_settings_that_do_not_fit_the_model(config):
    with pytest.raises(ConfigError, match="model.image_size = 8"):
        config.require_size(8)
