"""data.stage_dir: shards of a shared file system, copied to the node before they are read."""

import io
import multiprocessing
import os
import time
from pathlib import Path

import pytest
from sets_making import data_config, write_set

from lipnext_scale.data import Catalog, DataConfig, DataSets, catalog
from lipnext_scale.data.catalog import as_url, check_shards, stage
from lipnext_scale.utils.errors import UserError

COUNTS = [3, 5, 2]


@pytest.fixture
def shards(tmp_path: Path) -> str:
    return write_set(tmp_path / "set", COUNTS)


def opened(shards: str, stage_dir: Path | str = "") -> Catalog:
    config = DataConfig(train=shards, test=shards, stage_dir=str(stage_dir))
    return DataSets(config, image_size=8, channels=3, num_classes=10).train


@pytest.mark.parametrize("index", [True, False])
def test_a_staged_set_is_the_same_set_elsewhere(tmp_path: Path, index: bool, monkeypatch) -> None:
    """Every shard is read from the node's directory; a run on it continues one that was not."""
    shards = write_set(tmp_path / "own", COUNTS, index=index)
    there, here = opened(shards), opened(shards, tmp_path / "node")
    assert all(Path(s.path).is_relative_to(tmp_path / "node") for s in here.shards)
    assert here.fingerprint() == there.fingerprint() and len(here) == sum(COUNTS)
    assert not list((tmp_path / "node").rglob("*.partial"))
    monkeypatch.chdir(tmp_path)
    some = opened("own/train-00000{0,2}.tar", "node")
    assert [len(shard.records) for shard in some.shards] == [3, 2]


def test_copies_are_made_once_and_again_after_a_change(tmp_path: Path, shards: str) -> None:
    """Node directories outlive jobs: a copy is good as long as its source is what it was. Some file
    systems keep full seconds only."""
    paths = [Path(shard.path) for shard in opened(shards, tmp_path / "node").shards]
    first = [path.stat().st_ino for path in paths]
    seconds = paths[0].stat().st_mtime_ns // 10**9 * 10**9
    os.utime(paths[0], ns=(seconds, seconds))
    opened(shards, tmp_path / "node")
    assert [path.stat().st_ino for path in paths] == first
    write_set(tmp_path / "set", [4, 4, 4])
    changed = opened(shards, tmp_path / "node")
    assert [len(shard.records) for shard in changed.shards] == [4, 4, 4]
    assert changed.fingerprint() == opened(shards).fingerprint()
    (tmp_path / "set" / "train-000001.tar").unlink()
    with pytest.raises(UserError, match="train-000001.tar: is missing"):
        opened(shards, tmp_path / "node")


@pytest.mark.parametrize("key, prefix", [("stage_dir", ""), ("cache_dir", "file://")])
def test_a_place_that_cannot_be_written(tmp_path: Path, shards: str, key: str, prefix: str) -> None:
    """One line that names it, and the key that it was given by."""
    (tmp_path / "file").write_text("")
    config = data_config(f"{prefix}{shards}", **{key: f"{tmp_path}/file/node"})
    message = rf"data\.{key} = '{tmp_path}/file/node': cannot be written"
    with pytest.raises(UserError, match=message) as error:
        DataSets(config, image_size=8, channels=3, num_classes=10)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("killed", [False, True])
def test_ranks_of_a_node_that_start_together(tmp_path: Path, shards: str, killed: bool) -> None:
    """One copies, the other waits and reads its copy. What is left of a copy that was killed is
    neither taken for the shard nor left behind."""
    context = multiprocessing.get_context("fork")
    times, begun = context.Value("i", 0), context.Event()
    shard, node = as_url(shards.replace("*", "000001")), tmp_path / "node"

    class Slow(io.FileIO):
        def read(self, size: int = -1) -> bytes:
            part = super().read(2048)
            if self.tell() > 2048:  # the first one has come, but not this
                begun.set()
                time.sleep(600 if killed else 0.1)
            return part

    def open_slowly(name: str) -> Slow:
        with times.get_lock():
            times.value += 1
        return Slow(name.removeprefix("file://"))

    def stage_slowly() -> None:
        catalog._open_remote = open_slowly
        copy = stage(shard, node)
        assert copy.read_bytes() == Path(shard.removeprefix("file://")).read_bytes()

    ranks = [context.Process(target=stage_slowly) for _ in range(1 if killed else 2)]
    for rank in ranks:
        rank.start()
    if killed:
        assert begun.wait(60)
        ranks[0].kill()
    for rank in ranks:
        rank.join(60)
    if killed:
        # Nodes may not see each other's locks: each writes a file of its own aside.
        (left,) = node.rglob("*.partial")
        assert left.name == f"train-000001.tar.{os.uname().nodename}.partial"
    else:
        assert [rank.exitcode for rank in ranks] == [0, 0] and times.value == 1
    copies = opened(shards, node)
    assert copies.fingerprint() == opened(shards).fingerprint()
    check_shards(copies.shards)
    assert not list(node.rglob("*.partial"))
