"""What the kernel is asked to read ahead, and what the fingerprint of unindexed shards reads."""

import os

import numpy as np
import pytest
from sets_making import write_set

from lipnext_scale.data import open_catalog
from lipnext_scale.data.catalog import Catalog, Shard
from lipnext_scale.data.index import KINDS, RECORD
from lipnext_scale.data.source import SampleStore

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


def shard_with(path, offsets: np.ndarray) -> Shard:
    """A file of holes with an image at each of the offsets."""
    records = np.zeros(len(offsets), dtype=RECORD)
    records["offset"], records["size"], records["kind"] = offsets, IMAGE, KINDS["png"]
    path.touch()
    os.truncate(path, int(offsets.max()) + IMAGE)
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


@pytest.mark.parametrize("writers", [1, 8, 32])
def test_only_what_is_needed_of_interleaved_samples(tmp_path, advised, writers):
    """FFCV's writers fill pages of 8 MB in turn, a hundred samples at a time: a stretch from the
    first sample to the last would be most of the file, or nothing where the last lies first."""
    chunks, page = np.arange(800).reshape(-1, 100), 8_000_000
    offsets, free, room = np.zeros(800, dtype=np.int64), 0, {}
    for number, chunk in enumerate(chunks[::-1]):
        for sample in chunk:
            place, left = room.get(number % writers, (0, 0))
            if left < IMAGE:
                place, left, free = free, page, free + page
            offsets[sample] = place
            room[number % writers] = place + IMAGE, left - IMAGE
    shard = shard_with(tmp_path / "set.beton", offsets)
    SampleStore(Catalog("data.train", "?", [shard])).will_need(130, 460)
    needed = wanted(shard, range(130, 461))
    assert needed <= advised and len(advised) <= 1.1 * len(needed)


def test_the_fingerprint_reads_little_of_many_shards(tmp_path, monkeypatch):
    """Of all shards together, not of each: every rank does it at every start."""
    pattern = write_set(tmp_path / "set", [12] * 40, index=False)
    catalog, reads, pread = open_catalog(pattern, "data.train"), [], os.pread

    def noted(descriptor: int, size: int, offset: int) -> bytes:
        reads.append(size)
        return pread(descriptor, size, offset)

    monkeypatch.setattr(os, "pread", noted)
    catalog.fingerprint()
    assert 40 <= len(reads) <= 256
