"""RandAugment's operations as torchvision does them on Pillow images: slow, readable, the measure.

`rand_augment.py` computes the same, pixel for pixel, and faster; the tests hold it to this file.
"""

import math
from collections.abc import Callable

import numpy as np
from PIL import Image, ImageEnhance, ImageOps

Operation = Callable[[Image.Image, float, int], Image.Image]


def apply_reference(image: np.ndarray, operation: str, magnitude: float, sign: int) -> np.ndarray:
    """One operation on a uint8 image [height, width, 1 or 3].

    magnitude: in the operation's own unit (`rand_augment.magnitude_of`): the slope of a shear, the
    pixels of a translation, degrees, the change of a factor, the bits that stay, the threshold.
    sign: 1 or -1; operations without a direction ignore it.
    """
    assert sign in (1, -1)
    picture = Image.fromarray(image[..., 0] if image.shape[2] == 1 else image)
    result = _OPERATIONS[operation](picture, magnitude, sign)
    return np.array(result).reshape(image.shape)


def _slope(magnitude: float) -> float:
    """torchvision hands shears around as degrees; this is what its matrix then holds."""
    return math.tan(math.radians(math.degrees(math.atan(magnitude))))


def _shear_x(picture: Image.Image, magnitude: float, sign: int) -> Image.Image:
    return _affine(picture, (1, sign * _slope(magnitude), 0, 0, 1, 0))


def _shear_y(picture: Image.Image, magnitude: float, sign: int) -> Image.Image:
    return _affine(picture, (1, 0, 0, sign * _slope(magnitude), 1, 0))


def _translate_x(picture: Image.Image, magnitude: float, sign: int) -> Image.Image:
    return _affine(picture, (1, 0, -sign * int(magnitude), 0, 1, 0))


def _translate_y(picture: Image.Image, magnitude: float, sign: int) -> Image.Image:
    return _affine(picture, (1, 0, 0, 0, 1, -sign * int(magnitude)))


def _affine(picture: Image.Image, from_output: tuple[float, ...]) -> Image.Image:
    """Each output pixel is the input pixel that `from_output` leads it to; black outside."""
    return picture.transform(
        picture.size, Image.Transform.AFFINE, from_output, Image.Resampling.NEAREST
    )


def _enhance(enhancer: Callable[[Image.Image], ImageEnhance._Enhance]) -> Operation:
    """Away from, or (sign -1) towards, what the enhancer makes of an image at its factor 0."""
    return lambda picture, magnitude, sign: enhancer(picture).enhance(1 + sign * magnitude)


_OPERATIONS: dict[str, Operation] = {
    "Identity": lambda picture, magnitude, sign: picture,
    "ShearX": _shear_x,
    "ShearY": _shear_y,
    "TranslateX": _translate_x,
    "TranslateY": _translate_y,
    "Rotate": lambda picture, magnitude, sign: picture.rotate(sign * magnitude),
    "Brightness": _enhance(ImageEnhance.Brightness),
    "Color": _enhance(ImageEnhance.Color),
    "Contrast": _enhance(ImageEnhance.Contrast),
    "Sharpness": _enhance(ImageEnhance.Sharpness),
    "Posterize": lambda picture, magnitude, sign: ImageOps.posterize(picture, int(magnitude)),
    # A threshold between two grey levels is meant: torchvision passes it on unrounded.
    "Solarize": lambda picture, magnitude, sign: ImageOps.solarize(picture, magnitude),  # type: ignore[arg-type]
    "AutoContrast": lambda picture, magnitude, sign: ImageOps.autocontrast(picture),
    "Equalize": lambda picture, magnitude, sign: ImageOps.equalize(picture),
}
