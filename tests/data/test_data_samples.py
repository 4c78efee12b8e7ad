"""Reading shards: what is decoded, and what is refused by the shard's and the sample's name."""

import gzip

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from shard_making import encode, noise, png_with, sample, tar_bytes, write_tar

from lipnext_scale.data import read_samples, resolve_shards
from lipnext_scale.utils.config import ConfigError
from lipnext_scale.utils.errors import UserError

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


def test_other_png_modes(tmp_path):
    """RGBA loses its alpha and keeps its colours; one bit is black and white; palettes are RGB."""
    pixels = noise(6, 6, 4)
    cases = {"RGBA": encode(pixels)} | {m: encode(noise(6, 6), mode=m) for m in ("1", "P", "LA")}
    images = {}
    for mode, image in cases.items():
        path = write_tar(tmp_path / f"{mode}.tar", sample("a", image))
        images[mode] = read_samples(path, "data.train").images[0]
    assert np.array_equal(images["RGBA"].numpy(), pixels[:, :, :3].transpose(2, 0, 1))
    assert images["1"].shape == (1, 6, 6) and set(images["1"].unique().tolist()) == {0, 255}
    assert images["P"].shape == images["LA"].shape == (3, 6, 6)


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


# --- what is refused --------------------------------------------------------------------------

IMAGE, JPEG = encode(noise(4, 4)), encode(noise(64, 64), "jpeg")


def flipped(content: bytes, place: int) -> bytes:
    return content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]


BROKEN = {
    "no bytes": (sample("bad", b""), "is neither a JPEG nor a PNG"),
    "only a header": (sample("bad", IMAGE[:20]), "is a damaged PNG: it is cut off"),
    "only a JPEG header": (sample("bad", JPEG[:30], kind="jpg"), "is a damaged JPEG: its header"),
    "JPEG cut off": (sample("bad", JPEG[:-50], kind="jpg"), "is a damaged JPEG"),
    "image cut off": (sample("bad", IMAGE[:-20]), "is a damaged PNG: it is cut off"),
    "image changed": (sample("bad", flipped(IMAGE, 50)), "is a damaged PNG: a checksum differs"),
    "image of noise": (sample("bad", bytes(100)), "is neither a JPEG nor a PNG"),
    "a bomb": (
        sample("bad", png_with(100_000, 100_000, 8, 0, bytes(10))),
        "says it has 100000×100000 pixels",
    ),
    "16 bits": (sample("bad", encode(noise(4, 4).astype(np.uint16) * 200)), "more than 8 bits"),
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


@settings(max_examples=100, deadline=None)
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


INTACT = tar_bytes([m for i in range(4) for m in sample(f"k{i}", encode(noise(6, 6, seed=i)), i)])


@settings(max_examples=100, deadline=None)
@given(place=st.integers(0, 10**6), bit=st.integers(-1, 7))
def test_a_damaged_compressed_shard(tmp_path_factory, place, bit):
    """gzip's checksum is looked at: a flipped bit is an error, or the content is the same; a cut
    (bit -1) is an error."""
    content = bytearray(gzip.compress(INTACT, mtime=0))
    place %= len(content)
    if bit < 0:
        del content[place:]
    else:
        content[place] ^= 1 << bit
    path = tmp_path_factory.getbasetemp() / "damaged.tar.gz"
    path.write_bytes(content)
    try:
        samples = read_samples(str(path), "data.train")
    except UserError as error:
        assert str(error).startswith(f"{path}: ")
    else:
        assert bit >= 0 and samples.keys == ["k0", "k1", "k2", "k3"]
        expected = np.stack([noise(6, 6, seed=i) for i in range(4)])
        assert np.array_equal(samples.images[:, 0].numpy(), expected)


# --- patterns and limits ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "pattern", ["none-*.tar", "a{0..1}.tar", "{a0,}.tar", "{a", "", "builtin:none.tar"]
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


def test_memory_limit_is_that_of_the_decoded_images(tmp_path):
    """4×4 greyscale images are 16 bytes each."""
    path = write_tar(tmp_path / "a.tar", [m for i in range(3) for m in sample(f"k{i}", IMAGE)])
    assert len(read_samples(path, "data.train", 48 / 1e9)) == 3
    with pytest.raises(ConfigError, match="takes more than data.memory_limit_gb"):
        read_samples(path, "data.train", 47 / 1e9)
