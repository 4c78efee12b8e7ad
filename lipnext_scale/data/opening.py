"""From the configuration to loaders: which sets are opened, checked, and put together."""

from collections.abc import Set
from pathlib import Path

from lipnext_scale.data.augment import AugmentConfig
from lipnext_scale.data.batches import BatchMaker
from lipnext_scale.data.catalog import Catalog, open_catalog
from lipnext_scale.data.config import DataConfig
from lipnext_scale.data.evaluation import TestSet
from lipnext_scale.data.loader import StreamLoader
from lipnext_scale.data.samples import require_fits, require_same_classes
from lipnext_scale.data.source import Source, SourceOptions


class DataSets:
    """The sets of a configuration, opened and checked against what the model takes.

    known: stamps of files that an earlier start of the run found whole.
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
        self.synthetic: Catalog | None = None
        if config.synthetic.shards:
            shards = config.synthetic.shards
            self.synthetic = _open(config, shards, "data.synthetic.shards", known)
        resized = {
            "data.train": bool(config.augment.resize[1]),
            "data.synthetic.shards": bool(config.synthetic.augment.resize[1]),
            "data.test": bool(config.test_resize),
        }
        for catalog in self.all:
            require_fits(catalog, image_size, channels, num_classes, resized[catalog.key])
        require_same_classes(self.train, self.all)

    @property
    def all(self) -> list[Catalog]:
        synthetic = [self.synthetic] if self.synthetic is not None else []
        return [self.train, self.test, *synthetic]

    def training_loader(
        self, seed: int, rank: int = 0, world_size: int = 1, pin_memory: bool = False
    ) -> StreamLoader:
        """A rank's share of the batches of real and synthetic images."""
        config = self._config
        real, generated = config.batch_parts()
        sources = [self._source(self.train, real, seed, config.augment)]
        if self.synthetic is not None:
            # Another seed, or samples of the same number would be augmented alike.
            augment = config.synthetic.augment
            sources.append(self._source(self.synthetic, generated, seed + 1, augment))
        maker = BatchMaker(sources, rank, world_size)
        return StreamLoader(maker, config.workers, config.prefetch, pin_memory)

    def _source(self, catalog: Catalog, batch: int, seed: int, augment: AugmentConfig) -> Source:
        config = self._config
        options = SourceOptions(
            batch_size=batch,
            image_size=self._size,
            channels=self._channels,
            seed=seed,
            augment=augment,
            read_block=config.read_block,
            window=config.shuffle_window,
            substitute=config.on_bad_sample == "substitute",
        )
        return Source(catalog, options)

    def test_set(self, rank: int = 0, world_size: int = 1) -> TestSet:
        config = self._config
        return TestSet(
            self.test,
            self._size,
            self._channels,
            config.test_resize,
            config.workers,
            rank,
            world_size,
        )


def open_test_set(
    config: DataConfig, image_size: int, channels: int, num_classes: int, key: str = "data.test"
) -> TestSet:
    """The test set alone, checked against what the model takes; `key` names it in messages."""
    catalog = _open(config, config.test, key)
    require_fits(catalog, image_size, channels, num_classes, bool(config.test_resize))
    return TestSet(catalog, image_size, channels, config.test_resize, config.workers)


def _open(config: DataConfig, pattern: str, key: str, known: Set[str] = frozenset()) -> Catalog:
    directory = config.stage_dir or config.cache_dir
    cache = Path(directory) if directory else None
    return open_catalog(pattern, key, cache, config.memory_limit_gb, bool(config.stage_dir), known)
