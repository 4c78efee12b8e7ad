"""Batches in an order that is a pure function of (seed, epoch, step)."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from lipnext_scale.config import ConfigError
from lipnext_scale.data.augment import random_crop, random_flip
from lipnext_scale.data.config import DataConfig
from lipnext_scale.data.samples import Samples


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


class MemoryLoader:
    """A set in memory, shuffled anew each epoch; what does not fill a batch waits for the next.

    Every rank gets its share of the same global batches, the same whatever the number of ranks.
    """

    def __init__(
        self, samples: Samples, config: DataConfig, seed: int, rank: int = 0, world_size: int = 1
    ) -> None:
        if len(samples) < config.batch_size:
            raise ConfigError(
                "data.batch_size",
                config.batch_size,
                f"must be at most the {len(samples)} samples of data.train = {config.train!r}",
            )
        assert config.batch_size % world_size == 0, "ranks have equal shares"
        self._rank, self._world_size = rank, world_size
        self._samples, self._config, self._seed = samples, config, seed
        self._epoch, self._step = 0, 0
        self._fingerprint = samples.fingerprint()

    @property
    def steps_per_epoch(self) -> int:
        return len(self._samples) // self._config.batch_size

    def __iter__(self) -> Iterator[Batch]:
        while True:
            order = epoch_order(len(self._samples), self._seed, self._epoch)
            while self._step < self.steps_per_epoch:
                batch = self._batch(order, self._epoch, self._step)
                self._step += 1
                yield batch
            self._epoch, self._step = self._epoch + 1, 0

    def _batch(self, order: np.ndarray, epoch: int, step: int) -> Batch:
        size, share = self._config.batch_size, self._config.batch_size // self._world_size
        start = step * size + self._rank * share
        ids = order[start : start + share]
        chosen = torch.from_numpy(ids)
        images = self._samples.images[chosen]
        images = random_crop(images, self._config.crop_padding, self._seed, epoch, ids)
        if self._config.flip:
            images = random_flip(images, self._seed, epoch, ids)
        last = step + 1 == self.steps_per_epoch
        return Batch(images, self._samples.labels[chosen], ids, epoch, last)

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self._epoch, "step": self._step, "samples": self._fingerprint}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["samples"] != self._fingerprint:
            raise ConfigError(
                "data.train",
                self._config.train,
                "these are not the samples that the run was trained on so far",
            )
        self._epoch, self._step = int(state["epoch"]), int(state["step"])


def epoch_order(count: int, seed: int, epoch: int) -> np.ndarray:
    """The permutation of an epoch."""
    return np.random.default_rng([seed, epoch]).permutation(count)


def rank_share(count: int, rank: int, world_size: int) -> tuple[Tensor, Tensor]:
    """(sample numbers, whether each counts) of a rank: every sample counts on exactly one.

    All ranks get equally many, so that they make the same passes together: where the samples do not
    divide evenly the last one is repeated, and does not count.
    """
    share = -(-count // world_size)
    ids = torch.arange(rank, rank + share * world_size, world_size)
    return ids.clamp(max=count - 1), ids < count
