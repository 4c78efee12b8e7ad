"""What is stored of an image: its own bytes, or exactly its pixels, or a reason why not."""

import io

import numpy as np
import pytest
import simplejpeg
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from prep_sources import decoded, encoded, noise, png_with, smooth

from data_prep.writing.encoding import BadImage, ImageRules, stored_image
from lipnext_scale.data.decode import decode
from lipnext_scale.data.index import KINDS

RULES = ImageRules()
COLOUR, GREY = smooth(20, 30), smooth(20, 30)[:, :, 0]

# --- bytes that stay --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "content",
    [
        encoded(COLOUR, "JPEG"),
        encoded(COLOUR, "JPEG", progressive=True),
        encoded(COLOUR, "JPEG", subsampling="4:4:4"),
        encoded(COLOUR, "JPEG", keep_rgb=True),
        encoded(GREY, "JPEG"),
        encoded(COLOUR),
        encoded(GREY),
    ],
    ids=["jpeg", "progressive", "444", "rgb jpeg", "grey jpeg", "png", "grey png"],
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
    pixels = decode(content, KINDS[stored.kind], channels, shape)
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
    """Exactly the pixels that Pillow sees in them, told as a change."""
    stored = stored_image(content, RULES)
    assert stored.kind == "png" and stored.content != content and stored.change
    pixels = decoded(stored.content)
    with Image.open(io.BytesIO(content)) as image:
        seen = np.asarray(image.convert("RGB" if stored.channels == 3 else "L"))
    assert np.array_equal(pixels, seen) and pixels.dtype == np.uint8
    if expected is not None:
        assert np.array_equal(pixels, expected)
    assert stored_image(stored.content, RULES).content == stored.content


def test_only_the_first_frame_of_several():
    """An animation is its first picture."""
    frames = [Image.fromarray(np.full((6, 6, 3), value, np.uint8)) for value in (10, 200)]
    buffer = io.BytesIO()
    frames[0].save(buffer, "GIF", save_all=True, append_images=frames[1:])
    assert (decoded(stored_image(buffer.getvalue(), RULES).content) == 10).all()


@pytest.mark.parametrize("shape", [(7, 5), (7, 5, 3)])
def test_pixels_become_png(shape):
    """Arrays are stored to the bit, grey ones with one channel."""
    stored = stored_image(noise(*shape), RULES)
    assert np.array_equal(decoded(stored.content), noise(*shape))
    assert (stored.height, stored.width, stored.channels) == (*shape, 1)[:3]


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


def test_scaling_is_lanczos_and_quality_counts():
    """The pixels are Pillow's own of that filter; a lower quality has fewer bytes."""
    pixels = noise(40, 60, 3)
    stored = stored_image(pixels, ImageRules(short_side=20))
    wanted = Image.fromarray(pixels).resize((30, 20), Image.Resampling.LANCZOS)
    assert np.array_equal(decoded(stored.content), np.asarray(wanted))
    jpeg = encoded(pixels, "JPEG", quality=95)
    sizes = [
        len(stored_image(jpeg, ImageRules(short_side=20, quality=quality)).content)
        for quality in (30, 90)
    ]
    assert sizes[0] < sizes[1] and stored_image(jpeg, ImageRules(quality=30)).content == jpeg


# --- bad images -------------------------------------------------------------------------------


def deep_tiff() -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(noise(4, 4).astype(np.uint16)).save(buffer, "TIFF")
    return buffer.getvalue()


BAD = {
    "nothing": (b"", "it is no JPEG"),
    "text": (b"hello", "it is no JPEG"),
    "a PNG of 16 bits": (png_with(1, 1, 16, 0, bytes(3)), "16 bits a channel"),
    "a colour PNG of 16 bits": (png_with(1, 1, 16, 2, bytes(7)), "16 bits a channel"),
    "a TIFF of 16 bits": (deep_tiff(), "16 bits a channel"),
    "a TIFF of floats": (encoded(noise(4, 4), "TIFF", "F"), "32 bits a channel"),
    "a JPEG of a header": (encoded(COLOUR, "JPEG")[:40], "JPEG header"),
    "half a JPEG": (encoded(COLOUR, "JPEG")[:-60], "Premature end"),
    "a JPEG without its end": (encoded(COLOUR, "JPEG")[:-2], "Premature end"),
    "half a PNG": (encoded(noise(20, 20))[:200], "cut off"),
    "a PNG without its end": (encoded(noise(20, 20))[:-12], "cut off"),
    "half a WebP": (encoded(COLOUR, "WEBP")[:60], "it (is no JPEG|cannot be decoded)"),
    "a bomb": (png_with(100_000, 100_000, 8, 0, bytes(10)), "10000000000|100000×100000"),
    "a long bomb": (png_with(178_956_971, 1, 8, 0, bytes(10)), "above --max-pixels"),
    "a side too long": (png_with(65_536, 1, 8, 0, bytes(65_537)), "a side can have 65535"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_images_have_a_reason(name):
    """Truncated, too deep, too large, or no image at all: refused in a line that says which."""
    content, reason = BAD[name]
    with pytest.raises(BadImage, match=reason) as error:
        stored_image(content, RULES)
    assert "\n" not in str(error.value) and " at 0x" not in str(error.value)


def test_pixels_are_counted_before_they_are_decoded():
    """A picture at the limit passes, one pixel more does not, in every format."""
    for kind in ("JPEG", "PNG", "WEBP", "BMP"):
        content = encoded(COLOUR, kind)
        assert stored_image(content, ImageRules(max_pixels=600)).width == 30
        with pytest.raises(BadImage, match="20×30 pixels, above --max-pixels 599"):
            stored_image(content, ImageRules(max_pixels=599))


def test_pillow_is_left_as_it_was():
    """The limit that other parts of a program rely on is back, after errors too."""
    limit = Image.MAX_IMAGE_PIXELS
    for content, _ in BAD.values():
        with pytest.raises(BadImage):
            stored_image(content, RULES)
    assert Image.MAX_IMAGE_PIXELS == limit and limit is not None


@settings(max_examples=150, deadline=None)
@given(
    kind=st.sampled_from(["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF"]),
    changes=st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), max_size=4),
    cut=st.integers(0, 10**6) | st.none(),
)
def test_damaged_files_are_bad_or_readable(kind, changes, cut):
    """Whatever the bytes, the outcome is a reason or an image of the size that is told of it."""
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
