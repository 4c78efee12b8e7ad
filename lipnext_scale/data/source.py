"""A source: one set of shards in its own order, with its own place and its own augmentation."""

from dataclasses import dataclass, field
from time import perf_counter

import numpy as np

from lipnext_scale.config import ConfigError
from lipnext_scale.data.augment import AugmentConfig, Chances, augment, draw_chances
from lipnext_scale.data.catalog import Catalog
from lipnext_scale.data.decode import BadSample, Scratch
from lipnext_scale.data.order import Order, OrderConfig, choose_block
from lipnext_scale.data.randomness import below, sample_bits
from lipnext_scale.data.store import SampleStore

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
        self, sample: int, chances: Chances, index: int, out: np.ndarray, stages: Stages
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
        chances: Chances,
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
