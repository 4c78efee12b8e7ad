"""Test images, every sample exactly once on any number of ranks, always the same pixels; and the
sets of a configuration, opened and checked."""

import os
import sys
from collections.abc import Iterable, Iterator, Set
from copy import copy
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from lipnext_scale.data.augment import AugmentConfig, centre_crop, require_size, resize_short_side
from lipnext_scale.data.catalog import Catalog, open_catalog
from lipnext_scale.data.config import DataConfig
from lipnext_scale.data.decode import BadSample, decode
from lipnext_scale.data.index import Record
from lipnext_scale.data.loader import BatchMaker, StreamLoader, lost_a_worker, made_by_workers
from lipnext_scale.data.source import SampleStore, Source, SourceOptions
from lipnext_scale.utils.config import ConfigError
from lipnext_scale.utils.errors import RunFailed, UserError

BATCH = 256


@dataclass(frozen=True)
class TestBatch:
    """uint8 images [B, C, H, W] with their labels, and which of them count on this rank."""

    __test__ = False  # not for pytest

    images: Tensor
    labels: Tensor
    ids: Tensor
    counted: Tensor


# Images, labels, ids, counted; or why there are none: an error out of a worker is a page long.
_Made = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray] | str


class TestSet(Dataset[_Made]):
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
        """At most so many samples, at equal distances over the set: always the same ones."""
        chosen, total = copy(self), len(self.catalog)
        chosen._take(torch.arange(min(count, total)) * total // min(count, total))
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
        shard, _ = self.catalog.place_of(sample)
        return f"{shard.name.rpartition('/')[2]}: {self._store.key(sample)}"

    def __len__(self) -> int:
        """Its batches on this rank."""
        return len(self._parts)

    def __iter__(self) -> Iterator[TestBatch]:
        workers = min(self._workers, len(self))
        try:
            for made in made_by_workers(self, range(len(self)), workers):
                if isinstance(made, str):
                    raise UserError(made)
                images, labels, ids, counted = (torch.from_numpy(array) for array in made)
                yield TestBatch(images.permute(0, 3, 1, 2), labels, ids, counted)
        except RuntimeError as error:
            if not lost_a_worker(error):
                raise
            raise RunFailed(f"{self.catalog.key}: a process that reads it has ended") from None

    def __getitem__(self, number: int) -> _Made:
        ids, counted = self._parts[number]
        images = np.empty((len(ids), self._size, self._size, self._channels), dtype=np.uint8)
        try:
            labels = [self._fill(sample, images[i]) for i, sample in enumerate(ids.tolist())]
        except UserError as error:
            return str(error)
        return images, np.array(labels), ids.numpy(), counted.numpy()

    def _fill(self, sample: int, out: np.ndarray) -> int:
        """A test set is certified sample by sample, so a bad one has no substitute."""
        try:
            encoded, record = self._store.read(sample)
            out[...] = network_input(encoded, record, self._size, self._channels, self.resize)
        except BadSample as reason:
            name = self._store.name(sample)
            raise UserError(f"{self.catalog.key}: {name} {reason}") from None
        return record.label


def network_input(
    encoded: bytes, record: Record | None, size: int, channels: int, resize: int
) -> np.ndarray:
    """A test image [size, size, channels]; resize: as of TestSet."""
    image = decode(encoded, record, channels)
    if resize:
        image = centre_crop(resize_short_side(image, resize), size)
    require_size(image, size)
    return image


def rank_share(count: int, rank: int, world_size: int) -> tuple[Tensor, Tensor]:
    """(sample numbers, whether each counts) of a rank: every sample counts on exactly one.

    All ranks get equally many, so that they make the same passes together: where the samples do not
    divide evenly the last one is repeated, and does not count.
    """
    share = -(-count // world_size)
    ids = torch.arange(rank, rank + share * world_size, world_size)
    return ids.clamp(max=count - 1), ids < count


# --------------------------------------------------------------------------------------------------
# From the configuration to loaders: which sets are opened, checked, and put together.


class DataSets:
    """The sets of a configuration, opened and checked against what the model takes.

    known: stamps of files that an earlier start of the run found intact.
    """

    def __init__(
        self,
        config: DataConfig,
        image_size: int,
        channels: int,
        num_classes: int,
        known: Set[str] = frozenset(),
    ) -> None:
        self._config, self._size, self._channels = config, image_size, channels
        self.train = _open(config, config.train, "data.train", known)
        self.test = _open(config, config.test, "data.test", known)
        self.all = [self.train, self.test]
        resized = [bool(config.augment.resize[1]), bool(config.test_resize)]
        if config.synthetic.shards:
            self.all.append(_open(config, config.synthetic.shards, "data.synthetic.shards", known))
            resized.append(bool(config.synthetic.augment.resize[1]))
        require_fits(zip(self.all, resized, strict=True), image_size, channels, num_classes)
        _require_same_classes(self.train, self.all)
        highest = max(catalog.label_range()[1] for catalog in self.all)
        unused = num_classes > max(highest + 1, len(self.class_names))
        if unused and os.environ.get("RANK", "0") == "0":
            what = f"warning: model.num_classes = {num_classes}: the data has labels 0 to {highest}"
            print(what, file=sys.stderr, flush=True)

    def training_loader(
        self, seed: int, rank: int = 0, world_size: int = 1, pin_memory: bool = False
    ) -> StreamLoader:
        """A rank's share of the batches of real and synthetic images."""
        config = self._config
        real, generated = config.batch_parts()
        sources = [self._source(self.train, real, seed, config.augment)]
        for synthetic in self.all[2:]:
            # Another seed, or samples of the same number would be augmented alike.
            augment = config.synthetic.augment
            sources.append(self._source(synthetic, generated, seed + 1, augment))
        maker = BatchMaker(sources, rank, world_size)
        return StreamLoader(maker, config.workers, config.prefetch, pin_memory)

    def _source(self, catalog: Catalog, batch: int, seed: int, augment: AugmentConfig) -> Source:
        options = SourceOptions(
            batch_size=batch,
            image_size=self._size,
            channels=self._channels,
            seed=seed,
            augment=augment,
            read_block=self._config.read_block,
            window=self._config.shuffle_window,
            substitute=self._config.on_bad_sample == "substitute",
        )
        return Source(catalog, options)

    @property
    def class_names(self) -> tuple[str, ...]:
        """Of the labels; all sets that name them agree, as far as they go."""
        named = [names for catalog in self.all for names in catalog.class_names]
        return max(named, key=len, default=())

    def test_set(self, rank: int = 0, world_size: int = 1) -> TestSet:
        resize, workers = self._config.test_resize, self._config.workers
        return TestSet(self.test, self._size, self._channels, resize, workers, rank, world_size)


def open_test_set(
    config: DataConfig, image_size: int, channels: int, num_classes: int, key: str = "data.test"
) -> TestSet:
    """The test set alone, checked against what the model takes; `key` names it in messages."""
    catalog = _open(config, config.test, key)
    require_fits([(catalog, bool(config.test_resize))], image_size, channels, num_classes)
    return TestSet(catalog, image_size, channels, config.test_resize, config.workers)


def _open(config: DataConfig, pattern: str, key: str, known: Set[str] = frozenset()) -> Catalog:
    directory = config.stage_dir or config.cache_dir
    cache = Path(directory) if directory else None
    return open_catalog(pattern, key, cache, config.memory_limit_gb, bool(config.stage_dir), known)


# --------------------------------------------------------------------------------------------------
# A set decoded into memory, for small ones; and checks of a set against the model.

_LOOKED_AT = 16
_RESIZED_BY = {"data.test": "data.test_resize={3}", "--data": "--resize {3}"}


@dataclass(frozen=True)
class Samples:
    """A decoded set: uint8 images [N, C, H, W], labels [N], and the key of each sample."""

    images: Tensor
    labels: Tensor
    keys: list[str]

    def __len__(self) -> int:
        return len(self.keys)


def read_samples(pattern: str, key: str, limit_gb: float = 8.0) -> Samples:
    """Decode all samples of the shards into memory; all have the size and kind of the first."""
    catalog = open_catalog(pattern, key, memory_limit_gb=limit_gb)
    store = SampleStore(catalog)
    channels, height, width = _some_shapes(catalog)[0]
    if height != width:
        raise UserError(f"{key}: {store.name(0)} is {channels}×{height}×{width}: must be square")
    if len(catalog) * channels * height * width > limit_gb * 1e9:
        right = f"takes more than data.memory_limit_gb = {limit_gb:g}"
        raise ConfigError(catalog.key, catalog.pattern, right)
    images = torch.empty((len(catalog), channels, height, width), dtype=torch.uint8)
    labels = torch.empty(len(catalog), dtype=torch.int64)
    for batch in TestSet(catalog, height, channels):
        images[batch.ids], labels[batch.ids] = batch.images, batch.labels
    return Samples(images, labels, [store.key(sample) for sample in range(len(catalog))])


def _some_shapes(catalog: Catalog) -> list[tuple[int, int, int]]:
    """The shapes of a few images throughout the set, without those that cannot be decoded: what
    becomes of them is decided when their turn comes. But not all can be such."""
    store, shapes, reason = SampleStore(catalog), [], ""
    for sample in range(0, len(catalog), max(1, len(catalog) // _LOOKED_AT)):
        try:
            height, width, channels = decode(*store.read(sample)).shape
            shapes.append((channels, height, width))
        except BadSample as bad:
            reason = reason or f"{catalog.key}: {store.name(sample)} {bad}"
    if not shapes:
        raise UserError(reason)
    return shapes


def _require_same_classes(train: Catalog, others: list[Catalog]) -> None:
    """A label means the same class in all sets, as far as their indexes name the classes."""
    for catalog in others:
        for names, own in product(train.class_names, catalog.class_names):
            for label, (name, other) in enumerate(zip(names, own, strict=False)):
                if name != other:
                    what = f"its class {label} is {other!r}, that of {train.key} is {name!r}"
                    right = "convert both from the same classes"
                    raise ConfigError(catalog.key, catalog.pattern, f"{what}; {right}")


def require_fits(
    sets: Iterable[tuple[Catalog, bool]], image_size: int, in_channels: int, num_classes: int
) -> None:
    """Sets must be what the model takes: all labels are looked at, and some of the images.

    With each, whether images of any size are made to fit. Greyscale images among colour ones become
    colour; a set of greyscale images alone is not what a model with three channels is for.
    """
    sides = image_size, image_size * 9 // 7, image_size * 8 // 7  # as with the paper's ImageNet
    wrong: dict[str, str] = {}  # with what makes it right
    for catalog, resized in sets:
        lowest, highest = catalog.label_range()
        if lowest < 0 or highest >= num_classes:
            found = f"{catalog.key} has labels from {lowest} to {highest}"
            raise ConfigError("model.num_classes", num_classes, found)
        shapes = _some_shapes(catalog)
        seen = f"the images of {catalog.key} are {'×'.join(map(str, max(shapes)))}"
        if max(shapes)[0] != in_channels:
            raise ConfigError("model.in_channels", in_channels, seen)
        if not resized and {shape[1:] for shape in shapes} != {(image_size, image_size)}:
            seen += f" and {'×'.join(map(str, min(shapes)))}" if min(shapes) < max(shapes) else ""
            way = _RESIZED_BY.get(catalog.key, "{0}.resize=[{1},{2}] {0}.crop_padding=0")
            wrong[seen] = way.format(f"{catalog.key.rpartition('.')[0]}.augment", *sides)
    if wrong:
        right = f"{', '.join(wrong)}; {' '.join(wrong.values())} makes them fit"
        raise ConfigError("model.image_size", image_size, right)
