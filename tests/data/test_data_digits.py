"""The digits that ship with the package, and the command that wrote them."""

from pathlib import Path

import pytest
import torch

from data_prep import digits
from lipnext_scale.data import read_samples
from lipnext_scale.data.catalog import BUILTIN

NAMES = ("train-000000.tar.gz", "test-000000.tar.gz")


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("digits") / "new" / "digits"
    digits.main(["--out", str(out)])
    return out


def test_the_command_writes_what_is_shipped(written):
    """Keys, labels and pixels of freshly written shards are those of the package, in their order.

    Not the bytes: another zlib may pack the same pixels otherwise.
    """
    for part in ("train", "test"):
        old = read_samples(f"builtin:digits/{part}-*.tar.gz", "data.train")
        fresh = read_samples(f"{written}/{part}-*.tar.gz", "data.train")
        assert fresh.keys == old.keys
        assert torch.equal(fresh.labels, old.labels) and torch.equal(fresh.images, old.images)


def test_shards_hold_nothing_of_the_machine_that_wrote_them(written, tmp_path):
    """Two runs write the same bytes; the gzip header has no time and no name."""
    digits.main(["--out", str(tmp_path)])
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(NAMES)
    for name in NAMES:
        assert (tmp_path / name).read_bytes() == (written / name).read_bytes()
        packed = (BUILTIN / "digits" / name).read_bytes()
        assert packed[3] == 0 and packed[4:8] == bytes(4) and len(packed) < 500_000
