"""Worker processes: torch's DataLoader, told how to start and how to end."""

import gc
import multiprocessing
import signal
import threading
import weakref
from collections.abc import Iterable, Iterator
from ctypes import CDLL, c_int, c_ulong
from dataclasses import dataclass, field
from itertools import count
from math import prod
from mmap import mmap
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from typing import Any, TypeVar

import cv2
import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, get_worker_info

from lipnext_scale.cpu import keep_freed_memory
from lipnext_scale.data.source import BadReport, Source, Stages

# --------------------------------------------------------------------------------------------------
# Making batches: what one rank gets of the global batch of a step, out of all sources.
#
# Runs in the rank's own process or in its workers, with the same outcome.


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


# --------------------------------------------------------------------------------------------------
# Memory that workers write images into and the rank reads them from: nothing is copied.
#
# A batch is handed out as a tensor over its buffer. The buffer is free again when that tensor,
# and every view of it, is gone; whoever keeps batches costs memory and gets no wrong pixels.
#
# A worker that is free makes the next batch that nobody has begun. Taking turns would let the
# slowest set the pace of all; the rank puts the batches back in order, of which as many are away
# as there are workers, at most.

Request = int | None  # the buffer for a batch's images, if one is free
# Beside those under way: the batch that is trained on, the next one that is handed out meanwhile,
# and one to spare.
HANDED_OUT = 3


class BatchBuffers(Dataset[MadeBatch]):
    """Indexed by requests: the batches from step `first` on; each worker makes `prefetch` ahead."""

    def __init__(self, maker: BatchMaker, first: int, workers: int, prefetch: int) -> None:
        self._maker, self._first = maker, first
        self._under_way = under_way = workers * prefetch
        # Where a worker stands still, as many batches wait for its own as are asked for meanwhile.
        # Memory that is never written to costs nothing.
        buffers = 2 * under_way + HANDED_OUT
        processes = multiprocessing.get_context("fork")
        self._begun = processes.Value("q", first)
        # Without it, whoever waits for a batch of a worker that hangs would take ever more of the
        # others into memory.
        self._ahead = processes.Semaphore(under_way) if under_way else None
        # Forked processes share it. It has no name that could outlive them, and is not counted
        # against /dev/shm, of which a container has little.
        memory = mmap(-1, buffers * prod(maker.shape))
        self._images = np.frombuffer(memory, dtype=np.uint8).reshape(buffers, *maker.shape)
        # The step that each buffer holds, plus one; 0: nothing yet.
        self._ready = np.frombuffer(mmap(-1, 8 * buffers), dtype=np.int64)
        self._free = list(range(buffers))

    def requests(self) -> Iterator[Request]:
        """Buffers without end, or none if somebody keeps them all."""
        while True:
            yield self._free.pop() if self._free else None

    def __getitem__(self, buffer: Request) -> MadeBatch:
        step = self._next_step()
        worker = get_worker_info()
        number, workers = (worker.id, worker.num_workers) if worker else (0, 1)
        images = np.empty(self._maker.shape, np.uint8) if buffer is None else self._images[buffer]
        made = self._maker.make(step, images, number, workers)
        if buffer is None:
            made.images = images
        else:
            made.buffer = buffer
            self._ready[buffer] = step + 1
        return made

    def _next_step(self) -> int:
        if self._ahead is not None:
            self._ahead.acquire()
        with self._begun.get_lock():
            step = self._begun.value
            self._begun.value += 1
        return step

    def release_waiters(self) -> None:
        """Nobody takes what comes any more: those who wait for their turn must see the end."""
        if self._ahead is not None:
            for _ in range(self._under_way):  # more are never asked for at a time
                self._ahead.release()

    def in_order(self, batches: Iterator[MadeBatch]) -> Iterator[MadeBatch]:
        """The batches step by step, as they come from workers of different speed."""
        early: dict[int, MadeBatch] = {}
        for step in count(self._first):
            while step not in early:
                made = next(batches)
                early[made.step] = made
            if self._ahead is not None:
                self._ahead.release()
            yield early.pop(step)

    def take(self, made: MadeBatch, pin_memory: bool = False) -> Tensor:
        """The images of a batch, [B, C, H, W] with channels last."""
        if made.buffer is None:
            assert made.images is not None
            held = made.images
        else:
            held = self._images[made.buffer]
            # torch keeps this very array for as long as any tensor shares its memory.
            weakref.finalize(held, self._free.append, made.buffer).atexit = False
        images = torch.from_numpy(held)
        if pin_memory:
            images = torch.empty(images.shape, dtype=torch.uint8, pin_memory=True).copy_(images)
        return images.permute(0, 3, 1, 2)

    def ready_after(self, step: int) -> int:
        """How many later batches are finished and wait."""
        return int((self._ready > step + 1).sum())


Made = TypeVar("Made")
_PR_SET_PDEATHSIG = 1


def made_by_workers(
    dataset: Dataset[Made],
    requests: Iterable[Any],
    workers: int,
    prefetch: int = 2,
    in_order: bool = True,
) -> Iterator[Made]:
    """dataset[request] for every request, made by processes, or here if there are none.

    in_order: in turn. Otherwise whoever is free gets the next, and what is made comes at once.

    The processes end with the iterator, or with ours.
    """
    before = multiprocessing.active_children()
    made = iter(
        DataLoader(
            dataset,
            sampler=requests,
            batch_size=None,
            num_workers=workers,
            prefetch_factor=prefetch if workers else None,
            in_order=in_order,
            worker_init_fn=start_worker,
            # The quickest start, and scripts need no `if __name__ == "__main__"`. Workers touch
            # neither the GPU nor other processes.
            multiprocessing_context="fork" if workers else None,
            # It draws a seed, which nothing here uses, and must not draw it from the run's own.
            generator=torch.Generator(),
        )
    )
    processes = [process for process in multiprocessing.active_children() if process not in before]
    # At the exit of ours, multiprocessing asks its children to end by a signal that workers leave
    # to their rank, and waits for them: so they are ended before, where an error kept the iterator.
    Finalize(made, _end, args=(processes,), exitpriority=1)
    return _waiting_for_workers(made, processes)


def _waiting_for_workers(made: Iterator[Made], processes: list[BaseProcess]) -> Iterator[Made]:
    """torch raises where a worker's end reaches us as a signal. Where that happens in a finalizer
    Python drops the error, and those that are left would go on with ever less to do."""
    for item in made:
        for process in processes:
            if not process.is_alive():
                raise RuntimeError(f"DataLoader worker (pid {process.pid}) has ended")
        yield item


def _end(processes: list[BaseProcess]) -> None:
    living = [process for process in processes if process.is_alive()]
    if living and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch would raise at their end
    for process in living:
        process.kill()


def start_worker(_number: int) -> None:
    """A worker leaves signals to its rank, which stops at a safe moment, and ends when it does."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    CDLL(None).prctl(c_int(_PR_SET_PDEATHSIG), c_ulong(signal.SIGKILL))
    cv2.setNumThreads(0)
    keep_freed_memory()
    gc.freeze()  # what is inherited is not looked through again, and so stays shared


def lost_a_worker(error: RuntimeError) -> bool:
    """Whether torch says that a worker has died; it may say so at any moment, in any call."""
    return str(error).startswith("DataLoader worker (pid")  # "Caught … in" one is another thing
