"""A source: one set of shards in its own order, with its own place and its own augmentation."""

import os
from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass, field
from time import perf_counter

import numpy as np

from lipnext_scale.config import ConfigError
from lipnext_scale.data.augment import AugmentConfig, AugmentParams, augment, draw_chances
from lipnext_scale.data.catalog import Catalog, Shard
from lipnext_scale.data.decode import BadSample, Scratch, channels_of, decode
from lipnext_scale.data.index import Record, sample_key
from lipnext_scale.data.order import Order, OrderConfig, below, choose_block, sample_bits

# --------------------------------------------------------------------------------------------------
# Reading samples of a catalog, in any order, by any number of processes at once.

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


_SUBSTITUTE_STREAMS = 200  # first of the streams of random bits that choose them
SUBSTITUTES = 20  # tried for a bad sample


@dataclass
class Stages:
    """Seconds that one process spent in each stage, and images that went through."""

    read: float = 0.0
    decode: float = 0.0
    augment: float = 0.0
    images: int = 0

    def add(self, other: "Stages") -> None:
        self.read += other.read
        self.decode += other.decode
        self.augment += other.augment
        self.images += other.images


@dataclass(frozen=True)
class BadReport:
    """A sample that could not be used; `sample` is its number in its source.

    replaced: another one stands in; else the batch has a hole and must not be used.
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
        self._scratch = Scratch()
        if len(catalog) < options.batch_size:
            raise ConfigError(
                catalog.key,
                catalog.pattern,
                f"has {len(catalog)} samples, fewer than the {options.batch_size} that a batch "
                "takes of them; lower data.batch_size",
            )
        block = options.read_block or choose_block(len(catalog), catalog.image_bytes)
        # Where samples are read one by one there is nothing to read ahead.
        self._reads_ahead = block > 1
        self.order = Order(
            [len(shard.records) for shard in catalog.shards],
            OrderConfig(options.batch_size, block, options.window),
            options.seed,
        )

    def place_of(self, step: int) -> tuple[int, int]:
        """(epoch of this source, step in it) of a step counted from the beginning."""
        return divmod(step, self.order.steps_per_epoch)

    def fill(
        self, epoch: int, ids: np.ndarray, out: np.ndarray, places: list[int], stages: Stages
    ) -> tuple[np.ndarray, list[BadReport]]:
        """Write the images of the samples into the places of out; their labels, and what was bad.

        A bad sample is replaced if the options say so.
        """
        options = self.options
        bad: list[BadReport] = []
        chances = draw_chances(options.augment, options.seed, epoch, ids)
        labels = np.empty(len(ids), dtype=np.int64)
        for index, sample in enumerate(ids.tolist()):
            try:
                labels[index] = self._make(sample, chances, index, out[places[index]], stages)
            except BadSample as reason:
                place = out[places[index]]
                label = self._substitute(epoch, sample, chances, index, place, bad, stages)
                bad.append(self._report(sample, reason, replaced=label is not None))
                labels[index] = label or 0
        stages.images += len(ids)
        return labels, bad

    def _make(
        self, sample: int, chances: AugmentParams, index: int, out: np.ndarray, stages: Stages
    ) -> int:
        """One image, read, decoded and augmented; its label."""
        options, began = self.options, perf_counter()
        encoded, record = self.store.read(sample)
        read = perf_counter()
        at_least = options.augment.resize[1]
        image = self.store.decode(encoded, record, options.channels, at_least, self._scratch)
        decoded = perf_counter()
        augment(image, options.augment, chances, index, out)
        stages.read += read - began
        stages.decode += decoded - read
        stages.augment += perf_counter() - decoded
        return record.label

    def _report(self, sample: int, reason: BadSample, replaced: bool) -> BadReport:
        return BadReport(self.catalog.key, sample, self.store.name(sample), str(reason), replaced)

    def _substitute(
        self,
        epoch: int,
        sample: int,
        chances: AugmentParams,
        index: int,
        out: np.ndarray,
        bad: list[BadReport],
        stages: Stages,
    ) -> int | None:
        """Another sample in the place of a bad one, always the same, whoever asks; its label."""
        for attempt in range(SUBSTITUTES if self.options.substitute else 0):
            bits = sample_bits(
                self.options.seed, epoch, np.array([sample]), _SUBSTITUTE_STREAMS + attempt
            )
            other = int(below(bits, len(self.catalog))[0])
            try:
                return self._make(other, chances, index, out, stages)
            except BadSample as reason:
                bad.append(self._report(other, reason, replaced=True))
        return None

    def read_ahead(self, epoch: int, window: int, lanes: range) -> None:
        """Have the kernel read what a window of these lanes needs."""
        for lane in lanes if self._reads_ahead else ():
            for first, last in self.order.runs(epoch, window, lane):
                self.store.will_need(first, last)
