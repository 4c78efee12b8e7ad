"""What is read of large sets: ahead of time, for a fingerprint, and into memory."""

import os
from pathlib import Path

import numpy as np
import pytest
from sets_making import write_set

from lipnext_scale.data import open_catalog
from lipnext_scale.data.catalog import Catalog, Shard
from lipnext_scale.data.index import KINDS, RECORD, ShardEntry, write_index
from lipnext_scale.data.loader import BatchMaker
from lipnext_scale.data.source import MAX_OPEN, SampleStore, Source, SourceOptions

IMAGE = 100_000


@pytest.fixture
def advised(monkeypatch) -> set:
    """What the kernel was asked for, as (file, thousand of bytes)."""
    asked: set = set()

    def note(descriptor: int, start: int, length: int, advice: int) -> None:
        assert advice == os.POSIX_FADV_WILLNEED and length > 0
        file = os.readlink(f"/proc/self/fd/{descriptor}")
        asked.update((file, place) for place in range(start // 1000, -(-(start + length) // 1000)))

    monkeypatch.setattr(os, "posix_fadvise", note)
    return asked


def shard_with(path, offsets: np.ndarray, size: int = IMAGE) -> Shard:
    """A file of holes with an image at each of the offsets."""
    records = np.zeros(len(offsets), dtype=RECORD)
    records["offset"], records["size"], records["kind"] = offsets, size, KINDS["png"]
    records["label"] = np.arange(len(offsets)) % 10
    path.touch()
    os.truncate(path, int(offsets.max()) + size)
    return Shard(str(path), str(path), records, path.stat().st_size)


def wanted(shard: Shard, samples: range) -> set:
    starts = [int(shard.records["offset"][i]) // 1000 for i in samples]
    return {(shard.path, s + k) for s in starts for k in range(IMAGE // 1000)}


def test_consecutive_samples_are_asked_for_across_shards(tmp_path, advised):
    """In tars, where little lies between images."""
    offsets = np.arange(50) * (IMAGE + 1000)
    shards = [shard_with(tmp_path / name, offsets) for name in ("a.tar", "b.tar")]
    SampleStore(Catalog("data.train", "?", shards)).will_need(40, 69)
    needed = wanted(shards[0], range(40, 50)) | wanted(shards[1], range(20))
    assert needed <= advised and len(advised) <= 1.02 * len(needed)


def test_only_what_is_needed_of_interleaved_samples(tmp_path, advised):
    """FFCV's writers fill pages of 8 MB in turn, a hundred samples at a time: a stretch from the
    first sample to the last would be most of the file, or nothing where the last lies first."""
    offsets, pages = np.zeros(800, dtype=np.int64), 0
    for chunk in np.arange(800).reshape(-1, 80)[::-1]:  # a page holds 80 images
        offsets[chunk] = pages * 8_000_000 + np.arange(80) * IMAGE
        pages += 1
    shard = shard_with(tmp_path / "set.beton", offsets)
    SampleStore(Catalog("data.train", "?", [shard])).will_need(130, 460)
    needed = wanted(shard, range(130, 461))
    assert needed <= advised and len(advised) <= 1.1 * len(needed)


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


def private_bytes() -> int:
    """Memory that this process shares with no other."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith("Private_Dirty"))


def test_a_set_of_millions_costs_a_rank_next_to_nothing(tmp_path):
    """Four million samples have an index of 96 MB, mapped; step 100,000 is there at once."""
    samples = 4_000_000
    shard = shard_with(tmp_path / "huge-0.tar", np.arange(samples, dtype=np.uint64) * 4096, 2300)
    entry = ShardEntry("huge-0.tar", samples, shard.bytes, "0" * 64)
    write_index(tmp_path, "huge", [entry], shard.records)
    before = private_bytes()
    catalog = open_catalog(shard.path, "data.synthetic.shards")
    source = Source(catalog, SourceOptions(32, 32, 3, seed=0))
    assert catalog.label_range() == (0, 9) and source.order.steps_per_epoch == samples // 32
    assert len(BatchMaker([source]).sample_ids(100_000)) == 32
    assert private_bytes() - before < 10_000_000
