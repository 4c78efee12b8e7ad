"""Opening sets: with an index and without, here and elsewhere, intact and damaged."""

import json
import math
import os
import shutil
from dataclasses import replace
from pathlib import Path

import fsspec
import numpy as np
import pytest
from sets_making import make_loader, write_set
from shard_making import encode, noise, write_tar

from lipnext_scale.data import (
    DataConfig,
    DataSets,
    SyntheticConfig,
    open_catalog,
    read_samples,
    resolve_shards,
)
from lipnext_scale.data import catalog as catalog_module
from lipnext_scale.data.catalog import check_shards, stamp, unchecked_shards
from lipnext_scale.data.index import index_paths, read_index, write_index
from lipnext_scale.utils.config import ConfigError
from lipnext_scale.utils.errors import UserError
from lipnext_scale.utils.files import file_sha256

COUNTS = [3, 5, 2]
ANIMALS = ("cat", "dog", "eel", "fox")


@pytest.fixture
def shards(tmp_path) -> str:
    return write_set(tmp_path / "set", COUNTS)


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def pixels(pattern: str) -> np.ndarray:
    return read_samples(pattern, "data.train").images.numpy()


# --- with and without an index ----------------------------------------------------------------


def test_the_index_and_the_headers_say_the_same(tmp_path, shards):
    """Records read from the index, which are mapped, are those that scanning the tars gives."""
    bare = write_set(tmp_path / "bare", COUNTS, index=False)
    indexed, scanned = open_catalog(shards, "data.train"), open_catalog(bare, "data.train")
    for one, other in zip(indexed.shards, scanned.shards, strict=True):
        assert one.sha256 and not other.sha256
        assert np.array_equal(one.records, other.records)
        base = one.records
        while isinstance(base, np.ndarray) and base.base is not None:
            base = base.base
        assert type(base).__name__ == "mmap"
    assert np.array_equal(pixels(shards), pixels(bare))


def test_some_of_the_shards(shards):
    """A pattern may name a part of a set: the samples are those of its shards, in its order."""
    part = shards.replace("-*", "-00000{2,0}")
    catalog = open_catalog(part, "data.train")
    assert len(catalog) == 5 and catalog.starts == [0, 2, 5]
    expected = [noise(8, 8, 3, seed=i).transpose(2, 0, 1) for i in (8, 9, 0, 1, 2)]
    assert np.array_equal(pixels(part), np.stack(expected))


def test_the_index_is_reproducible_and_plain(tmp_path, shards):
    """The same set gives the same bytes, and is read as it was written."""
    write_set(tmp_path / "b", COUNTS)
    for one, other in zip(
        index_paths(tmp_path / "set", "train"), index_paths(tmp_path / "b", "train"), strict=True
    ):
        assert one.read_bytes() == other.read_bytes()
    values = json.loads((tmp_path / "b" / "train.index.json").read_text())
    assert [shard["samples"] for shard in values["shards"]] == COUNTS
    index = read_index(tmp_path / "b" / "train.index.json")
    entries = [replace(entry, class_counts={"0": 2, "17": 3}) for entry in index.shards]
    names = ['"a": {', "犬"]
    records = np.load(tmp_path / "b" / "train.index.npy")
    written = write_index(tmp_path, "train", entries, records, classes=names)
    assert read_index(tmp_path / "train.index.json") == written


def edit(path: Path, old: str, new: str) -> None:
    path.write_text(path.read_text().replace(old, new))


def other_labels(directory: Path) -> None:
    path = directory / "train.index.npy"
    records = np.load(path)
    records["label"] = records["label"][::-1]
    np.save(path, records)


JSON, NPY, SHARD = "train.index.json", "train.index.npy", "train-000001.tar"
DAMAGE = {
    f"{SHARD}: has 5000 bytes, its index says": lambda d: os.truncate(d / SHARD, 5000),
    f"{SHARD}: is missing; {JSON} lists it": lambda d: (d / SHARD).unlink(),
    f"{JSON}: does not know train-3.tar": lambda d: shutil.copy(d / SHARD, d / "train-3.tar"),
    f"{JSON}: is not an index of": lambda d: (d / JSON).write_text('{"shards": [1]}'),
    f"{JSON}: is not an index of shards": lambda d: edit(d / JSON, SHARD, f"../{SHARD}"),
    "has the format 'lipnext_scale shards 9'": lambda d: edit(d / JSON, "shards 1", "shards 9"),
    f"{NPY}: holds .* of float64": lambda d: np.save(d / NPY, np.zeros(10)),
    f"{NPY}: is not an array of": lambda d: np.save(d / NPY, np.array([{}]), allow_pickle=True),
    f"{NPY}: cannot be read": lambda d: (d / NPY).unlink(),
    f"{NPY}: is not the file that {JSON} was written with": other_labels,
}


@pytest.mark.parametrize("message", DAMAGE)
def test_sets_that_do_not_fit_their_index(shards, message):
    """Refused when the set is opened, by the name of the file, in one line."""
    DAMAGE[message](Path(shards).parent)
    with pytest.raises(UserError, match=message) as error:
        open_catalog(shards, "data.train")
    assert "\n" not in str(error.value)


def test_a_missing_shard_is_missed_however_the_pattern_is_spelled(tmp_path, shards):
    """What is found bears other names than the pattern says. Only what a pattern means in a
    directory has to be there."""
    (Path(shards).parent / SHARD).unlink()
    for spelled in ("{}//train-*.tar", "{}/./train-*.tar", "{}/train-00000?.tar"):
        with pytest.raises(UserError, match=f"{SHARD}: is missing"):
            open_catalog(spelled.format(Path(shards).parent), "data.train")
    with pytest.raises(ConfigError, match=r"data\.train = .*no shard '.*train-000001.tar'"):
        resolve_shards(shards.replace("*", "{000000..000002}"), "data.train")
    other = write_set(tmp_path / "other", [2, 2])
    some = shards.replace("*", "000000")
    assert len(open_catalog(f"{{{other},{some}}}", "data.train")) == 4 + COUNTS[0]


def test_compressed_shards_are_unpacked_into_memory(tmp_path):
    """Up to the limit; the memory is given back with the catalog."""
    members = [("a.cls", b"1"), ("a.png", encode(noise(1200, 1200)))]
    path = write_tar(tmp_path / "a.tar.gz", members)
    with pytest.raises(ConfigError, match=r"data.memory_limit_gb = 0.001"):
        open_catalog(path, "data.train", memory_limit_gb=0.001)
    before = len(os.listdir("/proc/self/fd"))
    catalog = open_catalog(path, "data.train")
    assert len(os.listdir("/proc/self/fd")) == before + 1
    del catalog
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize(
    "per_real, key",
    [
        *((0.0, "per_real"), (math.inf, "per_real"), (math.nan, "per_real")),
        *((0.0004, "synthetic.per_real"), (2.9996, "synthetic.per_real"), (4, "batch_size")),
    ],
)
def test_mixtures_that_cannot_be_exact(per_real, key):
    """Refused rather than rounded."""
    with pytest.raises(ConfigError) as error:
        DataConfig("a", "b", 256, synthetic=SyntheticConfig("c", per_real))
    assert error.value.key == key


# --- what a label means -----------------------------------------------------------------------


def named_sets(tmp_path, **names: tuple[str, ...]) -> DataSets:
    """Sets whose indexes have these class names."""
    train, test, synthetic = (
        write_set(tmp_path, [8], name, classes=3, class_names=names.get(name, ()))
        for name in ("train", "test", "synthetic")
    )
    return DataSets(DataConfig(train, test, synthetic=SyntheticConfig(synthetic)), 8, 3, 10)


@pytest.mark.parametrize("other", ["test", "synthetic"])
def test_a_class_that_one_set_lacks_shifts_the_others(tmp_path, other):
    """As when a folder is missing, or a subset is drawn by another seed."""
    with pytest.raises(ConfigError) as error:
        named_sets(tmp_path, train=ANIMALS, **{other: (ANIMALS[0], *ANIMALS[2:])})
    assert error.value.key == ("data.test" if other == "test" else "data.synthetic.shards")
    assert "its class 1 is 'eel', that of data.train is 'dog'; convert both" in str(error.value)


@pytest.mark.parametrize("other", [(), ANIMALS[:3], ("0", "1", "2", "3")])
def test_names_that_agree_or_say_nothing(tmp_path, other):
    """Numbers are what generated images come with."""
    assert len(named_sets(tmp_path, train=ANIMALS, test=other, synthetic=other).train) == 8


# --- checksums and fingerprints ---------------------------------------------------------------


def test_intact_shards_are_not_read_again(shards):
    """The stamps of what was checked leave nothing to check, until a file is written to: also where
    another has its path, size and time of writing, as the copies of nodes have."""
    catalog = open_catalog(shards, "data.train")
    known = set(check_shards(unchecked_shards([catalog], set())))
    assert len(known) == 3 and unchecked_shards([catalog], known) == []
    path = Path(catalog.shards[1].path)
    facts, content = path.stat(), bytearray(path.read_bytes())
    content[700] ^= 4
    path.unlink()
    path.write_bytes(content)
    os.utime(path, ns=(facts.st_atime_ns, facts.st_mtime_ns))
    assert unchecked_shards([catalog], known) == [catalog.shards[1]]
    assert stamp(catalog.shards[1]) not in known
    with pytest.raises(UserError, match="train-000001.tar: its sha256 is not that of its index"):
        check_shards(catalog.shards)


def test_an_index_that_is_known_is_not_hashed_again(shards, monkeypatch):
    """Its 24 bytes a sample are many where samples are; one that was written to is compared."""
    hashed: list[Path] = []
    monkeypatch.setattr(
        catalog_module, "file_sha256", lambda path: (hashed.append(path), file_sha256(path))[1]
    )
    records = Path(shards).parent / "train.index.npy"
    first = open_catalog(shards, "data.train")
    assert hashed == [records] and len(first.index_stamps) == 1
    again = open_catalog(shards, "data.train", known=first.index_stamps)
    assert hashed == [records] and again.index_stamps == first.index_stamps
    facts, content = records.stat(), bytearray(records.read_bytes())
    content[-9] ^= 1
    records.write_bytes(content)
    os.utime(records, ns=(facts.st_atime_ns, facts.st_mtime_ns))
    with pytest.raises(UserError, match="train.index.npy: is not the file that train.index.json"):
        open_catalog(shards, "data.train", known=first.index_stamps)


@pytest.mark.parametrize("index", [True, False])
def test_the_fingerprint_knows_labels_pixels_and_order(tmp_path, index):
    """Sets that differ in one image, one class, or the order of shards have different ones."""
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
    """The same shards with an index that is intact in itself and says other classes."""
    before = open_catalog(shards, "x").fingerprint()
    index = read_index(tmp_path / "set" / "train.index.json")
    records = np.load(tmp_path / "set" / "train.index.npy")
    records["label"] = records["label"][::-1]
    write_index(tmp_path / "set", "train", index.shards, records)
    assert open_catalog(shards, "x").fingerprint() != before


# --- elsewhere --------------------------------------------------------------------------------


@pytest.fixture
def remote(shards) -> str:
    """The same set on a file system of fsspec's."""
    system = fsspec.filesystem("memory")
    for path in Path(shards).parent.iterdir():
        system.pipe(f"/bucket/set/{path.name}", path.read_bytes())
    yield "memory://bucket/set/train-*.tar"
    system.rm("/bucket", recursive=True)


def test_a_remote_set_is_the_same_set(shards, remote, tmp_path):
    """Wildcards are listed there, index and shards are copied once, samples and batches equal."""
    here, there = open_catalog(shards, "data.train"), open_catalog(remote, "data.train")
    assert [shard.name for shard in there.shards] == [
        f"memory:///bucket/set/train-00000{i}.tar" for i in range(3)
    ]
    assert here.fingerprint() == there.fingerprint()
    paths = [Path(shard.path) for shard in there.shards]
    times = [path.stat().st_mtime_ns for path in paths]
    assert all(path.is_relative_to(tmp_path / "cache") for path in paths)
    one, other = (next(iter(make_loader(pattern, 5))) for pattern in (shards, remote))
    assert np.array_equal(one.ids, other.ids) and np.array_equal(one.images, other.images)
    assert [path.stat().st_mtime_ns for path in paths] == times
    assert not list((tmp_path / "cache").rglob("*.partial"))


def test_a_missing_remote_shard_is_missed(remote):
    """fsspec spells the names that it finds in its own way."""
    fsspec.filesystem("memory").rm("/bucket/set/train-000001.tar")
    with pytest.raises(UserError, match="train-000001.tar: is missing"):
        open_catalog(remote, "data.train")


def test_a_remote_set_without_an_index(remote, shards):
    """Also by webdataset's pipe: form; braces make several of them."""
    fsspec.filesystem("memory").rm("/bucket/set/train.index.json")
    assert np.array_equal(pixels(shards), pixels(remote))
    pattern = f"pipe:cat {shards.replace('*', '00000{0,1,2}')}"
    assert np.array_equal(pixels(pattern), pixels(shards))


def test_a_damaged_remote_shard_is_not_kept(remote, tmp_path):
    """Its sha256 is compared as it is copied; nothing stays in the cache under its name."""
    system = fsspec.filesystem("memory")
    content = bytearray(system.cat("/bucket/set/train-000001.tar"))
    content[2000] ^= 1
    system.pipe("/bucket/set/train-000001.tar", bytes(content))
    with pytest.raises(UserError, match="train-000001.tar: its sha256 is not that of its index"):
        open_catalog(remote, "data.train")
    kept = {path.name for path in (tmp_path / "cache").rglob("train-000001.tar*")}
    assert kept == {"train-000001.tar.lock"}


@pytest.mark.parametrize(
    "pattern, message",
    [
        ("memory://bucket/none-*.tar", "no shard"),
        ("nosuchprotocol://x/a.tar", "cannot be opened: "),
        ("pipe:false", "pipe:false: cannot be copied"),
    ],
)
def test_remote_shards_that_are_not_there(pattern, message):
    with pytest.raises(UserError, match=message) as error:
        open_catalog(pattern, "data.train")
    assert "\n" not in str(error.value)
