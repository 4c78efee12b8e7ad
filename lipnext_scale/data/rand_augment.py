"""RandAugment as in torchvision (magnitudes, Pillow's arithmetic), on single uint8 images.

Every operation is a pure function of an image [height, width, 1 or 3]; the result is a new array
of the same shape. The pixels are those of `rand_augment_reference.py`, all of them: where OpenCV
or numpy is faster than Pillow but rounds differently, the difference is taken care of here.

What depends on the size of the image (Rotate above all) is remembered for the last few sizes, so
this is at its best after the crop, on images of one size. OpenCV's threads are left to the caller.
"""

import math
from collections.abc import Callable, Sequence
from functools import lru_cache

import cv2
import numpy as np
import torch

BINS = 31
SIZES_REMEMBERED = 8
# Pillow leaves its fixed-point arithmetic, and OpenCV its 16-bit coordinates, for larger images.
MAX_SIDE = 2**14

Slices = tuple[slice, slice]


def apply(
    image: np.ndarray, operation: str, magnitude_bin: int = 9, positive: bool = True
) -> np.ndarray:
    """One of OPERATIONS; `positive` is the direction, for those that have one."""
    assert image.dtype == np.uint8 and image.ndim == 3 and image.shape[2] in (1, 3)
    assert 0 <= magnitude_bin < BINS and max(image.shape) <= MAX_SIDE
    function = _OPERATIONS[operation]
    # OpenCV drops a last dimension of 1.
    return function(np.ascontiguousarray(image), magnitude_bin, positive).reshape(image.shape)


def rand_augment(
    image: np.ndarray, bits: int, operations: int = 2, magnitude_bin: int = 9
) -> np.ndarray:
    """`operations` random operations one after another, as `choices` draws them from 64 bits."""
    for operation, positive in choices(bits, operations):
        image = apply(image, operation, magnitude_bin, positive)
    return image


def choices(bits: int, operations: int) -> list[tuple[str, bool]]:
    """Operations, with repetition, and their directions, all from 64 random bits.

    bits / 2⁶⁴ is read as a fraction in base 28 = 14 operations · 2 directions, one digit a choice:
    digit // 2 is the operation, digit % 2 the direction. A digit takes under 5 bits, so of 8 the
    last still has 30 to be drawn from; its probabilities are right to 28 / 2³⁰.
    """
    assert 0 <= bits < 2**64 and 1 <= operations <= 8
    fraction, drawn = int(bits), []
    for _ in range(operations):
        fraction *= 2 * len(OPERATIONS)
        digit = fraction >> 64
        fraction &= 2**64 - 1
        drawn.append((OPERATIONS[digit >> 1], bool(digit & 1)))
    return drawn


@lru_cache(maxsize=1024)
def magnitude_of(operation: str, magnitude_bin: int, height: int, width: int) -> float:
    """torchvision's magnitude for a bin, in the operation's own unit, without a direction."""
    if operation == "Posterize":
        return 8 - round(magnitude_bin / ((BINS - 1) / 4))
    first, last = {
        "ShearX": (0, 0.3),
        "ShearY": (0, 0.3),
        "TranslateX": (0, 150 / 331 * width),
        "TranslateY": (0, 150 / 331 * height),
        "Rotate": (0, 30),
        "Brightness": (0, 0.9),
        "Color": (0, 0.9),
        "Contrast": (0, 0.9),
        "Sharpness": (0, 0.9),
        "Solarize": (255, 0),
    }.get(operation, (0, 0))
    # float32 as in torchvision, for 1.27 in float32 times a pixel can fall on an integer's other
    # side than 1.27 in float64.
    return torch.linspace(first, last, BINS, dtype=torch.float32)[magnitude_bin].item()


# --- moving pixels: nearest neighbour, black outside ------------------------------------------


def _identity(image: np.ndarray, magnitude_bin: int, positive: bool) -> np.ndarray:
    return image.copy()


def _translate_x(image: np.ndarray, magnitude_bin: int, positive: bool) -> np.ndarray:
    height, width, _ = image.shape
    pixels = int(magnitude_of("TranslateX", magnitude_bin, height, width))
    to, of = _overlap(width, -pixels if positive else pixels)
    moved = np.zeros(image.shape, np.uint8)
    moved[:, to] = image[:, of]
    return moved


def _translate_y(image: np.ndarray, magnitude_bin: int, positive: bool) -> np.ndarray:
    height, width, _ = image.shape
    pixels = int(magnitude_of("TranslateY", magnitude_bin, height, width))
    to, of = _overlap(height, -pixels if positive else pixels)
    moved = np.zeros(image.shape, np.uint8)
    moved[to] = image[of]
    return moved


def _overlap(length: int, shift: int) -> Slices:
    """Where output[i] = input[i + shift] stays inside: the slice of the output, of the input."""
    shift = max(-length, min(shift, length))
    return slice(max(0, -shift), length - max(0, shift)), slice(
        max(0, shift), length + min(0, shift)
    )


def _shear_x(image: np.ndarray, magnitude_bin: int, positive: bool) -> np.ndarray:
    height, width, _ = image.shape
    sheared = np.zeros(image.shape, np.uint8)
    for rows, to, of in _shear_blocks(height, width, magnitude_bin, positive):
        sheared[rows, to] = image[rows, of]
    return sheared


def _shear_y(image: np.ndarray, magnitude_bin: int, positive: bool) -> np.ndarray:
    height, width, _ = image.shape
    sheared = np.zeros(image.shape, np.uint8)
    for columns, to, of in _shear_blocks(width, height, magnitude_bin, positive):
        sheared[to, columns] = image[of, columns]
    return sheared


@lru_cache(maxsize=4 * SIZES_REMEMBERED)
def _shear_blocks(
    lines: int, length: int, magnitude_bin: int, positive: bool
) -> list[tuple[slice, slice, slice]]:
    """A shear moves each line (row or column) by whole pixels, and neighbours mostly alike.

    For each block of lines that move alike: the lines, the slice of the output, of the input.
    """
    slope = magnitude_of("ShearX", magnitude_bin, lines, length) * (1 if positive else -1)
    shifts = (_fixed(0.5 + slope * 0.5) + _fixed(slope) * np.arange(lines)) >> 16
    edges = [0, *(np.flatnonzero(np.diff(shifts)) + 1).tolist(), lines]
    return [
        (slice(first, end), *_overlap(length, int(shifts[first])))
        for first, end in zip(edges[:-1], edges[1:], strict=True)
    ]


def _rotate(image: np.ndarray, magnitude_bin: int, positive: bool) -> np.ndarray:
    height, width, _ = image.shape
    sources = _rotation(height, width, magnitude_bin, positive)
    return cv2.remap(  # type: ignore[call-overload]  # OpenCV's stubs know no map2 of None
        image, sources, None, cv2.INTER_NEAREST, borderMode=cv2.BORDER_CONSTANT
    )


@lru_cache(maxsize=2 * SIZES_REMEMBERED)
def _rotation(height: int, width: int, magnitude_bin: int, positive: bool) -> np.ndarray:
    """The input pixel (x, y) of every output pixel; warpAffine would round otherwise."""
    degrees = magnitude_of("Rotate", magnitude_bin, height, width) * (1 if positive else -1)
    cos, sin = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    middle_x, middle_y = width / 2, height / 2
    # From the middle of the first pixel on, as Pillow goes.
    first_x = _fixed(middle_x + cos * (0.5 - middle_x) - sin * (0.5 - middle_y))
    first_y = _fixed(middle_y + sin * (0.5 - middle_x) + cos * (0.5 - middle_y))
    x = np.arange(width, dtype=np.int32)
    y = np.arange(height, dtype=np.int32)[:, None]
    sources = np.empty((height, width, 2), np.int16)
    sources[..., 0] = (first_x + _fixed(cos) * x - _fixed(sin) * y) >> 16
    sources[..., 1] = (first_y + _fixed(sin) * x + _fixed(cos) * y) >> 16
    return sources


def _fixed(value: float) -> int:
    """Pillow's fixed point with 16 bits after it."""
    return math.floor(value * 2**16 + 0.5)


# --- blends of the image with something duller ------------------------------------------------


def _brightness(image: np.ndarray, magnitude_bin: int, positive: bool) -> np.ndarray:
    return _blend(np.zeros(image.shape, np.uint8), image, _factor(magnitude_bin, positive))


def _color(image: np.ndarray, magnitude_bin: int, positive: bool) -> np.ndarray:
    if image.shape[2] == 1:
        return image.copy()
    grey = cv2.cvtColor(_grey(image), cv2.COLOR_GRAY2RGB)
    return _blend(grey, image, _factor(magnitude_bin, positive))


def _contrast(image: np.ndarray, magnitude_bin: int, positive: bool) -> np.ndarray:
    grey = image if image.shape[2] == 1 else _grey(image)
    mean = int(cv2.sumElems(grey)[0] / grey.size + 0.5)
    return _blend(np.full_like(image, mean), image, _factor(magnitude_bin, positive))


def _sharpness(image: np.ndarray, magnitude_bin: int, positive: bool) -> np.ndarray:
    return _blend(_smooth(image), image, _factor(magnitude_bin, positive))


@lru_cache(maxsize=2 * BINS)
def _factor(magnitude_bin: int, positive: bool) -> float:
    magnitude = magnitude_of("Brightness", magnitude_bin, 1, 1)
    return 1 + magnitude if positive else 1 - magnitude


def _blend(dull: np.ndarray, image: np.ndarray, factor: float) -> np.ndarray:
    """dull + factor · (image - dull), cut to an integer, not rounded, as Pillow does."""
    blend = _blend_quickly if _quick_is_exact(factor) else _blend_exactly
    return blend(dull, image, factor)


def _blend_quickly(dull: np.ndarray, image: np.ndarray, factor: float) -> np.ndarray:
    """Off by one where Pillow's rounding carries a would-be integer below that integer."""
    # OpenCV rounds. Factors have two decimals, so that no fraction lies between 0.99 and 1.
    return cv2.addWeighted(image, factor, dull, 1 - factor, 0.005 - 0.5)


def _blend_exactly(dull: np.ndarray, image: np.ndarray, factor: float) -> np.ndarray:
    """Step by step in float32, which is what Pillow's C code does."""
    start = dull.astype(np.float32)
    blended = start + np.float32(factor) * (image.astype(np.float32) - start)
    return np.clip(blended, 0, 255).astype(np.uint8)


@lru_cache(maxsize=2 * BINS)
def _quick_is_exact(factor: float) -> bool:
    """Tried on all 256 · 256 pairs of pixels. It is, for 52 of the 62 factors."""
    pixels = np.arange(256, dtype=np.uint8)
    dull, image = np.repeat(pixels[:, None], 256, axis=1), np.repeat(pixels[None], 256, axis=0)
    return np.array_equal(_blend_quickly(dull, image, factor), _blend_exactly(dull, image, factor))


# Pillow's luma, in 65536ths, and a half to round by cutting: sums of it are exact in float32.
# OpenCV's own conversion has a bit less, and another grey for one colour in 800.
_LUMA = np.array([[19595, 38470, 7471, 32768]], np.float32) / 2**16


def _grey(image: np.ndarray) -> np.ndarray:
    return cv2.transform(image.astype(np.float32), _LUMA).astype(np.uint8)


def _smooth(image: np.ndarray) -> np.ndarray:
    """(sum of the 3 x 3 pixels around + 4 · the middle) / 13, rounded; the border stays.

    Done on the flat array, in place where possible: on large images twice as fast as filter2D. At
    the ends of the rows it mixes pixels of both sides of the image; there the border goes over it.
    With fewer than 3 rows or columns all is border, and the slices are empty or covered.
    """
    _, width, channels = image.shape
    row, smooth = width * channels, image.copy()
    flat = image.reshape(-1).astype(np.uint16)
    columns = flat[: -2 * row] + flat[row:-row]
    columns += flat[2 * row :]
    inner = slice(row + channels, -row - channels)
    total = flat[inner]
    total *= 4
    total += 6  # 13 is odd: rounding to the nearest is adding 6 and cutting
    total += columns[: -2 * channels]
    total += columns[channels:-channels]
    total += columns[2 * channels :]
    total //= 13
    smooth.reshape(-1)[inner] = total
    smooth[:, 0] = image[:, 0]
    smooth[:, -1] = image[:, -1]
    return smooth


# --- new values for old -----------------------------------------------------------------------


def _posterize(image: np.ndarray, magnitude_bin: int, positive: bool) -> np.ndarray:
    bits = int(magnitude_of("Posterize", magnitude_bin, 1, 1))
    return image & np.uint8(256 - 2 ** (8 - bits))


def _solarize(image: np.ndarray, magnitude_bin: int, positive: bool) -> np.ndarray:
    """255 - pixel, which flips all its bits, from the threshold on."""
    threshold = math.ceil(magnitude_of("Solarize", magnitude_bin, 1, 1))
    flipped = (image >= threshold).view(np.uint8)
    np.negative(flipped, out=flipped)  # 0 or, modulo 256, 255
    return np.bitwise_xor(image, flipped, out=flipped)


def _auto_contrast(image: np.ndarray, magnitude_bin: int, positive: bool) -> np.ndarray:
    planes = cv2.split(image)
    limits = [cv2.minMaxLoc(plane) for plane in planes]
    return _look_up(planes, [_stretching(int(low), int(high)) for low, high, _, _ in limits])


@lru_cache(maxsize=4096)
def _stretching(low: int, high: int) -> np.ndarray | None:
    """The table that takes low to 0 and high to 255; None for the identity."""
    if high <= low or (low, high) == (0, 255):
        return None
    scale = 255 / (high - low)
    return np.clip(np.arange(256) * scale - low * scale, 0, 255).astype(np.uint8)


def _equalize(image: np.ndarray, magnitude_bin: int, positive: bool) -> np.ndarray:
    planes = cv2.split(image)
    return _look_up(planes, [_equalizing(plane) for plane in planes])


def _equalizing(plane: np.ndarray) -> np.ndarray | None:
    """The table that makes the values of a plane about equally frequent; None for the identity."""
    counts = cv2.calcHist([plane], [0], None, [256], [0, 256]).ravel()
    up_to = counts.astype(np.int64).cumsum()
    brightest = int(up_to.searchsorted(plane.size))
    step = int(up_to[brightest - 1]) // 255 if brightest else 0
    if step == 0:
        return None
    up_to += step // 2
    up_to //= step
    table = np.zeros(256, np.uint8)
    table[1:] = np.minimum(up_to[:-1], 255)
    return table


def _look_up(planes: Sequence[np.ndarray], tables: Sequence[np.ndarray | None]) -> np.ndarray:
    """Plane by plane: one table of three channels is slower."""
    return cv2.merge(
        [
            plane if table is None else cv2.LUT(plane, table)
            for plane, table in zip(planes, tables, strict=True)
        ]
    )


_OPERATIONS: dict[str, Callable[[np.ndarray, int, bool], np.ndarray]] = {
    "Identity": _identity,
    "ShearX": _shear_x,
    "ShearY": _shear_y,
    "TranslateX": _translate_x,
    "TranslateY": _translate_y,
    "Rotate": _rotate,
    "Brightness": _brightness,
    "Color": _color,
    "Contrast": _contrast,
    "Sharpness": _sharpness,
    "Posterize": _posterize,
    "Solarize": _solarize,
    "AutoContrast": _auto_contrast,
    "Equalize": _equalize,
}
OPERATIONS: tuple[str, ...] = tuple(_OPERATIONS)
