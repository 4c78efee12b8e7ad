"""Making batches: what one rank gets of the global batch of a step, out of all sources.

Runs in the rank's own process or in its workers, with the same outcome.
"""

from dataclasses import dataclass, field

import numpy as np

from lipnext_scale.data.source import BadReport, Source, Stages


@dataclass
class MadeBatch:
    """A batch; its images lie in a buffer, or are here if there was none."""

    step: int
    labels: np.ndarray
    ids: np.ndarray
    bad: list[BadReport] = field(default_factory=list)
    stages: Stages = field(default_factory=Stages)
    buffer: int | None = None
    images: np.ndarray | None = None


class BatchMaker:
    """The shares of rank `rank` of `world_size`.

    Places of the global batch belong to the sources in an even pattern, so that every rank, and
    every part of a rank's share, has the same mixture, to within one sample. Samples of the second
    source are numbered after those of the first.
    """

    def __init__(self, sources: list[Source], rank: int = 0, world_size: int = 1) -> None:
        self.sources = sources
        batch_size = sum(source.options.batch_size for source in sources)
        assert batch_size % world_size == 0, "ranks have equal shares"
        self.share = batch_size // world_size
        first = rank * self.share
        pattern = source_pattern([source.options.batch_size for source in sources])
        self._mine = pattern[first : first + self.share]
        # Of each source, the places [start, stop) of its part of the batch that are this rank's.
        self._places = [
            (int((pattern[:first] == number).sum()),
             int((pattern[: first + self.share] == number).sum()))
            for number in range(len(sources))
        ]  # fmt: skip
        self._numbers = np.cumsum([0, *(len(source.catalog) for source in sources)])
        self._read_ahead: dict[int, tuple[int, int]] = {}

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Of a rank's images [share, height, width, channels]."""
        options = self.sources[0].options
        return self.share, options.image_size, options.image_size, options.channels

    def sample_ids(self, step: int) -> np.ndarray:
        """The samples of this rank's share, without reading them."""
        ids = np.empty(self.share, dtype=np.int64)
        for number, source in enumerate(self.sources):
            epoch, own_step = source.place_of(step)
            chosen = source.order.ids(epoch, own_step, *self._places[number])
            ids[self._mine == number] = chosen + self._numbers[number]
        return ids

    def make(self, step: int, out: np.ndarray, worker: int = 0, workers: int = 1) -> MadeBatch:
        """Write the images of a step into out and tell the rest."""
        made = MadeBatch(step, np.empty(self.share, dtype=np.int64), self.sample_ids(step))
        for number, source in enumerate(self.sources):
            self._look_ahead(number, step, worker, workers)
            where = np.flatnonzero(self._mine == number)
            ids = made.ids[where] - self._numbers[number]
            epoch = source.place_of(step)[0]
            labels, bad = source.fill(epoch, ids, out, where.tolist(), made.stages)
            made.labels[where] = labels
            made.bad += bad
        return made

    def _look_ahead(self, number: int, step: int, worker: int, workers: int) -> None:
        """At the first step in a window, ask for what the next one needs; workers share it."""
        source = self.sources[number]
        epoch, own_step = source.place_of(step)
        window = own_step // source.order.steps_per_window
        before, self._read_ahead[number] = self._read_ahead.get(number), (epoch, window)
        if before == (epoch, window):
            return
        lanes = source.order.lanes_of(*self._places[number])[worker::workers]
        if before is None:
            source.read_ahead(epoch, window, lanes)
        if (window + 1) * source.order.steps_per_window < source.order.steps_per_epoch:
            source.read_ahead(epoch, window + 1, lanes)
        else:
            source.read_ahead(epoch + 1, 0, lanes)


def source_pattern(parts: list[int]) -> np.ndarray:
    """Which source each place of a batch belongs to, for parts of one or two sources."""
    assert 1 <= len(parts) <= 2
    places, first = np.arange(sum(parts)), parts[0]
    ended = (places + 1) * first // sum(parts) > places * first // sum(parts)
    return np.where(ended, 0, 1)
