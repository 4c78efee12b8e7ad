"""RandAugment: every pixel is Pillow's, every choice comes from the bits."""

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from shard_making import noise

from lipnext_scale.data.rand_augment import (
    BINS,
    OPERATIONS,
    apply,
    choices,
    magnitude_of,
    rand_augment,
)
from lipnext_scale.data.rand_augment_reference import apply_reference

bit_strings = st.integers(0, 2**64 - 1)
every_operation = pytest.mark.parametrize("operation", OPERATIONS)


@st.composite
def images(draw, max_side: int = 40) -> np.ndarray:
    """Grey or colour, of any size from 1 x 1; noise, or contents that are hard on tables."""
    height, width = draw(st.integers(1, max_side)), draw(st.integers(1, max_side))
    shape = (height, width, draw(st.sampled_from([1, 3])))
    kind = draw(st.sampled_from(["noise", "few values", "one value", "ramp", "mostly one"]))
    low, high = sorted([draw(st.integers(0, 255)), draw(st.integers(0, 255))])
    if kind == "one value":
        return np.full(shape, low, np.uint8)
    if kind == "ramp":
        return np.linspace(low, high, np.prod(shape)).astype(np.uint8).reshape(shape)
    pixels = noise(*shape, seed=draw(st.integers(0, 2**32)))
    if kind == "few values":
        return (low + pixels.astype(int) * (high - low) // 255).astype(np.uint8)
    if kind == "mostly one":
        return np.where(pixels < 250, np.uint8(high), pixels)
    return pixels


def reference(image: np.ndarray, operation: str, magnitude_bin: int, positive: bool) -> np.ndarray:
    magnitude = magnitude_of(operation, magnitude_bin, *image.shape[:2])
    return apply_reference(image, operation, magnitude, 1 if positive else -1)


# --- the pixels are Pillow's ------------------------------------------------------------------


@every_operation
@settings(deadline=None, max_examples=60)
@given(image=images(), magnitude_bin=st.integers(0, BINS - 1), positive=st.booleans())
def test_an_operation_is_pillows_to_the_pixel(operation, image, magnitude_bin, positive):
    """Any size, any content, any magnitude, both directions: not one pixel differs."""
    expected = reference(image, operation, magnitude_bin, positive)
    np.testing.assert_array_equal(apply(image, operation, magnitude_bin, positive), expected)


@every_operation
@pytest.mark.parametrize("positive", [True, False])
@pytest.mark.parametrize("shape", [(32, 32, 3), (61, 83, 3), (28, 28, 1)])
def test_every_magnitude_is_pillows_to_the_pixel(operation, positive, shape):
    """All 31 bins, the ten whose factor Pillow blends in its own way among them."""
    image = noise(*shape, seed=5)
    for magnitude_bin in range(BINS):
        expected = reference(image, operation, magnitude_bin, positive)
        np.testing.assert_array_equal(apply(image, operation, magnitude_bin, positive), expected)


@every_operation
@pytest.mark.parametrize("positive", [True, False])
def test_a_large_image_is_pillows_to_the_pixel(operation, positive):
    """At the size of a photograph, where errors of a coordinate would have added up."""
    image = noise(375, 501, 3, seed=6)
    expected = reference(image, operation, 9, positive)
    np.testing.assert_array_equal(apply(image, operation, 9, positive), expected)


def test_the_grey_of_every_colour_is_pillows():
    """All 2²⁴ colours, through Color, which shows the grey; OpenCV's own misses one in 800."""
    red_green = np.stack(np.meshgrid(*[np.arange(256, dtype=np.uint8)] * 2), axis=-1)
    for blue in range(256):
        image = np.dstack([red_green, np.full((256, 256), blue, np.uint8)])
        expected = reference(image, "Color", 30, False)
        assert np.array_equal(apply(image, "Color", 30, False), expected), blue


# --- the magnitudes are torchvision's ---------------------------------------------------------


def test_the_operations_are_torchvisions_in_its_order():
    """Fourteen; a change of their order would change what old seeds mean."""
    assert OPERATIONS == (
        *("Identity", "ShearX", "ShearY", "TranslateX", "TranslateY", "Rotate", "Brightness"),
        *("Color", "Contrast", "Sharpness", "Posterize", "Solarize", "AutoContrast", "Equalize"),
    )


@pytest.mark.parametrize(
    "operation, expected",
    [
        *(("Identity", 0), ("AutoContrast", 0), ("Equalize", 0)),
        *(("ShearX", 0.09), ("ShearY", 0.09), ("Rotate", 9)),
        *(("TranslateX", 45 / 331 * 320), ("TranslateY", 45 / 331 * 200)),
        *(("Brightness", 0.27), ("Color", 0.27), ("Contrast", 0.27), ("Sharpness", 0.27)),
        *(("Posterize", 7), ("Solarize", 178.5)),
    ],
)
def test_the_default_magnitudes(operation, expected):
    """Bin 9 of 31, for an image 200 high and 320 wide, worked out by hand, in float32."""
    magnitude = magnitude_of(operation, 9, 200, 320)
    assert magnitude == pytest.approx(expected, rel=1e-6)
    assert magnitude == torch.tensor(magnitude, dtype=torch.float32).item()


def test_the_posterize_bits():
    """8 - round(bin / 7.5): from all bits down to four."""
    bits = [magnitude_of("Posterize", magnitude_bin, 1, 1) for magnitude_bin in range(BINS)]
    assert bits == [8] * 4 + [7] * 8 + [6] * 7 + [5] * 8 + [4] * 4


def test_where_pixels_move():
    """Positive is to the right, down and counter-clockwise; a shear reads further with distance."""
    image = np.zeros((40, 40, 1), np.uint8)
    image[30, 20] = 255

    def place(operation: str, positive: bool) -> list[int]:
        return np.argwhere(apply(image, operation, 9, positive)[..., 0])[0].tolist()

    assert place("TranslateX", True) == [30, 25] and place("TranslateX", False) == [30, 15]
    assert place("TranslateY", True) == [35, 20] and place("TranslateY", False) == [25, 20]
    assert place("ShearX", True) == [30, 17] and place("ShearX", False) == [30, 23]
    assert place("ShearY", True) == [28, 20] and place("ShearY", False) == [32, 20]
    assert place("Rotate", True)[1] > 20 > place("Rotate", False)[1]


# --- what comes out ---------------------------------------------------------------------------


@every_operation
@pytest.mark.parametrize("channels", [1, 3])
def test_the_result_is_a_new_array_of_the_same_kind(operation, channels):
    """uint8, contiguous, writable, the same shape; the input is neither changed nor shared."""
    image = noise(33, 21, channels, seed=2)
    kept = image.copy()
    image.flags.writeable = False
    for positive in (True, False):
        result = apply(image, operation, 9, positive)
        assert result.dtype == np.uint8 and result.shape == image.shape
        assert result.flags.c_contiguous and result.flags.writeable
        assert not np.shares_memory(result, image)
        result[:] = 0
        assert np.array_equal(image, kept)
        assert np.array_equal(
            apply(image, operation, 9, positive), reference(kept, operation, 9, positive)
        )


@every_operation
@pytest.mark.parametrize("channels", [1, 3])
def test_views_are_taken_as_they_are(operation, channels):
    """A crop, a mirrored image or planes put last are as good as their copy."""
    whole = noise(40, 50, channels, seed=3)
    planes = np.ascontiguousarray(whole.transpose(2, 0, 1)).transpose(1, 2, 0)
    for view in (whole[3:31, 5:44], whole[:, ::-1], planes):
        result = apply(view, operation)
        assert np.array_equal(result, apply(view.copy(), operation)) and result.flags.c_contiguous


# --- from what it is drawn --------------------------------------------------------------------


@settings(deadline=None, max_examples=60)
@given(images(20), bit_strings, st.integers(1, 8), st.integers(0, BINS - 1))
def test_rand_augment_does_what_the_bits_choose(image, bits, operations, magnitude_bin):
    """The chosen operations one after another, the same each time, whatever other generators do."""
    expected = image
    for operation, positive in choices(bits, operations):
        expected = reference(expected, operation, magnitude_bin, positive)
    kept = image.copy()
    np.random.rand(3)
    torch.rand(3)
    assert np.array_equal(rand_augment(image, bits, operations, magnitude_bin), expected)
    assert np.array_equal(rand_augment(image, np.uint64(bits), operations, magnitude_bin), expected)
    assert np.array_equal(image, kept)


@given(bit_strings, st.integers(1, 7))
def test_one_operation_more_keeps_those_before(bits, operations):
    """The first choices do not depend on how many follow."""
    assert choices(bits, operations + 1)[:operations] == choices(bits, operations)


def test_the_extreme_bits_choose_the_extreme_operations():
    """No bits set: the first operation, forever; all set: the last."""
    assert choices(0, 8) == [(OPERATIONS[0], False)] * 8
    assert choices(2**64 - 1, 8) == [(OPERATIONS[-1], True)] * 8


def test_pairs_of_choices_are_uniform():
    """Operations and directions of a first and a second: all 28² pairs, each with its share."""
    count, cells = 40_000, 28**2
    bits = np.random.default_rng(0).integers(0, 2**64, count, dtype=np.uint64)
    pairs = Counter(tuple(choices(int(one), 2)) for one in bits)
    assert len(pairs) == cells
    expected = count / cells
    chi_squared = sum((observed - expected) ** 2 / expected for observed in pairs.values())
    assert chi_squared < cells - 1 + 4 * (2 * cells) ** 0.5  # four standard deviations


def test_the_eighth_choice_is_still_uniform():
    """Seven choices leave enough of the 64 bits for one more."""
    count = 20_000
    bits = np.random.default_rng(1).integers(0, 2**64, count, dtype=np.uint64)
    last = Counter(choices(int(one), 8)[-1] for one in bits)
    assert len(last) == 28
    assert all(abs(observed - count / 28) < 5 * (count / 28) ** 0.5 for observed in last.values())
