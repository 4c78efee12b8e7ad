"""Small sets on disk, indexed as the converters write them, and loaders over them."""

import hashlib
from pathlib import Path

import numpy as np
from shard_making import encode, noise, tar_bytes

from lipnext_scale.data import AugmentConfig, DataConfig, StreamLoader, open_catalog
from lipnext_scale.data.index import ShardEntry, scan_tar, write_index
from lipnext_scale.data.loader import BatchMaker
from lipnext_scale.data.source import Source, SourceOptions


def write_set(
    directory: Path,
    samples: list[int],
    name: str = "train",
    shape: tuple[int, ...] = (8, 8, 3),
    kind: str = "png",
    classes: int = 7,
    index: bool = True,
    first: int = 0,
    class_names: tuple[str, ...] = (),
) -> str:
    """Shards of so many samples each; sample i is noise of seed i and class i % classes."""
    directory.mkdir(parents=True, exist_ok=True)
    number, entries, records = first, [], []
    for shard, count in enumerate(samples):
        members = []
        for i in range(number, number + count):
            members.append((f"{i:06d}.cls", str(i % classes).encode()))
            members.append((f"{i:06d}.{kind}", encode(noise(*shape, seed=i), kind)))
        number += count
        path = directory / f"{name}-{shard:06d}.tar"
        path.write_bytes(tar_bytes(members))
        entries.append(entry_of(path, count))
        records.append(scan_tar(path)[0])
    if index:
        write_index(directory, name, entries, np.concatenate(records), class_names)
    return f"{directory}/{name}-*.tar"


def entry_of(path: Path, samples: int) -> ShardEntry:
    content = path.read_bytes()
    return ShardEntry(path.name, samples, len(content), hashlib.sha256(content).hexdigest())


def make_source(
    pattern: str,
    batch_size: int,
    seed: int = 0,
    size: int = 8,
    channels: int = 3,
    key: str = "data.train",
    **options: object,
) -> Source:
    options.setdefault("augment", AugmentConfig(crop_padding=2, flip=True, rand_augment=0.5))
    catalog = open_catalog(pattern, key)
    return Source(catalog, SourceOptions(batch_size, size, channels, seed, **options))


def make_loader(
    pattern: str,
    batch_size: int,
    rank: int = 0,
    world_size: int = 1,
    workers: int = 0,
    prefetch: int = 2,
    synthetic: tuple[str, int] | None = None,
    **options: object,
) -> StreamLoader:
    """synthetic: (pattern, its part of the batch), on top of batch_size."""
    sources = [make_source(pattern, batch_size, **options)]
    if synthetic is not None:
        shards, part = synthetic
        sources.append(make_source(shards, part, seed=1, key="data.synthetic.shards"))
    return StreamLoader(BatchMaker(sources, rank, world_size), workers, prefetch)


def data_config(train: str, **settings: object) -> DataConfig:
    return DataConfig(train, settings.pop("test", train), **settings)
