"""Reading shards: what is decoded, and what is refused by the shard's and the sample's name."""

import gzip
import os
import pickle
import struct
import zlib

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from shard_making import encode, noise, tar_bytes, write_tar

from lipnext_scale.config import ConfigError
from lipnext_scale.data import read_samples, resolve_shards
from lipnext_scale.errors import UserError


def sample(key: str, image: bytes, label: object = 0, kind: str = "png") -> list:
    return [(f"{key}.cls", str(label).encode()), (f"{key}.{kind}", image)]


# --- decoding ---------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", ["tar", "tar.gz"])
@pytest.mark.parametrize("shape", [(7, 7), (7, 7, 3)], ids=["greyscale", "RGB"])
def test_png_is_exact(tmp_path, suffix, shape):
    """Greyscale stays one channel, RGB three; pixels, labels, keys and order are the shard's."""
    images = [noise(*shape, seed=i) for i in range(3)]
    members = [m for i in (2, 0, 1) for m in sample(f"k{i}", encode(images[i]), 10 * i)]
    samples = read_samples(write_tar(tmp_path / f"a.{suffix}", members), "data.train")
    assert samples.keys == ["k2", "k0", "k1"] and samples.labels.tolist() == [20, 0, 10]
    assert samples.images.dtype == torch.uint8 and samples.labels.dtype == torch.int64
    expected = np.stack([images[i].reshape(7, 7, -1).transpose(2, 0, 1) for i in (2, 0, 1)])
    assert np.array_equal(samples.images.numpy(), expected)
    assert samples.images.is_contiguous()


def test_rgba_loses_its_alpha_and_keeps_its_colours(tmp_path):
    """Four channels become the first three, whatever the transparency."""
    pixels = noise(6, 6, 4)
    path = write_tar(tmp_path / "a.tar", sample("a", encode(pixels)))
    images = read_samples(path, "data.train").images
    assert np.array_equal(images[0].numpy(), pixels[:, :, :3].transpose(2, 0, 1))


def test_one_bit_images_are_black_and_white(tmp_path):
    """Greyscale with two values, 0 and 255."""
    path = write_tar(tmp_path / "a.tar", sample("a", encode(noise(6, 6), mode="1")))
    images = read_samples(path, "data.train").images
    assert images.shape == (1, 1, 6, 6) and set(images.unique().tolist()) == {0, 255}


@pytest.mark.parametrize("mode", ["P", "LA"])
def test_other_png_modes_become_rgb(tmp_path, mode):
    """Palettes and the like are three channels, as Pillow converts them."""
    path = write_tar(tmp_path / "a.tar", sample("a", encode(noise(6, 6), mode=mode)))
    assert read_samples(path, "data.train").images.shape == (1, 3, 6, 6)


@pytest.mark.parametrize("kind", ["jpg", "jpeg", "JPEG"])
@pytest.mark.parametrize("mode, channels", [("L", 1), ("RGB", 3)])
def test_jpeg(tmp_path, kind, mode, channels):
    """JPEGs are decoded by either suffix in any case; a flat one exactly, up to its rounding."""
    pixels = np.full((16, 16), 77, dtype=np.uint8)
    members = sample("a", encode(pixels, "jpeg", mode), 3, kind)
    samples = read_samples(write_tar(tmp_path / "a.tar", members), "data.train")
    assert samples.images.shape == (1, channels, 16, 16) and samples.labels.tolist() == [3]
    assert (samples.images.int() - 77).abs().max() <= 1


def test_what_an_image_is_decides_not_its_name(tmp_path):
    """ImageNet has a PNG that is named .JPEG."""
    members = sample("a", encode(noise(4, 4)), kind="jpg")
    members += sample("b", encode(np.full((4, 4), 9, np.uint8), "jpeg"), kind="png")
    images = read_samples(write_tar(tmp_path / "a.tar", members), "data.train").images
    assert np.array_equal(images[0, 0].numpy(), noise(4, 4)) and (images[1] == 9).all()


def test_several_shards_in_the_order_of_the_pattern(tmp_path):
    """Braces keep their order, wildcards sort; the same key in two shards is two samples."""
    for name in "abc":
        write_tar(tmp_path / f"{name}.tar", sample("k", encode(noise(4, 4)), ord(name)))
    for pattern, labels in (("{c,a}", "ca"), ("*", "abc"), ("[bc]", "bc"), ("{b,*}", "babc")):
        samples = read_samples(f"{tmp_path}/{pattern}.tar", "data.train")
        assert samples.labels.tolist() == [ord(name) for name in labels]


def test_a_process_of_many_reads_everything(tmp_path, monkeypatch):
    """Under torchrun's environment a set held in memory is still the whole set on every rank."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    members = sample("a", encode(noise(4, 4))) + sample("b", encode(noise(4, 4)))
    assert read_samples(write_tar(tmp_path / "a.tar", members), "data.train").keys == ["a", "b"]


# --- what is never decoded --------------------------------------------------------------------


class MakesDirectory:
    """Unpickled, it makes a directory."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


@pytest.mark.parametrize("suffix", ["pyd", "pickle", "pkl", "pth", "npy", "cls.pyd", "png.pyd"])
def test_pickles_are_never_opened(tmp_path, suffix):
    """Members that WebDataset's own decoders would unpickle are left alone; the sample is read."""
    code = pickle.dumps(MakesDirectory(str(tmp_path / "made")))
    members = [(f"a.{suffix}", code), *sample("a", encode(noise(4, 4)), 5)]
    assert read_samples(write_tar(tmp_path / "a.tar", members), "data.train").labels.tolist() == [5]
    assert not (tmp_path / "made").exists()


def test_a_pickle_in_place_of_the_label_or_the_image(tmp_path):
    """Under the names that are decoded it is an error, and still not opened."""
    code = pickle.dumps(MakesDirectory(str(tmp_path / "made")))
    for members in ([("a.cls", code), ("a.png", encode(noise(4, 4)))], sample("a", code)):
        with pytest.raises(
            UserError, match="a.tar: sample a (cannot be decoded|is neither a JPEG nor a PNG)"
        ):
            read_samples(write_tar(tmp_path / "a.tar", members), "data.train")
    assert not (tmp_path / "made").exists()


# --- what is refused --------------------------------------------------------------------------

IMAGE, JPEG = encode(noise(4, 4)), encode(noise(64, 64), "jpeg")


def flipped(content: bytes, place: int) -> bytes:
    return content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]


def bomb() -> bytes:
    """A PNG whose header promises ten thousand million pixels."""
    header = struct.pack(">IIBBBBB", 100_000, 100_000, 8, 0, 0, 0, 0)
    chunk = b"IHDR" + header
    return IMAGE[:12] + chunk + struct.pack(">I", zlib.crc32(chunk)) + IMAGE[33:]


BROKEN = {
    "no label": ([("bad.png", IMAGE)], "needs a .cls and an image"),
    "no image": ([("bad.cls", b"1")], "needs a .cls and an image"),
    "no known image": (sample("bad", IMAGE, kind="webp"), "needs a .cls and an image"),
    "no image at all": (sample("bad", b""), "is neither a JPEG nor a PNG"),
    "only a header": (sample("bad", IMAGE[:20]), "is a damaged PNG: it is cut off"),
    "only a JPEG header": (sample("bad", JPEG[:30], kind="jpg"), "is a damaged JPEG: its header"),
    "JPEG cut off": (sample("bad", JPEG[:-50], kind="jpg"), "is a damaged JPEG"),
    "image cut off": (sample("bad", IMAGE[:-20]), "is a damaged PNG: it is cut off"),
    "image changed": (sample("bad", flipped(IMAGE, 50)), "is a damaged PNG: a checksum differs"),
    "image of noise": (sample("bad", bytes(100)), "is neither a JPEG nor a PNG"),
    "a bomb": (sample("bad", bomb()), "says it has 100000×100000 pixels"),
    "16 bits": (sample("bad", encode(noise(4, 4).astype(np.uint16) * 200)), "more than 8 bits"),
    "label is no number": (sample("bad", IMAGE, "cat"), "cannot be decoded"),
    "label is a fraction": (sample("bad", IMAGE, "1.5"), "cannot be decoded"),
    "label is empty": (sample("bad", IMAGE, ""), "cannot be decoded"),
    "label too large": (sample("bad", IMAGE, 2**31), "beyond 32 bits"),
    "another height": (sample("bad", encode(noise(5, 4))), "is 1×5×4, and the model takes 4×4"),
    "another depth": (sample("bad", encode(noise(4, 4, 3))), "is in colour"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_sample_is_named(tmp_path, name):
    """The error names the shard, the sample's key and what is wrong, in one line."""
    members, message = BROKEN[name]
    write_tar(tmp_path / "one.tar", sample("good", IMAGE))
    write_tar(tmp_path / "two.tar", sample("good", IMAGE) + members)
    with pytest.raises(UserError, match=f"two.tar: sample bad .*{message}") as error:
        read_samples(f"{tmp_path}/*.tar", "data.train")
    assert "\n" not in str(error.value)


@settings(max_examples=200, deadline=None)
@given(
    changes=st.lists(st.tuples(st.integers(0, 999), st.integers(0, 255)), min_size=1, max_size=4),
    kind=st.sampled_from(["png", "jpeg"]),
    mode=st.sampled_from(["L", "RGB"]),
)
def test_damaged_images_never_crash(tmp_path_factory, changes, kind, mode):
    """Whatever bytes an image has, it is decoded or refused by name, never anything else."""
    content = bytearray(encode(noise(8, 8), kind, mode))
    for place, value in changes:
        content[place % len(content)] = value
    path = write_tar(tmp_path_factory.getbasetemp() / "damaged.tar", sample("k", bytes(content)))
    try:
        assert len(read_samples(path, "data.train", limit_gb=0.1)) == 1
    except UserError as error:
        assert str(error).startswith(f"data.train: {path}: sample k "), error


def test_a_file_given_twice_in_a_sample(tmp_path):
    """Two labels for one key are no choice to make silently."""
    members = [("a.cls", b"1"), *sample("a", IMAGE)]
    with pytest.raises(UserError, match="a.tar: is not a readable shard: .*duplicate"):
        read_samples(write_tar(tmp_path / "a.tar", members), "data.train")


# --- shards that are not whole ----------------------------------------------------------------

WHOLE = tar_bytes([m for i in range(4) for m in sample(f"k{i}", encode(noise(6, 6, seed=i)), i)])


@settings(max_examples=150, deadline=None)
@given(cut=st.integers(0, len(WHOLE) - 1), packed=st.booleans())
def test_a_shard_cut_anywhere_is_refused_or_whole(tmp_path_factory, cut, packed):
    """No cut loses samples silently: tarfile alone takes one between two files for the end."""
    content = gzip.compress(WHOLE, mtime=0) if packed else WHOLE
    cut = cut % len(content)
    path = tmp_path_factory.getbasetemp() / "cut.tar"
    path.write_bytes(content[:cut])
    try:
        samples = read_samples(str(path), "data.train")
    except UserError as error:
        assert str(error).startswith(f"{path}: is not a readable shard: ")
        assert "\n" not in str(error)
    else:
        assert samples.labels.tolist() == [0, 1, 2, 3]
        assert not packed and not any(content[cut:])  # only of the padding at the end


@settings(max_examples=150, deadline=None)
@given(place=st.integers(0, 10**6), bit=st.integers(0, 7))
def test_a_bit_flipped_in_a_compressed_shard(tmp_path_factory, place, bit):
    """gzip's checksum is looked at: a flipped bit is an error, or the content is the same."""
    content = bytearray(gzip.compress(WHOLE, mtime=0))
    place %= len(content)
    content[place] ^= 1 << bit
    path = tmp_path_factory.getbasetemp() / "flipped.tar.gz"
    path.write_bytes(content)
    try:
        samples = read_samples(str(path), "data.train")
    except UserError as error:
        assert str(error).startswith(f"{path}: ")
    else:
        assert samples.labels.tolist() == [0, 1, 2, 3] and samples.keys == ["k0", "k1", "k2", "k3"]
        expected = np.stack([noise(6, 6, seed=i) for i in range(4)])
        assert np.array_equal(samples.images[:, 0].numpy(), expected)


# --- patterns and limits ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "pattern", ["none.tar", "none-*.tar", "a{0..1}.tar", "{a0,}.tar", "{a", "", "builtin:none.tar"]
)
def test_patterns_without_files(tmp_path, monkeypatch, pattern):
    """The key and the pattern as it was written are named, also if only one of its files lacks."""
    monkeypatch.chdir(tmp_path)
    write_tar(tmp_path / "a0.tar", sample("a", IMAGE))
    with pytest.raises(ConfigError) as error:
        resolve_shards(pattern, "data.test")
    assert str(error.value).startswith(f"data.test = {pattern!r}: ")


def test_shards_without_samples(tmp_path):
    """An empty tar, or one of files that belong to no sample, holds nothing to train on."""
    for members in ([], [("README", b"hello")]):
        with pytest.raises(ConfigError, match="^data.train = .*the shards hold no samples"):
            read_samples(write_tar(tmp_path / "a.tar", members), "data.train")


@given(count=st.integers(1, 4), limit=st.integers(1, 200))
@settings(max_examples=20, deadline=None)
def test_memory_limit_is_that_of_the_decoded_images(tmp_path_factory, count, limit):
    """4×4 greyscale images are 16 bytes each: just as many as fit are let in."""
    path = tmp_path_factory.getbasetemp() / "limit.tar"
    write_tar(path, [m for i in range(count) for m in sample(f"k{i}", IMAGE)])
    if 16 * count <= limit:
        assert len(read_samples(str(path), "data.train", limit / 1e9)) == count
    else:
        with pytest.raises(ConfigError, match="takes more than data.memory_limit_gb"):
            read_samples(str(path), "data.train", limit / 1e9)
