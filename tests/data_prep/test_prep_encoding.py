"""What is stored of an image: its own bytes, or exactly its pixels, or a reason why not."""

import io

import numpy as np
import pytest
import simplejpeg
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from prep_sources import decoded, encoded, noise, smooth
from shard_making import png_with

from data_prep.encoding import BadImage, ImageRules, stored_image
from lipnext_scale.data.decode import decode
from lipnext_scale.data.index import KINDS, Record

RULES = ImageRules()
COLOUR, GREY = smooth(20, 30), smooth(20, 30)[:, :, 0]

# --- bytes that stay --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "content",
    [
        encoded(COLOUR, "JPEG"),
        encoded(COLOUR, "JPEG", progressive=True),
        encoded(COLOUR, "JPEG", keep_rgb=True),
        encoded(GREY, "JPEG"),
        encoded(COLOUR),
        encoded(GREY),
    ],
    ids=["jpeg", "progressive", "rgb jpeg", "grey jpeg", "png", "grey png"],
)
def test_plain_files_keep_their_bytes(content):
    """Whatever training can read as it is goes in as it is, with its true size and channels."""
    stored = stored_image(content, RULES)
    assert stored.content == content and stored.change == ""
    shape = decoded(content).shape
    assert (stored.height, stored.width, stored.channels) == (*shape, 1)[:3]
    assert stored.kind == ("png" if content[:4] == b"\x89PNG" else "jpeg")


@pytest.mark.parametrize("picture", [COLOUR, GREY], ids=["colour", "grey"])
@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_exif_orientation_is_left_alone(kind, picture):
    """The bytes stay, with their note that the picture lies on its side, and so does the picture
    when training decodes it."""
    exif = Image.Exif()
    exif[0x0112] = 6
    content = encoded(picture, kind, exif=exif)
    stored = stored_image(content, RULES)
    assert stored.content == content and (stored.height, stored.width) == picture.shape[:2]
    channels = 1 if picture is GREY else 3
    shape = (stored.height, stored.width, channels)
    record = Record(0, len(content), 0, *shape, KINDS[stored.kind], 0)
    pixels = decode(content, record)
    assert pixels.shape == shape
    if kind == "PNG":
        assert np.array_equal(pixels, picture.reshape(shape))


# --- files that are changed -------------------------------------------------------------------


@pytest.mark.parametrize(
    "content, expected",
    [
        (encoded(COLOUR, "PNG", "P"), None),
        (encoded(COLOUR, "PNG", "RGBA"), COLOUR),
        (encoded(COLOUR, "PNG", transparency=(1, 2, 3)), COLOUR),
        (encoded(GREY, "PNG", "LA"), GREY),
        (encoded(GREY, "PNG", "1"), None),
        (encoded(COLOUR, "WEBP", lossless=True), COLOUR),
        (encoded(COLOUR, "BMP"), COLOUR),
        (encoded(COLOUR, "TIFF"), COLOUR),
        (encoded(COLOUR, "GIF"), None),
    ],
    ids=["palette", "alpha", "tRNS", "grey alpha", "1 bit", "webp", "bmp", "tiff", "gif"],
)
def test_other_lossless_files_become_png(content, expected):
    """Exactly the pixels that Pillow sees in them, reported as a change."""
    stored = stored_image(content, RULES)
    assert stored.kind == "png" and stored.content != content and stored.change
    pixels = decoded(stored.content)
    with Image.open(io.BytesIO(content)) as image:
        seen = np.asarray(image.convert("RGB" if stored.channels == 3 else "L"))
    assert np.array_equal(pixels, seen) and pixels.dtype == np.uint8
    if expected is not None:
        assert np.array_equal(pixels, expected)
    assert stored_image(stored.content, RULES).content == stored.content


def test_cmyk_becomes_rgb_and_looks_the_same():
    """A CMYK JPEG, as 22 files of ImageNet are, is near the picture it was made of."""
    content = encoded(COLOUR, "JPEG", "CMYK", quality=95)
    stored = stored_image(content, RULES)
    assert stored.kind == "jpeg" and "CMYK" in stored.change and stored.channels == 3
    assert simplejpeg.decode_jpeg_header(stored.content)[2] == "YCbCr"
    assert np.abs(decoded(stored.content).astype(int) - COLOUR).mean() < 6


def test_stray_bytes_before_the_end_are_left_out():
    """Two files of ImageNet have one; without it the strict decoder takes them. Pixels stay."""
    good = encoded(COLOUR, "JPEG")
    odd = good[:-2] + b"\x7f\x7f" + good[-2:]
    with pytest.raises(ValueError, match="extraneous"):
        simplejpeg.decode_jpeg(odd)
    stored = stored_image(odd, RULES)
    assert "stray" in stored.change
    assert np.array_equal(simplejpeg.decode_jpeg(stored.content), simplejpeg.decode_jpeg(good))


# --- scaling ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "pixels"])
@settings(max_examples=25, deadline=None)
@given(st.integers(1, 60), st.integers(1, 60), st.integers(1, 60))
def test_short_side(kind, height, width, short):
    """Only ever downwards: the short side is what was asked for, the long one in proportion."""
    pixels = smooth(height, width)
    content = pixels if kind == "pixels" else encoded(pixels, kind)
    stored = stored_image(content, ImageRules(short_side=short))
    if min(height, width) <= short:
        assert (stored.height, stored.width) == (height, width)
        assert kind == "pixels" or stored.content == content
    else:
        assert min(stored.height, stored.width) == short
        ratio = short / min(height, width)
        assert abs(max(stored.height, stored.width) - max(height, width) * ratio) <= 0.5
        assert stored.change == "scaled down"
    assert decoded(stored.content).shape == (stored.height, stored.width, 3)
    assert stored.kind == ("jpeg" if kind == "JPEG" else "png")


# --- bad images -------------------------------------------------------------------------------


BAD = {
    "nothing": (b"", "it is no JPEG"),
    "text": (b"hello", "it is no JPEG"),
    "a PNG of 16 bits": (png_with(1, 1, 16, 0, bytes(3)), "16 bits a channel"),
    "a TIFF of 16 bits": (encoded(noise(4, 4).astype(np.uint16), "TIFF"), "16 bits a channel"),
    "a TIFF of floats": (encoded(noise(4, 4), "TIFF", "F"), "32 bits a channel"),
    "a JPEG of a header": (encoded(COLOUR, "JPEG")[:40], "JPEG header"),
    "half a WebP": (encoded(COLOUR, "WEBP")[:60], "it (is no JPEG|cannot be decoded)"),
    "a bomb": (png_with(100_000, 100_000, 8, 0, bytes(10)), "10000000000|100000×100000"),
    "a long bomb": (png_with(178_956_971, 1, 8, 0, bytes(10)), "above --max-pixels"),
    "a side too long": (png_with(65_536, 1, 8, 0, bytes(65_537)), "a side can have 65535"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_images_have_a_reason(name):
    """Truncated, too deep, too large, or no image at all: refused in a line that says which.
    Pillow's limit, which other parts of a program rely on, is back afterwards."""
    content, reason = BAD[name]
    limit = Image.MAX_IMAGE_PIXELS
    with pytest.raises(BadImage, match=reason) as error:
        stored_image(content, RULES)
    assert "\n" not in str(error.value) and " at 0x" not in str(error.value)
    assert Image.MAX_IMAGE_PIXELS == limit is not None


@settings(max_examples=150, deadline=None)
@given(
    kind=st.sampled_from(["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF"]),
    changes=st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), max_size=4),
    cut=st.integers(0, 10**6) | st.none(),
)
def test_damaged_files_are_bad_or_readable(kind, changes, cut):
    """Whatever the bytes, the outcome is a reason or an image of the reported size."""
    content = bytearray(encoded(smooth(9, 11), kind))
    for place, value in changes:
        content[place % len(content)] = value
    content = bytes(content if cut is None else content[: cut % len(content)])
    try:
        stored = stored_image(content, ImageRules(max_pixels=10**6))
    except BadImage as error:
        assert str(error) and "\n" not in str(error)
    else:
        assert decoded(stored.content).shape[:2] == (stored.height, stored.width)


@settings(max_examples=60, deadline=None)
@given(kind=st.sampled_from(["JPEG", "PNG"]), cut=st.integers(1, 10**6))
def test_a_cut_is_always_found(kind, cut):
    """A JPEG or PNG that lost any number of bytes at its end is never taken."""
    content = encoded(smooth(24, 24), kind)
    with pytest.raises(BadImage):
        stored_image(content[: -(cut % len(content)) or -1], RULES)
