"""RandAugment: every operation does what its definition says, every choice comes from the bits."""

from collections import Counter

import cv2
import numpy as np
import pytest
from shard_making import noise

from lipnext_scale.data.augment import OPERATIONS, apply, choose_operations

every_operation = pytest.mark.parametrize("operation", OPERATIONS)
IMAGE = noise(40, 50, 3, seed=1)


def at_nearest(image: np.ndarray, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """The pixels of the image at these places, black outside."""
    height, width, _ = image.shape
    x, y = np.floor(x).astype(int), np.floor(y).astype(int)
    inside = (0 <= x) & (x < width) & (0 <= y) & (y < height)
    return np.where(inside[..., None], image[y.clip(0, height - 1), x.clip(0, width - 1)], 0)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("magnitude", [3, 9, 29])
def test_moves(magnitude, sign):
    """Each output pixel is the nearest input pixel, black outside. A rare one lies on an edge."""
    y, x = np.mgrid[:40, :50] + 0.5
    slope, angle = 0.01 * magnitude * sign, np.radians(magnitude * sign)
    right, down = (sign * int(magnitude * 5 / 331 * side) for side in (50, 40))
    cos, sin = np.cos(angle), np.sin(angle)
    sources = {
        "ShearX": (x + slope * y, y),
        "ShearY": (x, y + slope * x),
        "TranslateX": (x - right, y),
        "TranslateY": (x, y - down),
        "Rotate": (25 + cos * (x - 25) - sin * (y - 20), 20 + sin * (x - 25) + cos * (y - 20)),
    }
    for operation, source in sources.items():
        found = apply(operation, IMAGE, magnitude, sign)
        assert (found != at_nearest(IMAGE, *source)).mean() < 0.002, operation


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("magnitude", [0, 9, 30])
def test_blends(magnitude, sign):
    """dull + factor · (image - dull), to within a level."""
    grey = cv2.cvtColor(IMAGE, cv2.COLOR_RGB2GRAY)
    kernel = np.array([[1, 1, 1], [1, 5, 1], [1, 1, 1]]) / 13
    smooth = IMAGE.astype(float)
    smooth[1:-1, 1:-1] = cv2.filter2D(IMAGE.astype(float), -1, kernel)[1:-1, 1:-1]
    dull = {
        "Brightness": 0.0,
        "Color": grey[:, :, None].astype(float),
        "Contrast": grey.mean(),
        "Sharpness": smooth,
    }
    for operation, start in dull.items():
        expected = (start + (1 + sign * 0.03 * magnitude) * (IMAGE - start)).clip(0, 255)
        difference = apply(operation, IMAGE, magnitude, sign) - expected
        assert -2.5 < difference.min() and difference.max() < 2.5, operation


def test_new_values_for_old():
    """Posterize keeps the high bits, Solarize turns over what is bright."""
    for magnitude, bits in ((0, 8), (9, 7), (15, 6), (23, 5), (30, 4)):
        expected = IMAGE // 2 ** (8 - bits) * 2 ** (8 - bits)
        assert np.array_equal(apply("Posterize", IMAGE, magnitude), expected)
        expected = np.where(IMAGE < 255 - 8.5 * magnitude, IMAGE, 255 - IMAGE)
        assert np.array_equal(apply("Solarize", IMAGE, magnitude), expected)


@pytest.mark.parametrize("low, high", [(0, 255), (7, 200), (100, 190), (60, 61), (9, 9)])
def test_contrast_is_stretched_and_histograms_made_even(low, high):
    """In every channel: from black to white, and each value about as often as the others."""
    image = np.random.default_rng(0).triangular(low, low, high + 1e-6, (60, 60, 3)).astype(np.uint8)
    stretched = apply("AutoContrast", image, 9).reshape(-1, 3)
    if high > low + 1:
        assert (stretched.min(0) == 0).all() and (stretched.max(0) >= 254).all()
        even = np.sort(apply("Equalize", image, 9).reshape(-1, 3), axis=0) / 255
        assert abs(even - np.linspace(0, 1, 3600)[:, None]).max() < 0.05
    if high == low:
        assert np.array_equal(stretched, image.reshape(-1, 3))
        assert np.array_equal(apply("Equalize", image, 9), image)


@every_operation
@pytest.mark.parametrize("shape", [(33, 21, 1), (33, 21, 3), (1, 1, 3), (2, 5, 1)])
def test_the_result_is_a_new_array_of_the_same_kind(operation, shape):
    """The same each time; the input, which may be a view, is neither changed nor shared."""
    stored = noise(*shape, seed=2)
    image = stored[:, ::-1]
    stored.flags.writeable = False
    result = apply(operation, image, 9)
    assert result.dtype == np.uint8 and result.shape == image.shape and result.flags.writeable
    assert not np.shares_memory(result, stored)
    assert np.array_equal(apply(operation, image.copy(), 9), result)


def test_choices_are_uniform():
    """Operations and signs of a first and a second: all 28² pairs, each with its share."""
    names = list(OPERATIONS)
    assert list(choose_operations(0, 3)) == [(names[0], -1)] * 3
    assert list(choose_operations(2**64 - 1, 3)) == [(names[-1], 1)] * 3
    assert list(choose_operations(10**19, 3))[:2] == list(choose_operations(10**19, 2))
    count, cells = 40_000, 28**2
    bits = np.random.default_rng(0).integers(0, 2**64, count, dtype=np.uint64)
    pairs = Counter(tuple(choose_operations(one, 2)) for one in bits.tolist())
    assert len(pairs) == cells
    expected = count / cells
    chi_squared = sum((observed - expected) ** 2 / expected for observed in pairs.values())
    assert chi_squared < cells - 1 + 4 * (2 * cells) ** 0.5  # four standard deviations
