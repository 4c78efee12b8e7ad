"""data.stage_dir: shards of a shared file system, copied to the node before they are read."""

import multiprocessing
import os
import threading
import time
from multiprocessing.sharedctypes import Synchronized
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import BinaryIO

import pytest
from sets_making import data_config, write_set

from lipnext_scale.data import Catalog, DataConfig, DataSets, catalog
from lipnext_scale.data.catalog import Cache, as_url, check_shards, stage
from lipnext_scale.errors import UserError

COUNTS = [3, 5, 2]


@pytest.fixture
def shards(tmp_path: Path) -> str:
    return write_set(tmp_path / "set", COUNTS)


def opened(shards: str, stage_dir: Path | str = "") -> Catalog:
    config = DataConfig(train=shards, test=shards, stage_dir=str(stage_dir))
    return DataSets(config, image_size=8, channels=3, num_classes=10).train


@pytest.mark.parametrize("index", [True, False])
def test_a_staged_set_is_the_same_set_elsewhere(tmp_path: Path, index: bool) -> None:
    """Every shard is read from the node's directory; a run on it continues one that was not."""
    shards = write_set(tmp_path / "own", COUNTS, index=index)
    there, here = opened(shards), opened(shards, tmp_path / "node")
    assert all(Path(s.path).is_relative_to(tmp_path / "node") for s in here.shards)
    assert here.fingerprint() == there.fingerprint() and len(here) == sum(COUNTS)
    assert not list((tmp_path / "node").rglob("*.partial"))


def test_a_relative_pattern_with_braces(
    tmp_path: Path, shards: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As configurations have them: relative to where the command is started."""
    monkeypatch.chdir(tmp_path)
    some = opened("set/train-00000{0,2}.tar", "node")
    assert [len(shard.records) for shard in some.shards] == [3, 2]


def test_copies_are_made_once_and_again_after_a_change(tmp_path: Path, shards: str) -> None:
    """Node directories outlive jobs: a copy is good as long as its source is what it was."""
    first = [os.stat(shard.path).st_ino for shard in opened(shards, tmp_path / "node").shards]
    again = [os.stat(shard.path).st_ino for shard in opened(shards, tmp_path / "node").shards]
    assert again == first
    write_set(tmp_path / "set", [4, 4, 4])
    changed = opened(shards, tmp_path / "node")
    assert [len(shard.records) for shard in changed.shards] == [4, 4, 4]
    assert changed.fingerprint() == opened(shards).fingerprint()


def test_a_copy_where_times_are_whole_seconds(tmp_path: Path, shards: str) -> None:
    """As on some shared file systems: it is still the copy of its source."""
    first = [Path(shard.path) for shard in opened(shards, tmp_path / "node").shards]
    for path in first:
        seconds = path.stat().st_mtime_ns // 10**9
        os.utime(path, ns=(seconds * 10**9, seconds * 10**9))
    numbers = [path.stat().st_ino for path in first]
    opened(shards, tmp_path / "node")
    assert [path.stat().st_ino for path in first] == numbers


def test_a_missing_shard_is_missed(tmp_path: Path, shards: str) -> None:
    """Also where an earlier copy of it is still on the node."""
    opened(shards, tmp_path / "node")
    (tmp_path / "set" / "train-000001.tar").unlink()
    with pytest.raises(UserError, match="train-000001.tar: is missing"):
        opened(shards, tmp_path / "node")


@pytest.mark.parametrize("index", [True, False])
@pytest.mark.parametrize("remote", [True, False])
@pytest.mark.parametrize("key", ["stage_dir", "cache_dir"])
def test_a_place_that_cannot_be_written(
    tmp_path: Path, key: str, remote: bool, index: bool
) -> None:
    """One line that names it, and the key that it was given by, whatever the shards are."""
    shards = write_set(tmp_path / "set", COUNTS, index=index)
    (tmp_path / "file").write_text("")
    config = data_config(f"file://{shards}" if remote else shards, **{key: f"{tmp_path}/file/node"})
    if key == "cache_dir" and not remote:
        DataSets(config, image_size=8, channels=3, num_classes=10)  # which needs no copies
        return
    said = rf"data\.{key} = '{tmp_path}/file/node': cannot be written"
    with pytest.raises(UserError, match=said) as error:
        DataSets(config, image_size=8, channels=3, num_classes=10)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("index", [True, False])
def test_shards_are_copied_several_at_a_time(
    tmp_path: Path, index: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With an index and without: a copy goes on only when another one is under way."""
    shards = write_set(tmp_path / "set", [1] * 4, index=index)
    together = threading.Barrier(2)
    really_open = catalog._open_remote

    def open_together(shard: str) -> object:
        if shard.endswith(".tar"):
            together.wait(30)
        return really_open(shard)

    monkeypatch.setattr(catalog, "_open_remote", open_together)
    assert len(opened(shards, tmp_path / "node")) == 4


# --- by several at once -----------------------------------------------------------------------


class Slow:
    """A source whose every part comes after a while, or never."""

    def __init__(self, file: BinaryIO, begun: Event, seconds: float) -> None:
        self._file, self._begun, self._seconds = file, begun, seconds

    def __enter__(self) -> "Slow":
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def read(self, size: int) -> bytes:
        part = self._file.read(min(size, 2048))
        if self._file.tell() > 2048:  # the first one has come, but not this
            self._begun.set()
            time.sleep(self._seconds)
        return part


def stage_slowly(
    shard: str, directory: Path, opened: "Synchronized[int]", begun: Event, seconds: float
) -> None:
    """In a process of its own: copy and compare."""

    def open_slowly(name: str) -> Slow:
        with opened.get_lock():
            opened.value += 1
        return Slow(open(name.removeprefix("file://"), "rb"), begun, seconds)

    catalog._open_remote = open_slowly
    copy = stage(shard, Cache(directory))
    assert copy is not None
    assert copy.read_bytes() == Path(shard.removeprefix("file://")).read_bytes()


def test_two_processes_copy_a_shard_once(tmp_path: Path, shards: str) -> None:
    """Ranks of a node that start together: one copies, the other waits and reads its copy."""
    context = multiprocessing.get_context("fork")
    shard, times, begun = (
        as_url(shards.replace("*", "000001")),
        context.Value("i", 0),
        context.Event(),
    )
    arguments = (shard, tmp_path / "node", times, begun, 0.1)
    both = [context.Process(target=stage_slowly, args=arguments) for _ in range(2)]
    for process in both:
        process.start()
    for process in both:
        process.join(60)
    assert [process.exitcode for process in both] == [0, 0] and times.value == 1
    assert not list((tmp_path / "node").rglob("*.partial"))


def test_a_copy_that_was_killed_is_made_anew(tmp_path: Path, shards: str) -> None:
    """kill -9 in the middle: what there is of it is neither taken for the shard nor left behind."""
    context = multiprocessing.get_context("fork")
    shard, times, begun = (
        as_url(shards.replace("*", "000001")),
        context.Value("i", 0),
        context.Event(),
    )
    arguments = (shard, tmp_path / "node", times, begun, 600)
    process = context.Process(target=stage_slowly, args=arguments)
    process.start()
    assert begun.wait(60)
    process.kill()
    process.join(60)
    assert len(list((tmp_path / "node").rglob("*.partial"))) == 1
    copies = opened(shards, tmp_path / "node")
    assert copies.fingerprint() == opened(shards).fingerprint()
    check_shards(copies.shards)
    assert not list((tmp_path / "node").rglob("*.partial"))


def test_nodes_that_share_a_directory_write_files_of_their_own(
    tmp_path: Path, shards: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not all file systems show one node the locks of another. What a node that is gone left half
    done is removed."""
    node, asides = tmp_path / "node", set()
    directory = catalog.staged_path(as_url(shards), Cache(node)).parent
    directory.mkdir(parents=True)
    theirs, left = directory / "train-000000.tar.far.partial", directory / "x.tar.gone.partial"
    for path in (theirs, left):
        path.write_text("half of it")
    os.utime(left, (time.time() - 2 * 3600,) * 2)
    really_open = catalog._open_remote

    def open_noting(shard: str) -> object:
        asides.update(path.name for path in directory.glob("*.partial"))
        return really_open(shard)

    monkeypatch.setattr(catalog, "_open_remote", open_noting)
    check_shards(opened(shards, node).shards)
    assert f"train-000000.tar.{os.uname().nodename}.partial" in asides
    assert theirs.read_text() == "half of it" and not left.exists()


def test_the_packages_own_shards_stay_where_they_are(tmp_path: Path) -> None:
    """They are unpacked into memory on every node anyway."""
    pattern = "builtin:digits/test-*.tar.gz"
    config = DataConfig(train=pattern, test=pattern, stage_dir=str(tmp_path / "node"))
    DataSets(config, image_size=8, channels=1, num_classes=10)
    assert not (tmp_path / "node").exists()
