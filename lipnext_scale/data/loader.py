"""Batches for training: endless, in an order that is a pure function of (seed, epoch, step).

A loader's state is its place in each source, that of the batch last handed out: what workers have
made ahead does not count. Any number of ranks and workers continues from it with the same samples.

Workers are processes of torch's DataLoader. A worker makes whole batches, the next one whenever it
is free, and writes the images into buffers that it shares with the rank, so that no image is sent
or copied.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from lipnext_scale.config import ConfigError
from lipnext_scale.data.source import SUBSTITUTES, BadReport, Source, Stages
from lipnext_scale.data.workers import BatchBuffers, BatchMaker, MadeBatch, made_by_workers
from lipnext_scale.errors import RunFailed
from lipnext_scale.files import write_atomically

# --------------------------------------------------------------------------------------------------
# What loading costs: how long training waited, what the stages take, how much is ready.


class LoadingStats:
    """Gathered from batch to batch; `take` tells them and starts anew."""

    def __init__(self) -> None:
        self._bad: list[BadReport] = []
        self._reset()

    def _reset(self) -> None:
        self._waited, self._since = 0.0, time.perf_counter()
        self._stages, self._ready, self._batches = Stages(), 0, 0

    @contextmanager
    def waiting(self) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self._waited += time.perf_counter() - began

    def note(self, made: MadeBatch, ready: int) -> None:
        self._stages.add(made.stages)
        self._bad += made.bad
        self._ready += ready
        self._batches += 1

    def take(self) -> dict[str, float]:
        """Images/s of a stage are those of one process that does nothing else."""
        passed = max(time.perf_counter() - self._since, 1e-9)
        stages = self._stages
        told = {
            "data/wait_share": self._waited / passed,
            "data/ready_batches": self._ready / max(1, self._batches),
        }
        for name in ("read", "decode", "augment"):
            seconds = getattr(stages, name)
            if seconds:
                told[f"data/{name}_images_per_second"] = stages.images / seconds
        self._reset()
        return told

    def take_bad(self) -> list[BadReport]:
        bad, self._bad = self._bad, []
        return bad


# --------------------------------------------------------------------------------------------------
# Keeping account of samples that could not be used: each is named once, and not for ever.

NAMED_AT_ONCE = 10


class BadSamples:
    """All ranks add the same reports, so they agree on when there are too many.

    listed: the file that names each of them once, whatever a log has room for and however often
    the run is started. writes: this rank is the one that keeps it.
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
        lines = [f"{name}: another one stands in for it" for name in names[:NAMED_AT_ONCE]]
        if more := len(names[NAMED_AT_ONCE:]):
            lines.append(f"… and {more} more bad samples at once: {self._listed} names all")
        return lines

    def _write(self, names: list[str]) -> list[str]:
        """Add names to the list; those that an earlier start of the run has not put there."""
        there = self._listed.read_text("utf-8").splitlines() if self._listed.exists() else []
        new = [name for name in names if name not in set(there)]
        if new:
            write_atomically(self._listed, "".join(f"{name}\n" for name in there + new).encode())
        return new


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
            buffers.release_waiters()
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
