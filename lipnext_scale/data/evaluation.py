"""Test images: every sample exactly once, on any number of ranks, always the same pixels."""

from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from lipnext_scale.data.augment import centre_crop, require_size, resize_short_side
from lipnext_scale.data.catalog import Catalog
from lipnext_scale.data.decode import BadSample
from lipnext_scale.data.store import SampleStore
from lipnext_scale.data.workers import lost_a_worker, made_by_workers
from lipnext_scale.errors import RunFailed, UserError

BATCH = 256


@dataclass(frozen=True)
class TestBatch:
    """uint8 images [B, C, H, W] with their labels, and which of them count on this rank."""

    __test__ = False  # not for pytest

    images: Tensor
    labels: Tensor
    ids: Tensor
    counted: Tensor


@dataclass(frozen=True)
class _Made:
    """A batch in arrays: tensors would come from a worker through /dev/shm, which may be small."""

    images: np.ndarray
    labels: np.ndarray
    ids: np.ndarray
    counted: np.ndarray

    def as_tensors(self) -> TestBatch:
        images = torch.from_numpy(self.images).permute(0, 3, 1, 2)
        rest = (torch.from_numpy(array) for array in (self.labels, self.ids, self.counted))
        return TestBatch(images, *rest)


class TestSet(Dataset[_Made | str]):
    """resize: the short side becomes this and the centre is cut out; 0: images have the size."""

    __test__ = False

    def __init__(
        self,
        catalog: Catalog,
        image_size: int,
        channels: int,
        resize: int = 0,
        workers: int = 0,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self.catalog, self._store = catalog, SampleStore(catalog)
        self._size, self._channels, self.resize = image_size, channels, resize
        self._workers = workers
        self._rank, self._world_size = rank, world_size
        self._take(torch.arange(len(catalog)))

    def _take(self, samples: Tensor) -> None:
        """Make this rank's share of these samples its batches."""
        places, counted = rank_share(len(samples), self._rank, self._world_size)
        self._parts = list(zip(samples[places].split(BATCH), counted.split(BATCH), strict=True))

    def spread_subset(self, count: int) -> "TestSet":
        """At most so many samples, at equal distances over the whole set: always the same ones."""
        chosen, whole = copy(self), len(self.catalog)
        chosen._take(torch.arange(min(count, whole)) * whole // min(count, whole))
        return chosen

    def in_parts(self, parts: list[Tensor]) -> "TestSet":
        """The same set in batches of these samples, which all count."""
        chosen = copy(self)
        chosen._parts = [(ids, torch.ones(len(ids), dtype=torch.bool)) for ids in parts]
        return chosen

    def image(self, sample: int) -> np.ndarray:
        """One image [H, W, C], as the model takes it."""
        out = np.empty((self._size, self._size, self._channels), dtype=np.uint8)
        self._fill(sample, out)
        return out

    def sample_name(self, sample: int) -> str:
        """The file name of a sample's shard, and its key."""
        shard, _ = self.catalog.locate(sample)
        return f"{shard.name.rpartition('/')[2]}: {self._store.key(sample)}"

    @property
    def image_shape(self) -> tuple[int, int, int]:
        return self._channels, self._size, self._size

    def __len__(self) -> int:
        """Its batches on this rank."""
        return len(self._parts)

    def __iter__(self) -> Iterator[TestBatch]:
        workers = min(self._workers, len(self))
        try:
            for made in made_by_workers(self, range(len(self)), workers):
                if isinstance(made, str):
                    raise UserError(made)
                yield made.as_tensors()
        except RuntimeError as error:
            if not lost_a_worker(error):
                raise
            raise RunFailed(f"{self.catalog.key}: a process that reads it has ended") from None

    def __getitem__(self, number: int) -> _Made | str:
        """A batch, or why there is none: an error out of a worker would be a page long."""
        ids, counted = self._parts[number]
        images = np.empty((len(ids), self._size, self._size, self._channels), dtype=np.uint8)
        try:
            labels = [self._fill(sample, images[i]) for i, sample in enumerate(ids.tolist())]
        except UserError as error:
            return str(error)
        return _Made(images, np.array(labels), ids.numpy(), counted.numpy())

    def _fill(self, sample: int, out: np.ndarray) -> int:
        """A test set is certified sample by sample, so a bad one has no substitute."""
        try:
            encoded, record = self._store.read(sample)
            image = self._store.decode(encoded, record, self._channels)
            if self.resize:
                image = centre_crop(resize_short_side(image, self.resize), self._size)
            require_size(image, self._size)
        except BadSample as reason:
            name = self._store.name(sample)
            raise UserError(f"{self.catalog.key}: {name} {reason}") from None
        out[...] = image
        return record.label


def rank_share(count: int, rank: int, world_size: int) -> tuple[Tensor, Tensor]:
    """(sample numbers, whether each counts) of a rank: every sample counts on exactly one.

    All ranks get equally many, so that they make the same passes together: where the samples do not
    divide evenly the last one is repeated, and does not count.
    """
    share = -(-count // world_size)
    ids = torch.arange(rank, rank + share * world_size, world_size)
    return ids.clamp(max=count - 1), ids < count
