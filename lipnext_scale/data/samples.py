"""A whole set decoded into memory: for small ones, for certificates and for pictures."""

from dataclasses import dataclass
from itertools import product
from math import prod

import torch
from torch import Tensor

from lipnext_scale.config import ConfigError
from lipnext_scale.data.catalog import Catalog, open_catalog
from lipnext_scale.data.decode import BadSample
from lipnext_scale.data.evaluation import TestSet
from lipnext_scale.data.store import SampleStore
from lipnext_scale.errors import UserError

_LOOKED_AT = 16
_RESIZED_BY = {"data.test": "data.test_resize", "--data": "--resize"}


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
    channels, height, width = some_shapes(catalog)[0]
    if height != width:
        raise UserError(f"{key}: {store.name(0)} is {channels}×{height}×{width}: must be square")
    return load_test_set(TestSet(catalog, height, channels), limit_gb)


def load_test_set(test: TestSet, limit_gb: float) -> Samples:
    """All images of a test set, as the model takes them."""
    catalog, shape = test.catalog, test.image_shape
    if len(catalog) * prod(shape) > limit_gb * 1e9:
        right = f"takes more than data.memory_limit_gb = {limit_gb:g}"
        raise ConfigError(catalog.key, catalog.pattern, right)
    images = torch.empty((len(catalog), *shape), dtype=torch.uint8)
    labels = torch.empty(len(catalog), dtype=torch.int64)
    for batch in test:
        images[batch.ids], labels[batch.ids] = batch.images, batch.labels
    store = SampleStore(catalog)
    return Samples(images, labels, [store.key(sample) for sample in range(len(catalog))])


def stored_shape(store: SampleStore, sample: int) -> tuple[int, int, int]:
    """(channels, height, width) of an image as it is stored."""
    encoded, record = store.read(sample)
    image = store.decode(encoded, record, store.channels(sample))
    return image.shape[2], image.shape[0], image.shape[1]


def some_shapes(catalog: Catalog) -> list[tuple[int, int, int]]:
    """The shapes of a few images throughout the set; those that cannot be decoded are passed over,
    for what becomes of them is decided when their turn comes, but not all can be such."""
    store, shapes, reason = SampleStore(catalog), [], ""
    for sample in range(0, len(catalog), max(1, len(catalog) // _LOOKED_AT)):
        try:
            shapes.append(stored_shape(store, sample))
        except BadSample as bad:
            reason = reason or f"{catalog.key}: {store.name(sample)} {bad}"
    store.close()
    if not shapes:
        raise UserError(reason)
    return shapes


def require_same_classes(train: Catalog, others: list[Catalog]) -> None:
    """A label means the same class in all sets, as far as their indexes name the classes."""
    for catalog in others:
        for names, own in product(train.class_names, catalog.class_names):
            for label, (name, other) in enumerate(zip(names, own, strict=False)):
                if name != other:
                    what = f"its class {label} is {other!r}, that of {train.key} is {name!r}"
                    right = "convert both from the same classes"
                    raise ConfigError(catalog.key, catalog.pattern, f"{what}; {right}")


def require_fits(
    catalog: Catalog, image_size: int, in_channels: int, num_classes: int, resized: bool = False
) -> None:
    """A set must be what the model takes: all labels are looked at, and some of the images.

    resized: images of any size are made to fit. Greyscale images among colour ones become colour; a
    set of greyscale images alone is not what a model with three channels is for.
    """
    lowest, highest = catalog.label_range()
    if lowest < 0 or highest >= num_classes:
        found = f"{catalog.key} has labels from {lowest} to {highest}"
        raise ConfigError("model.num_classes", num_classes, found)
    shapes = some_shapes(catalog)
    for channels, height, width in [] if resized else shapes:
        if height != width or height != image_size:
            what = f"the images of {catalog.key} are {channels}×{height}×{width}"
            way = _RESIZED_BY.get(catalog.key, "augment.resize")
            raise ConfigError("model.image_size", image_size, f"{what}; {way} makes them fit")
    if max(shape[0] for shape in shapes) != in_channels:
        channels, height, width = max(shapes)
        what = f"the images of {catalog.key} are {channels}×{height}×{width}"
        raise ConfigError("model.in_channels", in_channels, what)
