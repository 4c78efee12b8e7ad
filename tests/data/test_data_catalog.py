"""Opening sets: with an index and without, here and elsewhere, whole and damaged."""

import json
import math
import os
import shutil
from pathlib import Path

import fsspec
import numpy as np
import pytest
from sets_making import make_loader, write_set
from shard_making import encode, noise, write_tar

from lipnext_scale.config import ConfigError
from lipnext_scale.data import (
    DataConfig,
    SyntheticConfig,
    open_catalog,
    read_samples,
    resolve_shards,
)
from lipnext_scale.data.catalog import Cache, stage
from lipnext_scale.data.index import index_paths, read_index, set_name
from lipnext_scale.data.source import MAX_OPEN, SampleStore
from lipnext_scale.errors import UserError

COUNTS = [3, 5, 2]


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
    """Records read from the index are those that scanning the tars gives."""
    bare = write_set(tmp_path / "bare", COUNTS, index=False)
    indexed, scanned = open_catalog(shards, "data.train"), open_catalog(bare, "data.train")
    assert all(shard.sha256 for shard in indexed.shards)
    assert not any(shard.sha256 for shard in scanned.shards)
    for one, other in zip(indexed.shards, scanned.shards, strict=True):
        assert np.array_equal(one.records, other.records)
    assert np.array_equal(pixels(shards), pixels(bare))


def test_some_of_the_shards(shards):
    """A pattern may name a part of a set: the samples are those of its shards, in its order."""
    part = shards.replace("-*", "-00000{2,0}")
    catalog = open_catalog(part, "data.train")
    assert len(catalog) == 5 and catalog.starts == [0, 2, 5]
    expected = [noise(8, 8, 3, seed=i).transpose(2, 0, 1) for i in (8, 9, 0, 1, 2)]
    assert np.array_equal(pixels(part), np.stack(expected))


def test_records_are_mapped_not_read(shards):
    """All processes share the index's pages: the arrays are views of the mapped file."""
    for shard in open_catalog(shards, "data.train").shards:
        base = shard.records
        while isinstance(base, np.ndarray) and base.base is not None:
            base = base.base
        assert type(base).__name__ == "mmap"


def test_the_index_is_reproducible_and_plain(tmp_path):
    """The same set gives the same bytes; the JSON is for people too."""
    for name in "ab":
        write_set(tmp_path / name, COUNTS)
    for one, other in zip(
        index_paths(tmp_path / "a", "train"), index_paths(tmp_path / "b", "train"), strict=True
    ):
        assert one.read_bytes() == other.read_bytes()
    values = json.loads((tmp_path / "a" / "train.index.json").read_text())
    assert [shard["samples"] for shard in values["shards"]] == COUNTS
    assert read_index(tmp_path / "a" / "train.index.json").samples == 10


@pytest.mark.parametrize(
    "shard, name",
    [
        ("a/b/train-000012.tar", "train"),
        ("s3://x/in-1k-train-7.tar", "in-1k-train"),
        ("set.beton", "set.beton"),
        ("plain.tar", "plain.tar"),
    ],
)
def test_the_name_of_a_set(shard, name):
    assert set_name(shard) == name


def damage_shorter(directory: Path) -> str:
    os.truncate(directory / "train-000001.tar", 5000)
    return r"train-000001.tar: has 5000 bytes, its index says \d+"


def damage_unknown(directory: Path) -> str:
    shutil.copy(directory / "train-000000.tar", directory / "train-000003.tar")
    return "train.index.json: does not know train-000003.tar"


def damage_json(directory: Path) -> str:
    (directory / "train.index.json").write_text('{"name": "train", "shards": [1]}')
    return "train.index.json: is not an index of shards"


def damage_leaves_the_directory(directory: Path) -> str:
    path = directory / "train.index.json"
    path.write_text(path.read_text().replace("train-000001.tar", "../train-000001.tar"))
    return "train.index.json: is not an index of shards"


def damage_format(directory: Path) -> str:
    path = directory / "train.index.json"
    path.write_text(path.read_text().replace("shards 1", "shards 9"))
    return "has the format 'lipnext_scale shards 9'"


def damage_records(directory: Path) -> str:
    np.save(directory / "train.index.npy", np.zeros(10))
    return r"train.index.npy: holds \(10,\) of float64"


def damage_pickle(directory: Path) -> str:
    np.save(directory / "train.index.npy", np.array([{}]), allow_pickle=True)
    return "train.index.npy: is not an array of records"


def damage_header(directory: Path) -> str:
    path = directory / "train.index.npy"
    path.write_bytes(path.read_bytes()[:12] + b"(((" + path.read_bytes()[15:])
    return "train.index.npy: is not an array of records"


def damage_classes(directory: Path) -> str:
    path = directory / "train.index.json"
    path.write_text(path.read_text().replace('"classes": []', '"classes": 7'))
    return "train.index.json: is not an index of shards"


def damage_missing_records(directory: Path) -> str:
    (directory / "train.index.npy").unlink()
    return "train.index.npy: cannot be read"


@pytest.mark.parametrize(
    "damage", [v for k, v in dict(globals()).items() if k.startswith("damage_")]
)
def test_sets_that_do_not_fit_their_index(shards, damage):
    """Refused when the set is opened, by the name of the file, in one line."""
    said = damage(Path(shards).parent)
    with pytest.raises(UserError, match=said) as error:
        open_catalog(shards, "data.train")
    assert "\n" not in str(error.value)


def damage_labels(directory: Path) -> str:
    path = directory / "train.index.npy"
    records = np.load(path)
    records["label"] = records["label"][::-1]
    np.save(path, records)
    return "train.index.npy: is not the file that train.index.json was written with"


def damage_gone(directory: Path) -> str:
    (directory / "train-000001.tar").unlink()
    return "train-000001.tar: is missing; train.index.json lists it"


@pytest.mark.parametrize("spelled", ["{}//train-*.tar", "{}/./train-*.tar", "{}/train-00000?.tar"])
def test_a_missing_shard_is_missed_however_the_pattern_is_spelled(shards, spelled):
    """What is found bears other names than the pattern says."""
    said = damage_gone(Path(shards).parent)
    with pytest.raises(UserError, match=said):
        open_catalog(spelled.format(Path(shards).parent), "data.train")


def test_a_wildcard_elsewhere_asks_for_nothing_here(tmp_path, shards):
    """Only what a pattern means in this directory has to be there."""
    other = write_set(tmp_path / "other", [2, 2])
    some = shards.replace("*", "000000")
    assert len(open_catalog(f"{{{other},{some}}}", "data.train")) == 4 + COUNTS[0]


@pytest.mark.parametrize("damage", [damage_labels, damage_gone])
def test_labels_and_shards_are_those_of_the_index(shards, damage):
    """A wildcard means all shards that the index lists, and labels are under its checksum."""
    said = damage(Path(shards).parent)
    with pytest.raises(UserError, match=said):
        open_catalog(shards, "data.train")


def test_an_unpacked_shard_beyond_the_limit(tmp_path):
    """It is told as what it is, not as a damaged shard."""
    members = [("a.cls", b"1"), ("a.png", encode(noise(1200, 1200)))]
    path = write_tar(tmp_path / "a.tar.gz", members)
    with pytest.raises(ConfigError, match=r"data.memory_limit_gb = 0.001"):
        open_catalog(path, "data.train", memory_limit_gb=0.001)


@pytest.mark.parametrize("per_real", [0.0, -1.0, math.inf, math.nan])
def test_mixtures_that_are_none(per_real):
    with pytest.raises(ConfigError, match="per_real = .*: must be positive and finite"):
        SyntheticConfig("c", per_real)


@pytest.mark.parametrize(
    "per_real, key",
    [(0.0004, "synthetic.per_real"), (2.9996, "synthetic.per_real"), (4, "batch_size")],
)
def test_mixtures_that_cannot_be_exact(per_real, key):
    """Refused rather than rounded."""
    with pytest.raises(ConfigError) as error:
        DataConfig("a", "b", 256, synthetic=SyntheticConfig("c", per_real))
    assert error.value.key == key


def test_a_missing_shard_is_found_by_its_number(shards):
    """Braces name what must be there."""
    (Path(shards).parent / "train-000001.tar").unlink()
    with pytest.raises(ConfigError, match=r"data\.train = .*no shard '.*train-000001.tar'"):
        resolve_shards(shards.replace("*", "{000000..000002}"), "data.train")


def test_many_shards_need_few_descriptors(tmp_path):
    """A store keeps so many files open and no more, and closes them."""
    shards = write_set(tmp_path / "many", [1] * (MAX_OPEN + 20))
    store = SampleStore(open_catalog(shards, "data.train"))
    before = len(os.listdir("/proc/self/fd"))
    for sample in [*range(len(store.catalog)), 0, 1, 2]:
        store.read(sample)
    assert len(os.listdir("/proc/self/fd")) == before + MAX_OPEN
    store.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_unpacked_shards_go_with_their_catalog(tmp_path):
    """The memory of a compressed shard is given back."""
    path = write_tar(tmp_path / "a.tar.gz", [("a.cls", b"1"), ("a.png", encode(noise(8, 8)))])
    before = os.listdir("/proc/self/fd")
    catalog = open_catalog(path, "data.train")
    assert len(os.listdir("/proc/self/fd")) == len(before) + 1
    del catalog
    assert len(os.listdir("/proc/self/fd")) == len(before)


# --- elsewhere --------------------------------------------------------------------------------


@pytest.fixture
def remote(shards) -> str:
    """The same set on a file system of fsspec's."""
    system = fsspec.filesystem("memory")
    for path in Path(shards).parent.iterdir():
        system.pipe(f"/bucket/set/{path.name}", path.read_bytes())
    yield "memory://bucket/set/train-*.tar"
    system.rm("/bucket", recursive=True)


def test_a_remote_set_is_the_same_set(shards, remote):
    """Wildcards are listed there, index and shards are copied, samples and fingerprint equal."""
    here, there = open_catalog(shards, "data.train"), open_catalog(remote, "data.train")
    assert [shard.name for shard in there.shards] == [
        f"memory:///bucket/set/train-00000{i}.tar" for i in range(3)
    ]
    assert here.fingerprint() == there.fingerprint()
    assert np.array_equal(pixels(shards), pixels(remote))


def test_a_missing_remote_shard_is_missed(remote):
    """fsspec spells the names that it finds in its own way."""
    fsspec.filesystem("memory").rm("/bucket/set/train-000001.tar")
    with pytest.raises(UserError, match="train-000001.tar: is missing"):
        open_catalog(remote, "data.train")


def test_a_remote_set_without_an_index(remote, shards):
    system = fsspec.filesystem("memory")
    system.rm("/bucket/set/train.index.json")
    assert np.array_equal(pixels(shards), pixels(remote))


def test_a_remote_shard_is_copied_once(remote, tmp_path, monkeypatch):
    """A second opening needs nothing from there; half a copy is never taken for a whole one."""
    catalog = open_catalog(remote, "data.train")
    paths = [Path(shard.path) for shard in catalog.shards]
    times = [path.stat().st_mtime_ns for path in paths]
    assert all(path.is_relative_to(tmp_path / "cache") for path in paths)
    open_catalog(remote, "data.train")
    assert [path.stat().st_mtime_ns for path in paths] == times
    assert not list((tmp_path / "cache").rglob("*.partial"))


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


def test_pipes_are_run(shards, tmp_path):
    """webdataset's pipe: form; braces make several of them."""
    pattern = f"pipe:cat {shards.replace('*', '00000{0,1,2}')}"
    assert np.array_equal(pixels(pattern), pixels(shards))


@pytest.mark.parametrize(
    "pattern, said",
    [
        ("memory://bucket/none-*.tar", "no shard"),
        ("memory://bucket/none.tar", "no shard"),
        ("nosuchprotocol://x/a.tar", "cannot be opened: "),
        ("pipe:false", "pipe:false: cannot be copied"),
    ],
)
def test_remote_shards_that_are_not_there(pattern, said):
    with pytest.raises(UserError, match=said) as error:
        open_catalog(pattern, "data.train")
    assert "\n" not in str(error.value)


def test_staging_what_may_be_missing(tmp_path):
    assert stage("memory://bucket/none.json", Cache(tmp_path), optional=True) is None
    with pytest.raises(UserError, match="no such file"):
        stage("memory://bucket/none.json", Cache(tmp_path))


def test_loaders_of_remote_and_local_sets_agree(shards, remote):
    one, other = (next(iter(make_loader(pattern, 5))) for pattern in (shards, remote))
    assert np.array_equal(one.ids, other.ids) and np.array_equal(one.images, other.images)
