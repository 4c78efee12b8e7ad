"""A source: one set of shards in its own order, with its own place and its own augmentation."""

import os
from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np

from lipnext_scale.data.augment import AugmentConfig, AugmentParams, augment, draw_params
from lipnext_scale.data.catalog import Catalog, Shard
from lipnext_scale.data.decode import BadSample, decode
from lipnext_scale.data.index import Record, sample_key
from lipnext_scale.data.order import Order, below, choose_block, sample_bits
from lipnext_scale.utils.config import ConfigError

# Far fewer than a process may have open, and enough for the shards of a batch.
MAX_OPEN = 128
# The kernel reads ahead no more than this at a time, however much it is asked for.
_ADVICE = 1 << 19


class SampleStore:
    """Reads samples of a catalog, in any order. Positioned reads only: processes that were forked
    share descriptors, and do not disturb each other.

    Nothing is buffered here: what was read ahead is in the page cache of the node.
    """

    def __init__(self, catalog: Catalog) -> None:
        self.catalog = catalog
        self._open: OrderedDict[str, int] = OrderedDict()

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

    def key(self, sample: int) -> str:
        """The key of a sample in its shard; in an FFCV file, which has none, its number."""
        shard, number = self.catalog.place_of(sample)
        if shard.name.endswith(".beton"):
            return str(number)
        return sample_key(shard.path, self.catalog.locate(sample)[1])

    def name(self, sample: int) -> str:
        """The shard and the key of a sample, for messages."""
        return f"{self.catalog.place_of(sample)[0].name}: sample {self.key(sample)}"

    def will_need(self, first: int, last: int) -> None:
        """Ask the kernel to read samples first..last into its cache; errors show in reading."""
        while first <= last:
            shard, start = self.catalog.place_of(first)
            records = shard.records[start : start + last - first + 1]
            with suppress(OSError):
                for begin, end in _consecutive(records):
                    for place in range(begin, end, _ADVICE):
                        length = min(_ADVICE, end - place)
                        descriptor = self._descriptor(shard)
                        os.posix_fadvise(descriptor, place, length, os.POSIX_FADV_WILLNEED)
            first += len(records)

    def _descriptor(self, shard: Shard) -> int:
        descriptor = self._open.pop(shard.path, None)
        if descriptor is None:
            descriptor = os.open(shard.path, os.O_RDONLY | os.O_CLOEXEC)
            if len(self._open) >= MAX_OPEN:
                os.close(self._open.popitem(last=False)[1])
        self._open[shard.path] = descriptor
        return descriptor

    def close(self) -> None:
        while self._open:
            os.close(self._open.popitem()[1])

    def __del__(self) -> None:
        self.close()


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


_SUBSTITUTE_STREAMS = 200  # first of the streams of random bits that choose them
SUBSTITUTES = 20  # tried for a bad sample


@dataclass(frozen=True)
class BadReport:
    """A sample that could not be used; `sample` is its number in its source.

    replaced: by another one; else the batch has a hole and must not be used.
    """

    source: str
    sample: int
    name: str
    reason: str
    replaced: bool


@dataclass
class SourceOptions:
    """How a source makes images: the size and channels that the model takes, and what is random."""

    batch_size: int
    image_size: int
    channels: int
    seed: int
    augment: AugmentConfig = field(default_factory=AugmentConfig)
    read_block: int = 0
    window: int = 1 << 14
    substitute: bool = False


class Source:
    """`fill` makes the images of given samples; the order says which ones a step has."""

    def __init__(self, catalog: Catalog, options: SourceOptions) -> None:
        self.catalog, self.options = catalog, options
        self.store = SampleStore(catalog)
        if len(catalog) < options.batch_size:
            few = f"has {len(catalog)} samples, fewer than the {options.batch_size} that a batch"
            right = f"{few} takes of them; lower data.batch_size"
            raise ConfigError(catalog.key, catalog.pattern, right)
        block = options.read_block or choose_block(len(catalog), catalog.image_bytes)
        # Where samples are read one by one there is nothing to read ahead.
        self._reads_ahead = block > 1
        samples = [len(shard.records) for shard in catalog.shards]
        self.order = Order(samples, options.batch_size, block, options.window, options.seed)

    def place_of(self, step: int) -> tuple[int, int]:
        """(epoch of this source, step in it) of a step counted from the beginning."""
        return divmod(step, self.order.steps_per_epoch)

    def fill(
        self, epoch: int, ids: np.ndarray, out: np.ndarray, places: list[int]
    ) -> tuple[list[int], list[BadReport]]:
        """Write the images of the samples into the places of out; their labels, and what was bad.

        A bad sample is replaced if the options say so.
        """
        drawn = draw_params(self.options.augment, self.options.seed, epoch, ids)
        labels: list[int] = []
        bad: list[BadReport] = []
        for sample, place, params in zip(ids.tolist(), places, drawn, strict=True):
            try:
                labels.append(self.make(sample, params, out[place]))
            except BadSample as reason:
                found = self._substitute(epoch, sample, reason, params, out[place])
                labels.append(found[0])
                bad += found[1]
        return labels, bad

    def make(self, sample: int, params: AugmentParams, out: np.ndarray) -> int:
        """One image, read, decoded and augmented; its label."""
        encoded, record = self.store.read(sample)
        augment(self.decode(encoded, record), self.options.augment, params, out)
        return record.label

    def decode(self, encoded: bytes, record: Record) -> np.ndarray:
        """As large as augmentation needs it."""
        return decode(encoded, record, self.options.channels, self.options.augment.resize[1])

    def _substitute(
        self,
        epoch: int,
        sample: int,
        reason: BadSample,
        params: AugmentParams,
        out: np.ndarray,
    ) -> tuple[int, list[BadReport]]:
        """The label of another sample in the place of a bad one, the same on every rank and worker;
        and all that were bad."""
        failed, label, options = [(sample, reason)], None, self.options
        for attempt in range(SUBSTITUTES if options.substitute else 0):
            stream = _SUBSTITUTE_STREAMS + attempt
            bits = sample_bits(options.seed, epoch, np.array([sample]), stream)
            other = int(below(bits, len(self.catalog))[0])
            try:
                label = self.make(other, params, out)
                break
            except BadSample as another:
                failed.append((other, another))
        return label or 0, [
            BadReport(self.catalog.key, bad, self.store.name(bad), str(why), label is not None)
            for bad, why in failed
        ]

    def read_ahead(self, epoch: int, window: int, lanes: range) -> None:
        """Have the kernel read what a window of these lanes needs."""
        for lane in lanes if self._reads_ahead else ():
            for first, last in self.order.runs(epoch, window, lane):
                self.store.will_need(first, last)
