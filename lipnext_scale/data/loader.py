"""Batches for training: endless, in an order that is a pure function of (seed, epoch, step).

A loader's state is its place in each source, that of the batch last handed out: what workers have
made ahead does not count. Any number of ranks and workers continues from it with the same samples.

Workers are processes of torch's DataLoader. A worker makes whole batches, in turn with the others,
and writes the images into a ring of buffers that it shares with the rank, so that no image travels
through a pipe; the rank copies a batch out of the ring when it hands it out.
"""

import signal
from collections.abc import Iterable, Iterator
from ctypes import CDLL, c_int, c_ulong
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import cv2
import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, get_worker_info

from lipnext_scale.config import ConfigError
from lipnext_scale.data.batches import BatchMaker, MadeBatch
from lipnext_scale.data.loading_stats import LoadingStats
from lipnext_scale.data.source import Source
from lipnext_scale.errors import RunFailed

Made = TypeVar("Made")


@dataclass(frozen=True)
class Batch:
    """A rank's uint8 images [B, C, H, W], labels [B], and where in the training they stand."""

    images: Tensor
    labels: Tensor
    ids: np.ndarray
    epoch: int
    last_of_epoch: bool


class Loader(Protocol):
    """Endless batches across epochs. Its state is that of the batch last handed out."""

    @property
    def steps_per_epoch(self) -> int: ...

    def __iter__(self) -> Iterator[Batch]: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class StreamLoader:
    """The share of one rank. An epoch is one of the first source, the real data."""

    def __init__(
        self, maker: BatchMaker, workers: int = 0, prefetch: int = 2, pin_memory: bool = False
    ) -> None:
        self._maker, self._workers, self._prefetch = maker, workers, prefetch
        self._pin_memory = pin_memory
        self._step = 0
        self._fingerprints = [source.catalog.fingerprint() for source in maker.sources]
        self.stats = LoadingStats()

    @property
    def sources(self) -> list[Source]:
        return self._maker.sources

    @property
    def share(self) -> int:
        """Images of a batch of this rank."""
        return self._maker.share

    @property
    def steps_per_epoch(self) -> int:
        return self._maker.sources[0].order.steps_per_epoch

    def __iter__(self) -> Iterator[Batch]:
        ring = BufferRing(self._maker, self._workers * self._prefetch + 1)
        batches = made_by_workers(ring, _StepsFrom(self._step), self._workers, self._prefetch)
        try:
            while True:
                with self.stats.waiting():
                    made: MadeBatch = next(batches)
                    images = ring.take(made.step, self._pin_memory)
                require_usable(made)
                self.stats.note(made, ring.ready_after(made.step))
                self._step = made.step + 1
                yield self._batch(made, images)
        finally:
            del batches  # ends the workers

    def _batch(self, made: MadeBatch, images: Tensor) -> Batch:
        epoch, step = self._maker.sources[0].place_of(made.step)
        last = step + 1 == self.steps_per_epoch
        return Batch(images, torch.from_numpy(made.labels), made.ids, epoch, last)

    def state_dict(self) -> dict[str, Any]:
        """The place of each source, (epoch, step in it) of the next batch."""
        places = [source.place_of(self._step) for source in self._maker.sources]
        return {
            "step": self._step,
            "sources": [
                {"set": source.catalog.key, "epoch": epoch, "step": step, "samples": fingerprint}
                for source, (epoch, step), fingerprint in zip(
                    self._maker.sources, places, self._fingerprints, strict=True
                )
            ],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for source, fingerprint, then in zip(
            self._maker.sources, self._fingerprints, state["sources"], strict=True
        ):
            if then["samples"] != fingerprint:
                raise ConfigError(
                    source.catalog.key,
                    source.catalog.pattern,
                    "these are not the samples that the run was trained on so far",
                )
        self._step = int(state["step"])


def require_usable(made: MadeBatch) -> None:
    """No sample of the batch is bad without another in its place."""
    for bad in made.bad:
        if not bad.replaced:
            raise RunFailed(
                f"{bad.source}: {bad.name} {bad.reason}; data.on_bad_sample=substitute goes on "
                "without such samples, python -m data_prep.verify --decode finds them all"
            )


class _StepsFrom:
    """Steps without end; torch takes any iterable as a sampler."""

    def __init__(self, first: int) -> None:
        self._first = first

    def __iter__(self) -> Iterator[int]:
        step = self._first
        while True:
            yield step
            step += 1


class BufferRing(Dataset[MadeBatch]):
    """As many buffers as batches can be under way, and one more for the batch being taken.

    Step s lies in buffer s modulo their number. torch asks for a new batch, `workers · prefetch`
    steps ahead, just before it hands one out: with one buffer more, that one's is not written to.
    """

    def __init__(self, maker: BatchMaker, buffers: int) -> None:
        self._maker = maker
        self._images = torch.empty((buffers, *maker.shape), dtype=torch.uint8)
        # The step that each buffer holds, plus one; 0: nothing yet.
        self._ready = torch.zeros(buffers, dtype=torch.int64)
        if buffers > 1:
            self._images.share_memory_()
            self._ready.share_memory_()

    def __getitem__(self, step: int) -> MadeBatch:
        worker = get_worker_info()
        number, workers = (worker.id, worker.num_workers) if worker else (0, 1)
        buffer = step % len(self._images)
        made = self._maker.make(step, self._images[buffer].numpy(), number, workers)
        self._ready[buffer] = step + 1
        return made

    def take(self, step: int, pin_memory: bool = False) -> Tensor:
        """The images of a step as a tensor of their own, [B, C, H, W] with channels last."""
        held = self._images[step % len(self._images)]
        images = torch.empty(held.shape, dtype=torch.uint8, pin_memory=pin_memory)
        return images.copy_(held).permute(0, 3, 1, 2)

    def ready_after(self, step: int) -> int:
        """How many later batches are finished and wait."""
        return int((self._ready > step + 1).sum())


def made_by_workers(
    dataset: Dataset[Made], order: Iterable[int], workers: int, prefetch: int = 2
) -> Iterator[Made]:
    """dataset[i] for every i in turn, made by worker processes, or here if there are none."""
    return iter(
        DataLoader(
            dataset,
            sampler=order,
            batch_size=None,
            num_workers=workers,
            prefetch_factor=prefetch if workers else None,
            worker_init_fn=start_worker,
            # The quickest start, and scripts need no `if __name__ == "__main__"`. Workers touch
            # neither the GPU nor other processes.
            multiprocessing_context="fork" if workers else None,
            # It draws a seed, which nothing here uses, and must not draw it from the run's own.
            generator=torch.Generator(),
        )
    )


def start_worker(_number: int) -> None:
    """A worker leaves signals to its rank, which stops at a safe moment, and ends when it does."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    set_parent_death_signal = 1  # PR_SET_PDEATHSIG
    CDLL(None).prctl(c_int(set_parent_death_signal), c_ulong(signal.SIGKILL))
    cv2.setNumThreads(0)


def lost_a_worker(error: RuntimeError) -> bool:
    """Whether torch says that a worker has died; it may say so at any moment, in any call."""
    return "DataLoader worker" in str(error)
