"""Memory that workers write images into and the rank reads them from: nothing is copied.

A batch is handed out as a tensor over its buffer. The buffer is free again when that tensor, and
every view of it, is gone; whoever keeps batches costs memory and gets no wrong pixels.
"""

import weakref
from collections.abc import Iterator
from math import prod
from mmap import mmap

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, get_worker_info

from lipnext_scale.data.batches import BatchMaker, MadeBatch

Request = tuple[int, int | None]  # a step, and the buffer for its images if one is free
# Beside those under way: the batch that is trained on, the next one that is handed out meanwhile,
# and one to spare.
HANDED_OUT = 3


class BatchBuffers(Dataset[MadeBatch]):
    """Indexed by requests; `under_way`: how many batches are made ahead."""

    def __init__(self, maker: BatchMaker, under_way: int) -> None:
        self._maker = maker
        buffers = under_way + HANDED_OUT
        # Forked processes share it. It has no name that could outlive them, and is not counted
        # against /dev/shm, of which a container has little.
        memory = mmap(-1, buffers * prod(maker.shape))
        self._images = np.frombuffer(memory, dtype=np.uint8).reshape(buffers, *maker.shape)
        # The step that each buffer holds, plus one; 0: nothing yet.
        self._ready = np.frombuffer(mmap(-1, 8 * buffers), dtype=np.int64)
        self._free = list(range(buffers))

    def requests(self, first: int) -> Iterator[Request]:
        """Steps without end, each with a buffer, or none if somebody keeps them all."""
        step = first
        while True:
            yield step, self._free.pop() if self._free else None
            step += 1

    def __getitem__(self, request: Request) -> MadeBatch:
        step, buffer = request
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
