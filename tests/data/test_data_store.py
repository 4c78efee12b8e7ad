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


def test_consecutive_and_interleaved_samples_are_asked_for(tmp_path, advised):
    """In tars little lies between images, also across shards. FFCV's writers fill pages of 8 MB in
    turn: from the first sample to the last would be most of the file, or nothing where the last
    lies first."""
    tars = [shard_with(tmp_path / f"{n}.tar", np.arange(50) * (IMAGE + 1000)) for n in "ab"]
    pages = np.repeat(np.arange(10)[::-1], 80) * 8_000_000  # a page holds 80 images
    beton = shard_with(tmp_path / "set.beton", pages + np.tile(np.arange(80) * IMAGE, 10))
    for shards, first, last, needed in (
        (tars, 40, 69, wanted(tars[0], range(40, 50)) | wanted(tars[1], range(20))),
        ([beton], 130, 460, wanted(beton, range(130, 461))),
    ):
        advised.clear()
        SampleStore(Catalog("data.train", "?", shards)).will_need(first, last)
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
