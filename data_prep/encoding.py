"""What is stored of an image: its own bytes wherever that is possible.

    JPEG in YCbCr, RGB or greyscale     byte for byte, baseline or progressive
    PNG of 8 bits, RGB or greyscale     byte for byte
    JPEG in CMYK or YCCK                JPEG in RGB, quality 95
    a few stray bytes before the end    the same JPEG without them; two files of ImageNet have such
    palette, alpha, 1 to 4 bits         PNG; alpha is dropped, images without colour stay greyscale
    WebP, BMP, GIF, TIFF                PNG; of several frames the first
    pixels                              PNG

A file is what its bytes say, whatever its name ends in. EXIF orientation is not applied: the pixels
stay as they are stored. Every image is decoded whole, so that a damaged one is found here and not
in training, which reads JPEGs by the same strict decoder.
"""

import io
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import simplejpeg
from PIL import Image

from data_prep.common import LONGEST_SIDE
from lipnext_scale.data.decode import png_damage
from lipnext_scale.utils.collectives import reason_of

CMYK_QUALITY = 95
FORMATS = ("PNG", "WEBP", "BMP", "GIF", "TIFF")
_JPEG_START = b"\xff\xd8\xff"
_JPEG_END = b"\xff\xd9"
# More stray bytes than these are damaged data, of which the decoder lost its place.
_STRAY = re.compile(r"Corrupt JPEG data: (\d) extraneous bytes before marker 0xd9")
_DECODED_AS = {"Gray": "GRAY", "CMYK": "CMYK", "YCCK": "CMYK"}  # else RGB
_STORED_AS = {"1": "L", "L": "L", "LA": "L"} | {
    mode: "RGB" for mode in ("P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr")
}
_BITS_PER_SAMPLE = 258  # the TIFF tag
_PNG_BITS = 24  # a byte of the first chunk, which has a fixed place


class BadImage(Exception):
    """An image that cannot be stored, and why."""


def png_bytes(image: np.ndarray) -> bytes:
    """A uint8 image [H, W] or [H, W, 3] as PNG: lossless."""
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, format="PNG", optimize=True)
    return buffer.getvalue()


@dataclass(frozen=True)
class ImageRules:
    """short_side: larger images are scaled down to it, 0: none. quality: of those that are JPEGs.
    max_pixels: an image that claims more is not decoded at all."""

    short_side: int = 0
    quality: int = 90
    max_pixels: int = 178_956_970


@dataclass(frozen=True)
class StoredImage:
    """`kind` is "jpeg" or "png"; `change` describes what was done to it, "" if nothing."""

    content: bytes
    kind: str
    height: int
    width: int
    channels: int
    change: str = ""


def stored_image(image: bytes | np.ndarray, rules: ImageRules) -> StoredImage:
    """The image as it goes into a shard, or BadImage."""
    if isinstance(image, np.ndarray):
        assert image.dtype == np.uint8 and image.shape[2:] in ((), (3,)), (image.dtype, image.shape)
        _require_size(image.shape[0], image.shape[1], rules)
        smaller = _scaled(Image.fromarray(image), rules) if rules.short_side else None
        return _stored_png(smaller, "scaled down") if smaller else _stored_png(image)
    if image.startswith(_JPEG_START):
        return _jpeg(image, rules)
    return _other(image, rules)


def _jpeg(content: bytes, rules: ImageRules) -> StoredImage:
    try:
        height, width, colours, _ = simplejpeg.decode_jpeg_header(content)
    except (ValueError, KeyError) as error:  # KeyError: colours or sampling without a name
        raise BadImage(f"its JPEG header cannot be read: {error}") from None
    _require_size(height, width, rules)
    content, pixels, change = _decoded_jpeg(content, _DECODED_AS.get(colours, "RGB"))
    if pixels.shape[2] == 4:
        with _pillow_without_limits():
            picture = Image.open(io.BytesIO(content)).convert("RGB")  # knows Adobe's inversion
        change = f"{colours} JPEG to RGB JPEG of quality {CMYK_QUALITY}"
    else:
        picture = Image.fromarray(pixels.squeeze(2) if pixels.shape[2] == 1 else pixels)
    if smaller := _scaled(picture, rules):
        return _stored_jpeg(smaller, rules.quality, "scaled down")
    if pixels.shape[2] == 4:
        return _stored_jpeg(picture, CMYK_QUALITY, change)
    return StoredImage(content, "jpeg", height, width, pixels.shape[2], change)


def _decoded_jpeg(content: bytes, colours: str) -> tuple[bytes, np.ndarray, str]:
    """(the JPEG, its pixels, what had to be changed so that the strict decoder takes it)"""
    try:
        return content, simplejpeg.decode_jpeg(content, colours), ""
    except ValueError as error:
        reason = str(error)
    if stray := _STRAY.fullmatch(reason):
        end = content.rindex(_JPEG_END)
        content = content[: end - int(stray[1])] + _JPEG_END
        try:
            pixels = simplejpeg.decode_jpeg(content, colours)
        except ValueError:
            pass
        else:
            return content, pixels, "stray bytes before a JPEG's end left out"
    raise BadImage(f"its JPEG data is damaged: {reason}")


def _other(content: bytes, rules: ImageRules) -> StoredImage:
    with _pillow_without_limits():
        try:
            image = Image.open(io.BytesIO(content), formats=FORMATS)
            _require_size(image.height, image.width, rules)
            _require_shallow(image, content)
            if image.format == "PNG" and (damage := png_damage(content)):
                raise BadImage(f"its PNG data is damaged: {damage}")
            plain = image.convert(_STORED_AS[image.mode])
        except Image.UnidentifiedImageError:
            raise BadImage(f"it is no JPEG, {', '.join(FORMATS)} image that can be read") from None
        except BadImage:
            raise
        except Exception as error:  # Pillow's decoders raise many kinds on broken bytes
            raise BadImage(f"it cannot be decoded: {reason_of(error)}") from None
    if smaller := _scaled(plain, rules):
        return _stored_png(smaller, "scaled down")
    transparent = " with a transparent colour" if "transparency" in image.info else ""
    eight_bits = image.format == "PNG" and content[_PNG_BITS] == 8
    if eight_bits and image.mode in ("L", "RGB") and not transparent:
        return _stored_png(plain, content=content)
    return _stored_png(plain, f"{image.mode} {image.format}{transparent} to {plain.mode} PNG")


def _require_size(height: int, width: int, rules: ImageRules) -> None:
    if height < 1 or width < 1:
        raise BadImage("it has no pixels")
    if height * width > rules.max_pixels:
        raise BadImage(f"it claims {height}×{width} pixels, above --max-pixels {rules.max_pixels}")
    if max(height, width) > LONGEST_SIDE:
        raise BadImage(f"it is {height}×{width}; a side can have {LONGEST_SIDE} pixels")


def _require_shallow(image: Image.Image, content: bytes) -> None:
    """More than 8 bits a channel would be cut off by Pillow, for some kinds silently."""
    bits = 8
    if image.format == "PNG":
        bits = content[_PNG_BITS]
    elif image.format == "TIFF":
        bits = max(image.tag_v2.get(_BITS_PER_SAMPLE, (1,)))  # type: ignore[attr-defined]
    if bits > 8:
        raise BadImage(f"it has {bits} bits a channel; make it 8 bits")
    if image.mode not in _STORED_AS:
        raise BadImage(f"its pixels are of the kind {image.mode}; make it RGB of 8 bits")


def _scaled(image: Image.Image, rules: ImageRules) -> Image.Image | None:
    """The image with its short side as the rules want it, None where it is no larger."""
    short = min(image.size)
    if not 0 < rules.short_side < short:
        return None
    width, height = (max(1, round(side * rules.short_side / short)) for side in image.size)
    return image.resize((width, height), Image.Resampling.LANCZOS)


def _stored_jpeg(image: Image.Image, quality: int, change: str) -> StoredImage:
    buffer = io.BytesIO()
    image.save(buffer, format="JPEG", quality=quality)
    channels = len(image.getbands())
    return StoredImage(buffer.getvalue(), "jpeg", image.height, image.width, channels, change)


def _stored_png(
    image: Image.Image | np.ndarray, change: str = "", content: bytes = b""
) -> StoredImage:
    pixels = np.asarray(image)
    height, width, channels = (*pixels.shape, 1)[:3]
    return StoredImage(content or png_bytes(pixels), "png", height, width, channels, change)


@contextmanager
def _pillow_without_limits() -> Iterator[None]:
    """--max-pixels replaces Pillow's limit. Its warnings are of broken metadata, which is not
    stored or not touched."""
    limit = Image.MAX_IMAGE_PIXELS
    Image.MAX_IMAGE_PIXELS = None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        Image.MAX_IMAGE_PIXELS = limit
