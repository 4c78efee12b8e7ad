"""The digits that ship with the package, and the command that wrote them."""

import gzip
from pathlib import Path

import numpy as np
import pytest
import torch

from data_prep import digits
from lipnext_scale.data import Samples, read_samples
from lipnext_scale.data.catalog import BUILTIN

NAMES = ("train-000000.tar.gz", "test-000000.tar.gz")


@pytest.fixture(scope="module")
def shipped() -> dict[str, Samples]:
    return {
        part: read_samples(f"builtin:digits/{part}-*.tar.gz", "data.train")
        for part in ("train", "test")
    }


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("digits") / "new" / "digits"
    digits.main(["--out", str(out)])
    return out


def test_the_command_writes_what_is_shipped(shipped, written):
    """Keys, labels and pixels of freshly written shards are those of the package, in their order.

    Not the bytes: another zlib may pack the same pixels otherwise.
    """
    for part, old in shipped.items():
        fresh = read_samples(f"{written}/{part}-*.tar.gz", "data.train")
        assert fresh.keys == old.keys
        assert torch.equal(fresh.labels, old.labels) and torch.equal(fresh.images, old.images)


def test_shards_hold_nothing_of_the_machine_that_wrote_them(written, tmp_path):
    """Two runs write the same bytes; gzip header and tar entries have no time, name or owner."""
    digits.main(["--out", str(tmp_path)])
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(NAMES)
    for name in NAMES:
        assert (tmp_path / name).read_bytes() == (written / name).read_bytes()
        packed = (BUILTIN / "digits" / name).read_bytes()
        assert packed[3] == 0 and packed[4:8] == bytes(4) and len(packed) < 500_000
        header = gzip.decompress(packed)[:512]
        assert int(header[108:116].rstrip(b"\0 ") or b"0", 8) == 0  # uid
        assert int(header[136:148].rstrip(b"\0 ") or b"0", 8) == 0  # mtime
        assert header[265:297].strip(b"\0") == b""  # user name


def test_split_covers_every_image_once(shipped):
    """1,437 and 360 samples, no key in both; each of the ten digits is 6 to 14 % of either part."""
    train, test = set(shipped["train"].keys), set(shipped["test"].keys)
    assert (len(train), len(test)) == (1437, 360)
    assert train | test == {f"{i:06d}" for i in range(1797)}
    for samples in shipped.values():
        shares = samples.labels.bincount(minlength=10) / len(samples)
        assert shares.min() > 0.06 and shares.max() < 0.14


def test_pixels_are_those_of_scikit_learn(shipped):
    """Every image is rint(v·255/16) of the original with its key's number, and so is its label."""
    raw = pytest.importorskip("sklearn.datasets").load_digits()
    for samples in shipped.values():
        assert samples.images.dtype == torch.uint8 and samples.images.shape[1:] == (1, 8, 8)
        numbers = [int(key) for key in samples.keys]
        expected = np.rint(raw.images[numbers] * 255 / 16).astype(np.uint8)
        assert np.array_equal(samples.images[:, 0].numpy(), expected)
        assert np.array_equal(samples.labels.numpy(), raw.target[numbers])
