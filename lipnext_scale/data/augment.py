"""Random augmentation of single uint8 images; all chances come from (seed, epoch, sample)."""

from dataclasses import dataclass

import cv2
import numpy as np

from lipnext_scale.config import ConfigError
from lipnext_scale.data.decode import BadSample
from lipnext_scale.data.order import below, number_below, sample_bits, uniform
from lipnext_scale.data.rand_augment import MAX_SIDE, rand_augment

# Streams of random bits, one a decision: see `draw_chances`.
_STREAMS = np.arange(1, 7)[:, None]


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
        if self.crop_padding < 0:
            raise ConfigError("crop_padding", self.crop_padding, "must be at least 0")
        if high and self.crop_padding:
            raise ConfigError(
                "crop_padding", self.crop_padding, "must be 0 with resize, which crops by itself"
            )
        if not 0 <= self.rand_augment <= 1:
            raise ConfigError("rand_augment", self.rand_augment, "must be between 0 and 1")
        if not 1 <= self.rand_augment_operations <= 3:
            raise ConfigError(
                "rand_augment_operations", self.rand_augment_operations, "must be 1, 2 or 3"
            )
        if not 0 <= self.rand_augment_magnitude <= 30:
            raise ConfigError(
                "rand_augment_magnitude", self.rand_augment_magnitude, "must be from 0 to 30"
            )

    def require_size(self, image_size: int) -> None:
        """Together with the size that the model takes."""
        if self.crop_padding >= image_size:
            raise ConfigError(
                "crop_padding", self.crop_padding, f"must be below model.image_size = {image_size}"
            )
        if 0 < self.resize[0] < image_size:
            raise ConfigError(
                "resize", list(self.resize), f"must be at least model.image_size = {image_size}"
            )


@dataclass(frozen=True)
class AugmentParams:
    """The random numbers of a batch's samples, one each, as Python's own: they are used singly."""

    short_side: list[int]
    top: list[int]  # 64 random bits: what they choose from depends on the image
    left: list[int]
    flip: list[bool]
    rand_augment: list[bool]
    operations: list[int]


def draw_chances(config: AugmentConfig, seed: int, epoch: int, ids: np.ndarray) -> AugmentParams:
    resize, top, left, flip, whether, operations = sample_bits(seed, epoch, ids, _STREAMS)
    low, high = config.resize
    return AugmentParams(
        short_side=(low + below(resize, high - low + 1)).tolist(),
        top=top.tolist(),
        left=left.tolist(),
        flip=((flip >> np.uint64(63)).astype(bool) & config.flip).tolist(),
        rand_augment=(uniform(whether) < config.rand_augment).tolist(),
        operations=operations.tolist(),
    )


def augment(
    image: np.ndarray, config: AugmentConfig, chances: AugmentParams, index: int, out: np.ndarray
) -> None:
    """Write the augmented image into out [size, size, C]."""
    size = out.shape[0]
    if config.resize[1] and config.rand_augment:
        _require_not_too_long(image, config.resize[1])
    if config.resize[1] and chances.rand_augment[index]:
        image = resize_short_side(image, chances.short_side[index])
        image = _rand_augment(image, config, chances, index)
        _flip_into(_crop_at(image, size, size, chances, index), chances.flip[index], out)
    elif config.resize[1]:
        _crop_and_resize(image, chances, index, out)
    else:
        require_size(image, size)
        if config.crop_padding:
            image = _padded_crop(image, config.crop_padding, chances, index)
        _flip_into(image, chances.flip[index], out)
        if chances.rand_augment[index]:
            out[...] = _rand_augment(out, config, chances, index)


def _rand_augment(
    image: np.ndarray, config: AugmentConfig, chances: AugmentParams, index: int
) -> np.ndarray:
    return rand_augment(
        image,
        chances.operations[index],
        config.rand_augment_operations,
        config.rand_augment_magnitude,
    )


def resize_short_side(image: np.ndarray, short_side: int) -> np.ndarray:
    """Bilinear; where it shrinks to less than a half, means over areas, lest it aliases.

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
    resized = cv2.resize(
        image, size, interpolation=cv2.INTER_AREA if scale < 0.5 else cv2.INTER_LINEAR
    )
    return resized if resized.ndim == 3 else resized[:, :, None]


def centre_crop(image: np.ndarray, size: int) -> np.ndarray:
    top, left = (image.shape[0] - size) // 2, (image.shape[1] - size) // 2
    return image[top : top + size, left : left + size]


def require_size(image: np.ndarray, size: int) -> None:
    height, width, channels = image.shape
    if (height, width) != (size, size):
        raise BadSample(f"is {channels}×{height}×{width}, and the model takes {size}×{size}")


def _require_not_too_long(image: np.ndarray, short_side: int) -> None:
    """Whatever the chances, so that a sample is good or bad once for all."""
    height, width = image.shape[:2]
    if max(height, width) * short_side > MAX_SIDE * min(height, width):
        ratio = MAX_SIDE // short_side
        raise BadSample(f"is {height}×{width}: more than {ratio} times as long as it is wide")


def _crop_at(
    image: np.ndarray, height: int, width: int, chances: AugmentParams, index: int
) -> np.ndarray:
    top = number_below(chances.top[index], image.shape[0] - height + 1)
    left = number_below(chances.left[index], image.shape[1] - width + 1)
    return image[top : top + height, left : left + width]


def _crop_and_resize(
    image: np.ndarray, chances: AugmentParams, index: int, out: np.ndarray
) -> None:
    """Resize and crop, the other way round: only what is kept is resized, straight into its place.

    The same but for rounding to whole pixels of the image instead of the resized one.
    """
    size = out.shape[0]
    side = max(1, round(min(image.shape[:2]) * size / chances.short_side[index]))
    part = _crop_at(image, side, side, chances, index)
    how = cv2.INTER_AREA if size < 0.5 * side else cv2.INTER_LINEAR
    cv2.resize(part, (size, size), dst=out, interpolation=how)
    if chances.flip[index]:
        cv2.flip(out, 1, dst=out)  # in place: out is in the cache now, and was not before


def _padded_crop(image: np.ndarray, padding: int, chances: AugmentParams, index: int) -> np.ndarray:
    """Zero-pad on all sides, then cut the original size out at a random place."""
    size, places = image.shape[0], 2 * padding + 1
    down = number_below(chances.top[index], places) - padding
    right = number_below(chances.left[index], places) - padding
    cropped = np.zeros_like(image)
    kept = image[max(0, down) : size + min(0, down), max(0, right) : size + min(0, right)]
    top, left = max(0, -down), max(0, -right)
    cropped[top : top + kept.shape[0], left : left + kept.shape[1]] = kept
    return cropped


def _flip_into(image: np.ndarray, flip: bool, out: np.ndarray) -> None:
    if flip:
        cv2.flip(image, 1, dst=out)  # forty times as fast as numpy's copy of a reversed view
    else:
        out[...] = image
