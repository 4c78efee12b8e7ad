"""Random augmentation of single uint8 images; all randomness comes from (seed, epoch, sample)."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import cv2
import numpy as np

from lipnext_scale.data.decode import BadSample
from lipnext_scale.data.order import below, number_below, sample_bits, uniform
from lipnext_scale.utils.config import ConfigError


@dataclass(frozen=True)
class AugmentConfig:
    """What happens to a training image, in the order of the paper's recipes:

    with `resize`: resize, RandAugment, random crop, flip; without: padded random crop, flip,
    RandAugment.
    """

    # The short side becomes a random one of these; (0, 0): images have the model's size already.
    resize: tuple[int, int] = (0, 0)
    # Zero-pad by so many pixels and crop back at random; 0: no crop. Not with resize.
    crop_padding: int = 0
    flip: bool = False
    # The share of images that RandAugment changes.
    rand_augment: float = 0.0
    rand_augment_operations: int = 2
    # 0 to 30.
    rand_augment_magnitude: int = 9

    def __post_init__(self) -> None:
        low, high = self.resize
        if not (self.resize == (0, 0) or 1 <= low <= high <= 4096):
            raise ConfigError("resize", list(self.resize), "must be two sizes, the smaller first")
        if high and self.crop_padding:
            right = "must be 0 with resize, which crops by itself"
            raise ConfigError("crop_padding", self.crop_padding, right)
        for key, least, most in (
            ("crop_padding", 0, math.inf),
            ("rand_augment", 0, 1),
            ("rand_augment_operations", 1, 3),
            ("rand_augment_magnitude", 0, 30),
        ):
            if not least <= getattr(self, key) <= most:
                raise ConfigError(key, getattr(self, key), f"must be from {least} to {most}")

    def require_size(self, image_size: int) -> None:
        """The settings fit the size that the model takes."""
        if self.crop_padding >= image_size:
            right = f"must be below model.image_size = {image_size}"
            raise ConfigError("crop_padding", self.crop_padding, right)
        if 0 < self.resize[0] < image_size:
            right = f"must be at least model.image_size = {image_size}"
            raise ConfigError("resize", list(self.resize), right)


class AugmentParams(NamedTuple):
    """The random numbers of one sample, as Python's own."""

    short_side: int
    top: int  # 64 random bits: what they choose from depends on the image
    left: int
    flip: bool
    rand_augment: bool
    operations: int  # 64 random bits


def draw_params(
    config: AugmentConfig, seed: int, epoch: int, ids: np.ndarray
) -> list[AugmentParams]:
    """One for each sample, drawn for the batch at once: that is faster."""
    streams = np.arange(1, 7)[:, None]
    resize, top, left, flip, whether, operations = sample_bits(seed, epoch, ids, streams)
    low, high = config.resize
    columns = (
        low + below(resize, high - low + 1),
        top,
        left,
        (flip >> np.uint64(63)).astype(bool) & config.flip,
        uniform(whether) < config.rand_augment,
        operations,
    )
    return [AugmentParams(*row) for row in zip(*(c.tolist() for c in columns), strict=True)]


def augment(
    image: np.ndarray, config: AugmentConfig, params: AugmentParams, out: np.ndarray
) -> None:
    """Write the augmented image into out [size, size, C]."""
    size = out.shape[0]
    if config.resize[1] and config.rand_augment:
        _require_not_too_long(image, config.resize[1])
    if config.resize[1] and params.rand_augment:
        image = resize_short_side(image, params.short_side)
        image = rand_augment(image, config, params)
        _flip_into(_random_crop(image, size, params), params.flip, out)
    elif config.resize[1]:
        _crop_and_resize(image, params, out)
    else:
        require_size(image, size)
        if config.crop_padding:
            image = _padded_crop(image, config.crop_padding, params)
        _flip_into(image, params.flip, out)
        if params.rand_augment:
            out[...] = rand_augment(out, config, params)


def resize_short_side(image: np.ndarray, short_side: int) -> np.ndarray:
    """Bilinear; where it shrinks to less than a half, means over areas, which do not alias.

    (Means cost six times as much; a JPEG is decoded to less than twice the size beforehand.)
    """
    height, width = image.shape[:2]
    scale = short_side / min(height, width)
    if scale == 1:
        return image
    size = (
        (short_side, max(short_side, round(height * scale)))
        if width <= height
        else (max(short_side, round(width * scale)), short_side)
    )
    how = cv2.INTER_AREA if scale < 0.5 else cv2.INTER_LINEAR
    return cv2.resize(image, size, interpolation=how).reshape(*size[::-1], -1)


def centre_crop(image: np.ndarray, size: int) -> np.ndarray:
    top, left = (image.shape[0] - size) // 2, (image.shape[1] - size) // 2
    return image[top : top + size, left : left + size]


def require_size(image: np.ndarray, size: int) -> None:
    height, width, channels = image.shape
    if (height, width) != (size, size):
        raise BadSample(f"is {channels}×{height}×{width}, and the model takes {size}×{size}")


def _require_not_too_long(image: np.ndarray, short_side: int) -> None:
    """Whatever the random numbers, so that a sample is good or bad once for all."""
    height, width = image.shape[:2]
    if max(height, width) * short_side > MAX_SIDE * min(height, width):
        ratio = MAX_SIDE // short_side
        raise BadSample(f"is {height}×{width}: more than {ratio} times as long as it is wide")


def _random_crop(image: np.ndarray, size: int, params: AugmentParams) -> np.ndarray:
    top = number_below(params.top, image.shape[0] - size + 1)
    left = number_below(params.left, image.shape[1] - size + 1)
    return image[top : top + size, left : left + size]


def _crop_and_resize(image: np.ndarray, params: AugmentParams, out: np.ndarray) -> None:
    """Resize and crop, the other way round: only what is kept is resized, straight into its place.

    The same but for rounding to whole pixels of the image instead of the resized one.
    """
    size = out.shape[0]
    side = max(1, round(min(image.shape[:2]) * size / params.short_side))
    part = _random_crop(image, side, params)
    how = cv2.INTER_AREA if size < 0.5 * side else cv2.INTER_LINEAR
    cv2.resize(part, (size, size), dst=out, interpolation=how)
    if params.flip:
        cv2.flip(out, 1, dst=out)  # in place: out is in the cache now, and was not before


def _padded_crop(image: np.ndarray, padding: int, params: AugmentParams) -> np.ndarray:
    """Zero-pad on all sides, then cut the original size out at a random place."""
    down = padding - number_below(params.top, 2 * padding + 1)
    right = padding - number_below(params.left, 2 * padding + 1)
    return _moved(image, down, right)


def _moved(image: np.ndarray, down: int, right: int) -> np.ndarray:
    """The image moved by whole pixels, black where it was."""
    height, width, _ = image.shape
    moved = np.zeros_like(image)
    kept = image[max(0, -down) : height - max(0, down), max(0, -right) : width - max(0, right)]
    top, left = max(0, down), max(0, right)
    moved[top : top + kept.shape[0], left : left + kept.shape[1]] = kept
    return moved


def _flip_into(image: np.ndarray, flip: bool, out: np.ndarray) -> None:
    if flip:
        cv2.flip(image, 1, dst=out)  # forty times as fast as numpy's copy of a reversed view
    else:
        out[...] = image


# --------------------------------------------------------------------------------------------------
# RandAugment: torchvision's operations and magnitudes.
#
# Each operation is a pure function of an image [height, width, 1 or 3], a magnitude from 0 to 30
# and a sign, which is +1 or -1.

# OpenCV has 16-bit coordinates.
MAX_SIDE = 2**14
Operation = Callable[[np.ndarray, int, int], np.ndarray]


def rand_augment(image: np.ndarray, config: AugmentConfig, params: AugmentParams) -> np.ndarray:
    """Random operations one after another."""
    for operation, sign in choose_operations(params.operations, config.rand_augment_operations):
        image = apply(operation, image, config.rand_augment_magnitude, sign)
    return image


def choose_operations(bits: int, count: int) -> Iterator[tuple[str, int]]:
    """Operations, with repetition, and their signs, all from 64 random bits.

    bits / 2⁶⁴ is read as a fraction in base 28 = 14 operations · 2 signs, one digit a choice.
    """
    for _ in range(count):
        bits *= 2 * len(OPERATIONS)
        digit, bits = bits >> 64, bits & (2**64 - 1)
        yield _NAMES[digit >> 1], 1 if digit & 1 else -1


def apply(operation: str, image: np.ndarray, magnitude: int, sign: int = 1) -> np.ndarray:
    """One of OPERATIONS; the result is a new array of the image's shape."""
    assert max(image.shape) <= MAX_SIDE
    # OpenCV drops a last dimension of 1.
    changed = OPERATIONS[operation](np.ascontiguousarray(image), magnitude, sign)
    return changed.reshape(image.shape)


def _warp(image: np.ndarray, turn: list[list[float]], x: float = 0, y: float = 0) -> np.ndarray:
    """Nearest neighbour, black outside. turn: from output to input places, about (x, y)."""
    centre = np.array([x, y]) - 0.5  # pixels have their centres at halves
    matrix = np.column_stack([turn, centre - turn @ centre])
    how = cv2.INTER_NEAREST | cv2.WARP_INVERSE_MAP
    return cv2.warpAffine(image, matrix, image.shape[1::-1], flags=how)


def _rotate(image: np.ndarray, magnitude: int, sign: int) -> np.ndarray:
    """By as many degrees about the middle."""
    height, width, _ = image.shape
    cos, sin = math.cos(math.radians(magnitude)), sign * math.sin(math.radians(magnitude))
    return _warp(image, [[cos, -sin], [sin, cos]], width / 2, height / 2)


def _translation(side: int, magnitude: int, sign: int) -> int:
    return sign * int(magnitude * 5 / 331 * side)


def _blend(dull: np.ndarray, image: np.ndarray, magnitude: int, sign: int) -> np.ndarray:
    """Away from, or towards, a duller image; cut to whole numbers.

    OpenCV rounds. Factors have two decimals, so that no fraction lies between 0.99 and 1.
    """
    factor = 1 + sign * 0.03 * magnitude
    return cv2.addWeighted(image, factor, dull, 1 - factor, 0.005 - 0.5)


def _color(image: np.ndarray, magnitude: int, sign: int) -> np.ndarray:
    if image.shape[2] == 1:
        return image.copy()
    return _blend(cv2.cvtColor(_grey(image), cv2.COLOR_GRAY2RGB), image, magnitude, sign)


def _contrast(image: np.ndarray, magnitude: int, sign: int) -> np.ndarray:
    grey = _grey(image)
    mean = int(cv2.sumElems(grey)[0] / grey.size + 0.5)
    return _blend(np.full_like(image, mean), image, magnitude, sign)


def _sharpness(image: np.ndarray, magnitude: int, sign: int) -> np.ndarray:
    """The duller image is smoothed, but for its border."""
    kernel = np.array([[1, 1, 1], [1, 5, 1], [1, 1, 1]]) / 13
    smooth = cv2.filter2D(image, -1, kernel).reshape(image.shape)
    for edge in (0, -1):
        smooth[edge], smooth[:, edge] = image[edge], image[:, edge]
    return _blend(smooth, image, magnitude, sign)


# The luma of ITU-R 601 in 65536ths, and a half to round by cutting.
_LUMA = np.array([[19595, 38470, 7471, 32768]], np.float32) / 2**16


def _grey(image: np.ndarray) -> np.ndarray:
    if image.shape[2] == 1:
        return image
    return cv2.transform(image.astype(np.float32), _LUMA).astype(np.uint8)


def _posterize(image: np.ndarray, magnitude: int, _sign: int) -> np.ndarray:
    """Only the highest 8 to 4 bits stay."""
    return image & np.uint8(256 - 2 ** round(magnitude / 7.5))


def _solarize(image: np.ndarray, magnitude: int, _sign: int) -> np.ndarray:
    """255 - pixel from a threshold on, which flips all its bits: 0 - 1 is 255."""
    flipped = (image >= math.ceil(255 - 8.5 * magnitude)).view(np.uint8)
    np.negative(flipped, out=flipped)
    return np.bitwise_xor(image, flipped, out=flipped)


def _auto_contrast(image: np.ndarray, _magnitude: int, _sign: int) -> np.ndarray:
    """In every channel the darkest value becomes 0, the brightest 255."""
    planes = cv2.split(image)
    return cv2.merge([cv2.LUT(p, _stretching(*cv2.minMaxLoc(p)[:2])) for p in planes])


@lru_cache(maxsize=4096)
def _stretching(low: float, high: float) -> np.ndarray:
    if high <= low:
        return np.arange(256, dtype=np.uint8)
    scale = 255 / (high - low)
    return np.clip(np.arange(256) * scale - low * scale, 0, 255).astype(np.uint8)


def _equalize(image: np.ndarray, _magnitude: int, _sign: int) -> np.ndarray:
    """In every channel all values become about equally frequent."""
    return cv2.merge([_equalized(plane) for plane in cv2.split(image)])


def _equalized(plane: np.ndarray) -> np.ndarray:
    counts = cv2.calcHist([plane], [0], None, [256], [0, 256]).ravel().astype(np.int64)
    up_to = counts.cumsum()
    step = (plane.size - counts[counts.nonzero()[0][-1]]) // 255
    if step == 0:
        return plane
    table = np.zeros(256, np.uint8)
    table[1:] = np.minimum((up_to[:-1] + step // 2) // step, 255)
    return cv2.LUT(plane, table)


# The order is part of what a seed means.
OPERATIONS: dict[str, Operation] = {
    "Identity": lambda image, magnitude, sign: image.copy(),
    "ShearX": lambda image, magnitude, sign: _warp(image, [[1, sign * 0.01 * magnitude], [0, 1]]),
    "ShearY": lambda image, magnitude, sign: _warp(image, [[1, 0], [sign * 0.01 * magnitude, 1]]),
    "TranslateX": lambda image, *how: _moved(image, 0, _translation(image.shape[1], *how)),
    "TranslateY": lambda image, *how: _moved(image, _translation(image.shape[0], *how), 0),
    "Rotate": _rotate,
    "Brightness": lambda image, *how: _blend(np.zeros_like(image), image, *how),
    "Color": _color,
    "Contrast": _contrast,
    "Sharpness": _sharpness,
    "Posterize": _posterize,
    "Solarize": _solarize,
    "AutoContrast": _auto_contrast,
    "Equalize": _equalize,
}
_NAMES = list(OPERATIONS)
