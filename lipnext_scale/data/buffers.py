"""Memory that workers write images into and the rank reads them from: nothing is copied.

A batch is handed out as a tensor over its buffer. The buffer is free again when that tensor, and
every view of it, is gone; whoever keeps batches costs memory and gets no wrong pixels.

A worker that is free makes the next batch that nobody has begun. Taking turns would let the slowest
set the pace of all; the rank puts the batches back in order, of which as many are away as there are
workers, at most.
"""

import multiprocessing
import weakref
from collections.abc import Iterator
from itertools import count
from math import prod
from mmap import mmap

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, get_worker_info

from lipnext_scale.data.batches import BatchMaker, MadeBatch

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

    def let_go(self) -> None:
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
