"""Reading samples of a catalog, in any order, by any number of processes at once."""

import os
from collections import OrderedDict
from contextlib import suppress

import numpy as np

from lipnext_scale.data.catalog import Catalog, Shard
from lipnext_scale.data.decode import BadSample, Scratch, channels_of, decode
from lipnext_scale.data.index import Record
from lipnext_scale.data.tar_scan import sample_key

# Far fewer than a process may have open, and enough for the shards of a batch.
MAX_OPEN = 128
# The kernel reads ahead no more than this at a time, however much it is asked for.
_ADVICE = 1 << 19


class SampleStore:
    """Positioned reads only: no file has a place that two readers could move.

    Each process opens its own descriptors. Nothing is buffered here: what was read ahead is in the
    page cache, which all processes of a node share.
    """

    def __init__(self, catalog: Catalog) -> None:
        self.catalog = catalog
        self._open: OrderedDict[str, int] = OrderedDict()
        self._owner = os.getpid()

    def read(self, sample: int) -> tuple[bytes, Record]:
        """The encoded image of a sample and its record."""
        shard, record = self.catalog.locate(sample)
        try:
            encoded = os.pread(self._descriptor(shard), record.size, record.offset)
        except OSError as error:
            raise BadSample(f"cannot be read: {error.strerror}") from None
        if len(encoded) != record.size:
            raise BadSample(f"the shard ends {record.size - len(encoded)} bytes too early")
        return encoded, record

    def decode(
        self,
        encoded: bytes,
        record: Record,
        channels: int,
        at_least: int = 0,
        scratch: Scratch | None = None,
    ) -> np.ndarray:
        shape = (record.height, record.width, record.channels)
        return decode(encoded, record.kind, channels, shape, at_least, scratch)

    def channels(self, sample: int) -> int:
        """1 for greyscale, 3 for colour, as stored."""
        encoded, record = self.read(sample)
        return channels_of(encoded, record.kind, record.channels)

    def key(self, sample: int) -> str:
        """The key of a sample in its shard; in an FFCV file, which has none, its number."""
        shard, record = self.catalog.locate(sample)
        if shard.name.endswith(".beton"):
            return str(self.catalog.number_in_shard(sample))
        return sample_key(shard.path, record)

    def name(self, sample: int) -> str:
        """The shard and the key of a sample, for messages."""
        return f"{self.catalog.locate(sample)[0].name}: sample {self.key(sample)}"

    def will_need(self, first: int, last: int) -> None:
        """Ask the kernel to read samples first..last into its cache; reading tells what fails."""
        while first <= last:
            shard, _ = self.catalog.locate(first)
            start = self.catalog.number_in_shard(first)
            records = shard.records[start : start + last - first + 1]
            with suppress(OSError):
                for begin, end in _consecutive(records):
                    self._advise(shard, begin, end)
            first += len(records)

    def _advise(self, shard: Shard, start: int, stop: int) -> None:
        descriptor = self._descriptor(shard)
        for place in range(start, stop, _ADVICE):
            length = min(_ADVICE, stop - place)
            os.posix_fadvise(descriptor, place, length, os.POSIX_FADV_WILLNEED)

    def _descriptor(self, shard: Shard) -> int:
        if self._owner != os.getpid():  # forked: those of the parent are its own to close
            self._open, self._owner = OrderedDict(), os.getpid()
        descriptor = self._open.pop(shard.path, None)
        if descriptor is None:
            descriptor = os.open(shard.path, os.O_RDONLY | os.O_CLOEXEC)
            if len(self._open) >= MAX_OPEN:
                os.close(self._open.popitem(last=False)[1])
        self._open[shard.path] = descriptor
        return descriptor

    def close(self) -> None:
        if self._owner == os.getpid():
            for descriptor in self._open.values():
                os.close(descriptor)
        self._open.clear()

    def __del__(self) -> None:
        self.close()  # descriptors are numbers, which nobody else would give back


def _consecutive(records: np.ndarray) -> list[tuple[int, int]]:
    """The parts of a file that hold these samples, as (begin, end).

    In a tar they lie one behind the other. FFCV's writers take pages of a .beton in turn: there
    samples of consecutive numbers may lie far apart, in any order.
    """
    begins = records["offset"].astype(np.int64)
    ends = begins + records["size"]
    gaps = begins[1:] - ends[:-1]
    breaks = np.flatnonzero((gaps < 0) | (gaps > _ADVICE))
    firsts, lasts = np.append(0, breaks + 1), np.append(breaks, len(records) - 1)
    return list(zip(begins[firsts].tolist(), ends[lasts].tolist(), strict=True))
