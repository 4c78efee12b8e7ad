"""Batches for training: endless, in an order that is a pure function of (seed, epoch, step).

A loader's state is its place in each source, that of the batch last handed out: what workers have
made ahead does not count. Any number of ranks and workers continues from it with the same samples.

Workers are processes of torch's DataLoader. A worker makes full batches, the next one whenever it
is free, and writes the images into buffers that it shares with the rank, so that no image is sent
or copied.
"""

import gc
import multiprocessing
import os
import signal
import threading
import time
import weakref
from collections.abc import Iterable, Iterator
from ctypes import CDLL, c_int, c_ulong
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from math import prod
from mmap import mmap
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any, TypeVar

import cv2
import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, get_worker_info

from lipnext_scale.data.source import SUBSTITUTES, BadReport, Source
from lipnext_scale.utils.config import ConfigError
from lipnext_scale.utils.cpu import keep_freed_memory
from lipnext_scale.utils.errors import RunFailed
from lipnext_scale.utils.files import write_atomically

# --------------------------------------------------------------------------------------------------
# Making batches: what one rank gets of the global batch of a step, out of all sources. Runs in the
# rank's own process or in its workers, with the same outcome.


@dataclass
class MadeBatch:
    """A batch; its images lie in a buffer, or are here if there was none."""

    step: int
    labels: np.ndarray
    ids: np.ndarray
    bad: list[BadReport] = field(default_factory=list)
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
        sizes = [source.options.batch_size for source in sources]
        assert sum(sizes) % world_size == 0, "ranks have equal shares"
        self.share = sum(sizes) // world_size
        first, pattern = rank * self.share, _source_pattern(sizes)
        self._mine = pattern[first : first + self.share]
        # Of each source, the places [start, stop) of its part of the batch that are this rank's.
        self._places = []
        for number in range(len(sources)):
            start = int((pattern[:first] == number).sum())
            self._places.append((start, start + int((self._mine == number).sum())))
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
        """Write the images of a step into out; the rest of the batch."""
        made = MadeBatch(step, np.empty(self.share, dtype=np.int64), self.sample_ids(step))
        for number, source in enumerate(self.sources):
            self._look_ahead(number, step, worker, workers)
            where = np.flatnonzero(self._mine == number)
            ids = made.ids[where] - self._numbers[number]
            epoch = source.place_of(step)[0]
            labels, bad = source.fill(epoch, ids, out, where.tolist())
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


def _source_pattern(parts: list[int]) -> np.ndarray:
    """Which source each place of a batch belongs to, for parts of one or two sources."""
    assert 1 <= len(parts) <= 2
    places, first = np.arange(sum(parts)), parts[0]
    ended = (places + 1) * first // sum(parts) > places * first // sum(parts)
    return np.where(ended, 0, 1)


# --------------------------------------------------------------------------------------------------
# Memory that workers write images into and the rank reads them from: nothing is copied.
#
# A batch is handed out as a tensor over its buffer. The buffer is free again when that tensor,
# and every view of it, is gone; batches that are kept cost memory, never wrong pixels.
#
# A worker that is free makes the next batch that no other has begun. Taking turns would let the
# slowest set the pace of all; the rank puts the batches back in order.

# Beside those under way: the batch that is trained on, the next one that is handed out meanwhile,
# and one to spare.
HANDED_OUT = 3


class BatchBuffers(Dataset[MadeBatch]):
    """The batches from step `first` on; each worker makes `prefetch` ahead. Indexed by the buffer
    for the images, None if there is no free one."""

    def __init__(self, maker: BatchMaker, first: int, workers: int, prefetch: int) -> None:
        self._maker, self._first = maker, first
        self._under_way = under_way = workers * prefetch
        # Where a worker stands still, as many batches wait for its own as are asked for meanwhile.
        # Memory that is never written to costs nothing.
        buffers = 2 * under_way + HANDED_OUT
        processes = multiprocessing.get_context("fork")
        self._begun = processes.Value("q", first)
        # Without it, a rank that waits for a worker that hangs would take ever more batches of the
        # others into memory.
        self._ahead = processes.Semaphore(under_way or 1)
        # Forked processes share it. It has no name that could outlive them, and is not counted
        # against /dev/shm, of which a container has little.
        memory = mmap(-1, buffers * prod(maker.shape))
        self._images = np.frombuffer(memory, dtype=np.uint8).reshape(buffers, *maker.shape)
        self._free = list(range(buffers))

    def requests(self) -> Iterator[int | None]:
        while True:
            yield self._free.pop() if self._free else None

    def __getitem__(self, buffer: int | None) -> MadeBatch:
        self._ahead.acquire()
        with self._begun.get_lock():
            step = self._begun.value
            self._begun.value += 1
        worker = get_worker_info()
        number, workers = (worker.id, worker.num_workers) if worker else (0, 1)
        images = np.empty(self._maker.shape, np.uint8) if buffer is None else self._images[buffer]
        made = self._maker.make(step, images, number, workers)
        made.buffer, made.images = buffer, images if buffer is None else None
        return made

    def release_waiters(self) -> None:
        """No more batches are taken: workers that wait for their turn must see the end."""
        for _ in range(self._under_way):  # more are never asked for at a time
            self._ahead.release()

    def in_order(self, batches: Iterator[MadeBatch]) -> Iterator[MadeBatch]:
        """The batches step by step, as they come from workers of different speed."""
        early: dict[int, MadeBatch] = {}
        for step in count(self._first):
            while step not in early:
                made = next(batches)
                early[made.step] = made
            self._ahead.release()
            yield early.pop(step)

    def take(self, made: MadeBatch, pin_memory: bool = False) -> Tensor:
        """The images of a batch, [B, C, H, W] with channels last."""
        held = made.images if made.buffer is None else self._images[made.buffer]
        if made.buffer is not None:
            # torch keeps this very array for as long as any tensor shares its memory.
            weakref.finalize(held, self._free.append, made.buffer).atexit = False
        images = torch.from_numpy(held)
        if pin_memory:
            images = torch.empty(images.shape, dtype=torch.uint8, pin_memory=True).copy_(images)
        return images.permute(0, 3, 1, 2)


# --------------------------------------------------------------------------------------------------
# Worker processes.

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

    in_order: in turn. Otherwise a free worker gets the next, and what is made comes at once.

    The processes end with the iterator, or with ours.
    """
    before = multiprocessing.active_children()
    made = iter(
        DataLoader(
            dataset,
            sampler=requests,
            batch_size=None,
            collate_fn=lambda item: item,  # torch would make tensors, which go through /dev/shm
            num_workers=workers,
            prefetch_factor=prefetch if workers else None,
            in_order=in_order,
            worker_init_fn=partial(start_worker, os.getpid()),
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
    return _while_all_live(made, processes)


def _while_all_live(made: Iterator[Made], processes: list[BaseProcess]) -> Iterator[Made]:
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


def start_worker(rank_pid: int, _number: int) -> None:
    """A worker leaves signals to its rank, which stops at a safe moment, and ends when it does."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    end_with_parent(rank_pid)
    cv2.setNumThreads(0)
    keep_freed_memory()
    gc.freeze()  # what is inherited is not looked through again, and so stays shared


def end_with_parent(parent: int) -> None:
    """This process is killed when its parent, of this pid, ends."""
    CDLL(None).prctl(c_int(_PR_SET_PDEATHSIG), c_ulong(signal.SIGKILL))
    if os.getppid() != parent:  # it died before the line above
        os._exit(1)


def lost_a_worker(error: RuntimeError) -> bool:
    """Whether a worker has died; torch may raise this at any moment, in any call."""
    return str(error).startswith("DataLoader worker (pid")  # "Caught … in" one is another thing


# --------------------------------------------------------------------------------------------------
# What loading costs, and samples that could not be used.


class LoadingStats:
    """The share of the time that training waited for data, and bad samples, since the last take."""

    def __init__(self) -> None:
        self.bad: list[BadReport] = []
        self.waited, self._since = 0.0, time.perf_counter()

    def take(self) -> dict[str, float]:
        now = time.perf_counter()
        share = self.waited / max(now - self._since, 1e-9)
        self.waited, self._since = 0.0, now
        return {"data/wait_share": share}

    def take_bad(self) -> list[BadReport]:
        bad, self.bad = self.bad, []
        return bad


NAMED_AT_ONCE = 10


class BadSamples:
    """Counts bad samples. All ranks add the same reports, so they agree on when there are too many.

    listed: the file that names each of them once, however often the run is started. writes: this
    rank keeps it.
    """

    def __init__(self, limit: int, listed: Path, writes: bool = True) -> None:
        self._limit, self._listed, self._writes = limit, listed, writes
        self._known: set[tuple[str, int]] = set()

    def __len__(self) -> int:
        return len(self._known)

    def add(self, reports: list[BadReport]) -> list[str]:
        """Lines for the log on the new ones, at most NAMED_AT_ONCE and how many more there are;
        too many in all end the run."""
        new = {(bad.source, bad.sample): bad for bad in reports}
        names = [
            f"{bad.source}: {bad.name} {bad.reason}"
            for key, bad in new.items()
            if key not in self._known
        ]
        self._known |= new.keys()
        if names and self._writes:
            names = self._write(names)
        if len(self._known) > self._limit:
            raise RunFailed(
                f"{len(self._known)} bad samples, more than data.bad_sample_limit = {self._limit}; "
                f"{self._listed} names them"
            )
        lines = [f"{name}: another one replaces it" for name in names[:NAMED_AT_ONCE]]
        if more := len(names[NAMED_AT_ONCE:]):
            lines.append(f"… and {more} more bad samples at once: {self._listed} names all")
        return lines

    def _write(self, names: list[str]) -> list[str]:
        """Add names to the list; those that an earlier start of the run has not put there."""
        old = self._listed.read_text("utf-8").splitlines() if self._listed.exists() else []
        new = [name for name in names if name not in set(old)]
        if new:
            write_atomically(self._listed, "".join(f"{name}\n" for name in old + new).encode())
        return new


def _require_usable(made: MadeBatch) -> None:
    """No sample of the batch is bad without another in its place."""
    for bad in made.bad:
        if not bad.replaced:
            ways_out = "python -m data_prep.verify --decode finds all such samples"
            if len(made.bad) <= SUBSTITUTES:  # else it was tried
                ways_out = f"data.on_bad_sample=substitute goes on without them, {ways_out}"
            raise RunFailed(f"{bad.source}: {bad.name} {bad.reason}; {ways_out}")


# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Batch:
    """A rank's uint8 images [B, C, H, W], labels [B], and where in the training they stand."""

    images: Tensor
    labels: Tensor
    ids: np.ndarray
    epoch: int
    last_of_epoch: bool


class StreamLoader:
    """The share of one rank: endless batches. An epoch is one of the first source, the real data.
    The state is that of the batch last handed out."""

    def __init__(
        self, maker: BatchMaker, workers: int = 0, prefetch: int = 2, pin_memory: bool = False
    ) -> None:
        self._maker, self._workers, self._prefetch = maker, workers, prefetch
        self._pin_memory = pin_memory
        self._step = 0
        self.sources, self.share = maker.sources, maker.share
        self.stats = LoadingStats()

    @property
    def steps_per_epoch(self) -> int:
        return self.sources[0].order.steps_per_epoch

    def __iter__(self) -> Iterator[Batch]:
        buffers = BatchBuffers(self._maker, self._step, self._workers, self._prefetch)
        made_anyhow = made_by_workers(
            buffers, buffers.requests(), self._workers, self._prefetch, in_order=False
        )
        batches = buffers.in_order(made_anyhow)
        self.stats.take()  # what went before was no waiting for data
        try:
            while True:
                began = time.perf_counter()
                made = next(batches)
                self.stats.waited += time.perf_counter() - began
                _require_usable(made)
                self.stats.bad += made.bad
                self._step = made.step + 1
                images = buffers.take(made, self._pin_memory)
                epoch, step = self.sources[0].place_of(made.step)
                last = step + 1 == self.steps_per_epoch
                yield Batch(images, torch.from_numpy(made.labels), made.ids, epoch, last)
        finally:
            buffers.release_waiters()
            del batches, made_anyhow  # ends the workers

    def state_dict(self) -> dict[str, Any]:
        """The place of each source, (epoch, step in it) of the next batch."""
        sources = []
        for source in self.sources:
            epoch, step = source.place_of(self._step)
            samples = source.catalog.fingerprint()
            sources.append(
                {"set": source.catalog.key, "epoch": epoch, "step": step, "samples": samples}
            )
        return {"step": self._step, "sources": sources}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for source, then in zip(self.sources, state["sources"], strict=True):
            catalog = source.catalog
            if then["samples"] != catalog.fingerprint():
                right = "these are not the samples that the run was trained on so far"
                raise ConfigError(catalog.key, catalog.pattern, right)
        self._step = int(state["step"])
