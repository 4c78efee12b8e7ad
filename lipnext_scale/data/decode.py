"""Encoded images to uint8 pixels: JPEG by libjpeg-turbo, PNG by OpenCV, nothing else; pixels to
[0, 1].

Damaged, oversized and unexpected images are refused with a reason, never decoded to half a picture.
"""

import io
import struct
import zlib

import cv2
import numpy as np
import simplejpeg
import torch
from PIL import Image
from torch import Tensor

from lipnext_scale.data.index import KINDS, Record

# More is no photograph but a decompression bomb; Pillow's own limit.
MAX_PIXELS = 178_956_970
_PNG_START = b"\x89PNG\r\n\x1a\n"
_PNG_GREY, _PNG_DEEP = 0, 16


def to_unit_range(
    images: Tensor, device: torch.device | str | None = None, dtype: torch.dtype | None = None
) -> Tensor:
    """Images in [0, 1] of a floating-point type, torch's default if None; uint8 is divided by 255.

    Every pixel is p / 255, correctly rounded, on every device: CUDA would multiply by 1 / 255 if
    the divisor were a Python number. Bytes go to the device, and become floating point there.
    """
    unit = images.to(device, non_blocking=True).to(dtype or torch.get_default_dtype())
    if images.dtype != torch.uint8:
        return unit
    return unit.div_(torch.full((), 255, dtype=unit.dtype, device=unit.device))


class BadSample(Exception):
    """A sample that cannot be used, and why."""


def image_header(encoded: bytes) -> tuple[str, int, int, int]:
    """(kind, height, width, channels) of a JPEG or PNG; channels: 1 for greyscale, else 3."""
    if _is_png(encoded):
        height, width, _, colour_type = _png_header(encoded)
        return "png", height, width, 1 if colour_type == _PNG_GREY else 3
    height, width, colours = _jpeg_header(encoded)
    return "jpeg", height, width, 1 if colours == "Gray" else 3


def decode(
    encoded: bytes, record: Record | None, channels: int = 0, at_least: int = 0
) -> np.ndarray:
    """Pixels [H, W, channels]; greyscale becomes RGB where 3 channels are wanted.

    record: None for an image file. channels: 0: as many as are stored.
    at_least: a JPEG whose sides are twice that or more may come out smaller, but not below;
    libjpeg-turbo then decodes a half, a quarter or an eighth of each side.
    """
    if record is not None and record.kind == KINDS["raw"]:
        return _raw(encoded, record, channels)
    channels = channels or image_header(encoded)[3]
    if _is_png(encoded):
        return _png(encoded, channels)
    return _jpeg(encoded, channels, at_least)


def _is_png(encoded: bytes) -> bool:
    """By its content: ImageNet has a PNG that is named .JPEG."""
    return encoded.startswith(_PNG_START)


def _raw(encoded: bytes, record: Record, channels: int) -> np.ndarray:
    height, width, depth = record.height, record.width, record.channels
    if len(encoded) != height * width * depth:
        raise BadSample(f"{len(encoded)} bytes are not {depth}×{height}×{width} pixels")
    if channels == 1 < depth:
        raise _in_colour()
    pixels = np.frombuffer(encoded, dtype=np.uint8).reshape(height, width, depth)
    return pixels if depth == (channels or depth) else np.repeat(pixels, channels, axis=2)


def _jpeg_header(encoded: bytes) -> tuple[int, int, str]:
    try:
        height, width, colours, _ = simplejpeg.decode_jpeg_header(encoded, strict=False)
    except ValueError as error:
        raise BadSample(f"is neither a JPEG nor a PNG: {error}") from None
    except KeyError:  # simplejpeg has no name for colours that it did not get to read
        raise BadSample("is a damaged JPEG: its header is cut off") from None
    _require_sane(height, width)
    return height, width, colours


def _jpeg(encoded: bytes, channels: int, at_least: int) -> np.ndarray:
    height, width, colours = _jpeg_header(encoded)
    if channels == 1 and colours != "Gray":
        raise _in_colour()
    try:
        if colours in ("CMYK", "YCCK"):  # rare; Pillow knows Adobe's inversion
            return np.asarray(Image.open(io.BytesIO(encoded)).convert("RGB"))
        wanted = "GRAY" if channels == 1 else "RGB"
        if not at_least or min(height, width) < 2 * at_least:
            return simplejpeg.decode_jpeg(encoded, wanted)
        return simplejpeg.decode_jpeg(
            encoded, wanted, min_height=at_least, min_width=at_least, min_factor=2
        )
    except (ValueError, OSError, SyntaxError) as error:
        raise BadSample(f"is a damaged JPEG: {error}") from None


def _png_header(encoded: bytes) -> tuple[int, int, int, int]:
    """(height, width, bits, colour type)"""
    if encoded[12:16] != b"IHDR" or len(encoded) < 33:
        raise BadSample("is a damaged PNG: it is cut off")
    width, height, bits, colours = struct.unpack(">IIBB", encoded[16:26])
    _require_sane(height, width)
    return height, width, bits, colours


def _png(encoded: bytes, channels: int) -> np.ndarray:
    _, _, bits, colours = _png_header(encoded)
    if bits == _PNG_DEEP:
        raise BadSample("its pixels have more than 8 bits")
    if channels == 1 and colours != _PNG_GREY:
        raise _in_colour()
    if damage := png_damage(encoded):  # libpng would complain on stderr in words of its own
        raise BadSample(f"is a damaged PNG: {damage}")
    how = cv2.IMREAD_GRAYSCALE if channels == 1 else cv2.IMREAD_COLOR_RGB
    how |= cv2.IMREAD_IGNORE_ORIENTATION  # as with JPEGs: pixels as they are stored
    pixels = cv2.imdecode(np.frombuffer(encoded, dtype=np.uint8), how)
    if pixels is None:
        raise BadSample("is a damaged PNG")
    return pixels[:, :, None] if channels == 1 else pixels


def png_damage(encoded: bytes) -> str:
    """What is wrong with the chunks of a PNG, "" if each has its checksum and the last is there."""
    place = len(_PNG_START)
    while place + 12 <= len(encoded):
        (length,) = struct.unpack_from(">I", encoded, place)
        end = place + 8 + length
        if end + 4 > len(encoded):
            break
        if zlib.crc32(encoded[place + 4 : end]) != struct.unpack_from(">I", encoded, end)[0]:
            return "a checksum differs"
        if encoded[place + 4 : place + 8] == b"IEND":
            return ""
        place = end + 4
    return "it is cut off"


def _require_sane(height: int, width: int) -> None:
    if height < 1 or width < 1 or height * width > MAX_PIXELS:
        raise BadSample(f"says it has {height}×{width} pixels; at most {MAX_PIXELS:,} are decoded")


def _in_colour() -> BadSample:
    return BadSample("is in colour, and the model takes one channel")
