"""Batches for training: endless, in an order that is a pure function of (seed, epoch, step).

A loader's state is its place in each source, that of the batch last handed out: what workers have
made ahead does not count. Any number of ranks and workers continues from it with the same samples.

Workers are processes of torch's DataLoader. A worker makes whole batches, the next one whenever it
is free, and writes the images into buffers that it shares with the rank, so that no image is sent
or copied.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from lipnext_scale.config import ConfigError
from lipnext_scale.data.batches import BatchMaker, MadeBatch
from lipnext_scale.data.buffers import BatchBuffers
from lipnext_scale.data.loading_stats import LoadingStats
from lipnext_scale.data.source import SUBSTITUTES, Source
from lipnext_scale.data.workers import made_by_workers
from lipnext_scale.errors import RunFailed


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
        buffers = BatchBuffers(self._maker, self._step, self._workers, self._prefetch)
        made_anyhow = made_by_workers(
            buffers, buffers.requests(), self._workers, self._prefetch, in_order=False
        )
        batches = buffers.in_order(made_anyhow)
        self.stats.take()  # what went before was no waiting for data
        try:
            while True:
                with self.stats.waiting():
                    made = next(batches)
                require_usable(made)
                self.stats.note(made, buffers.ready_after(made.step))
                self._step = made.step + 1
                yield self._batch(made, buffers.take(made, self._pin_memory))
        finally:
            buffers.let_go()
            del batches, made_anyhow  # ends the workers

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
            ways_out = "python -m data_prep.verify --decode finds all such samples"
            if len(made.bad) < SUBSTITUTES:  # else it was tried
                ways_out = f"data.on_bad_sample=substitute goes on without them, {ways_out}"
            raise RunFailed(f"{bad.source}: {bad.name} {bad.reason}; {ways_out}")
