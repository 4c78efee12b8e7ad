"""What shards and indexes are compared with, what is remembered of it, what a set is known by."""

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from sets_making import write_set

from lipnext_scale.data import catalog as catalog_module
from lipnext_scale.data import open_catalog
from lipnext_scale.data.catalog import check_shards, stamp, unchecked_shards
from lipnext_scale.data.index import read_index, write_index
from lipnext_scale.errors import UserError
from lipnext_scale.files import file_sha256

COUNTS = [3, 5, 2]


@pytest.fixture
def shards(tmp_path) -> str:
    return write_set(tmp_path / "set", COUNTS)


# --- checksums --------------------------------------------------------------------------------


def test_whole_shards_are_told_and_not_read_again(shards):
    """The stamps of what was checked leave nothing to check, until a file is written to."""
    catalog = open_catalog(shards, "data.train")
    todo = unchecked_shards([catalog], set())
    assert len(todo) == 3
    known = set(check_shards(todo))
    assert unchecked_shards([catalog], known) == []
    path = catalog.shards[1].path
    os.utime(path, ns=(1, 1))
    assert [shard.path for shard in unchecked_shards([catalog], known)] == [path]
    assert stamp(catalog.shards[1]) not in known


def test_a_copy_on_another_node_is_read_there(shards, tmp_path):
    """Nodes have their copies at one path, of one size and time of writing; each is looked at."""
    catalog = open_catalog(shards, "data.train")
    known = set(check_shards(catalog.shards))
    path = Path(catalog.shards[1].path)
    facts, content = path.stat(), bytearray(path.read_bytes())
    content[700] ^= 4
    path.unlink()
    path.write_bytes(content)
    os.utime(path, ns=(facts.st_atime_ns, facts.st_mtime_ns))
    assert unchecked_shards([catalog], known) == [catalog.shards[1]]


def test_a_flipped_bit_is_found(shards):
    path = Path(shards).parent / "train-000002.tar"
    content = bytearray(path.read_bytes())
    content[700] ^= 4
    path.write_bytes(content)
    catalog = open_catalog(shards, "data.train")  # its size is right
    with pytest.raises(UserError, match="train-000002.tar: its sha256 is not that of its index"):
        check_shards(catalog.shards)


def test_an_index_that_is_known_is_not_hashed_again(shards, monkeypatch):
    """Its 24 bytes a sample are many where samples are; one that was written to is compared."""
    hashed: list[Path] = []

    def noted(path: Path) -> str:
        hashed.append(path)
        return file_sha256(path)

    monkeypatch.setattr(catalog_module, "file_sha256", noted)
    records = Path(shards).parent / "train.index.npy"
    first = open_catalog(shards, "data.train")
    assert hashed == [records] and len(first.index_stamps) == 1
    again = open_catalog(shards, "data.train", known=first.index_stamps)
    assert hashed == [records] and again.index_stamps == first.index_stamps
    assert again.fingerprint() == first.fingerprint()
    facts, content = records.stat(), bytearray(records.read_bytes())
    content[-9] ^= 1
    records.write_bytes(content)
    os.utime(records, ns=(facts.st_atime_ns, facts.st_mtime_ns))
    with pytest.raises(UserError, match="train.index.npy: is not the file that train.index.json"):
        open_catalog(shards, "data.train", known=first.index_stamps)


# --- what the set is known by -----------------------------------------------------------------


@pytest.mark.parametrize("index", [True, False])
def test_the_fingerprint_knows_labels_pixels_and_order(tmp_path, index):
    """Sets that differ in one image, one class, or the order of shards are told apart."""
    same = [write_set(tmp_path / name, COUNTS, index=index) for name in "ab"]
    prints = [open_catalog(pattern, "x").fingerprint() for pattern in same]
    assert prints[0] == prints[1]
    others = [
        write_set(tmp_path / "c", COUNTS, index=index, classes=6),
        write_set(tmp_path / "d", COUNTS, index=index, first=1),
        write_set(tmp_path / "e", [3, 2, 5], index=index),
        same[0].replace("-*", "-00000{1,0,2}"),
    ]
    found = {open_catalog(pattern, "x").fingerprint() for pattern in others}
    assert len(found | {prints[0]}) == 5


def test_the_fingerprint_knows_the_labels_of_the_index(tmp_path, shards):
    """The same shards with an index that is whole in itself and says other classes."""
    other = write_set(tmp_path / "other", COUNTS)
    index = read_index(tmp_path / "other" / "train.index.json")
    records = np.load(tmp_path / "other" / "train.index.npy")
    records["label"] = records["label"][::-1]
    write_index(tmp_path / "other", "train", index.shards, records)
    prints = [open_catalog(pattern, "x").fingerprint() for pattern in (shards, other)]
    assert prints[0] != prints[1]


def test_the_fingerprint_is_taken_once(tmp_path):
    """Ranks compare it, loaders remember it; contents are looked at for the first of them."""
    catalog = open_catalog(write_set(tmp_path / "bare", COUNTS, index=False), "x")
    fingerprint = catalog.fingerprint()
    for shard in catalog.shards:
        os.unlink(shard.path)
    assert catalog.fingerprint() == fingerprint


def test_an_index_is_the_same_without_its_counts(tmp_path, shards):
    """Also where a name looks like them."""
    index = read_index(Path(shards).parent / "train.index.json")
    entries = [replace(entry, class_counts={"0": 2, "17": 3}) for entry in index.shards]
    names = ['"class_counts": {"a": 1}', "class_counts", '\\"class_counts": {', "}"]
    records = np.load(Path(shards).parent / "train.index.npy")
    whole = write_index(tmp_path, "train", entries, records, classes=names)
    path = tmp_path / "train.index.json"
    assert read_index(path) == whole
    assert read_index(path, counts=False) == replace(whole, shards=index.shards)
