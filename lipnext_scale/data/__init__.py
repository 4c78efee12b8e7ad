"""From shards to batches (docs/data.md). A loader is endless, knows its place, can be put back."""

from lipnext_scale.data.augment import AugmentConfig
from lipnext_scale.data.catalog import Catalog, open_catalog, resolve_shards
from lipnext_scale.data.config import DataConfig, SyntheticConfig
from lipnext_scale.data.decode import to_unit_range
from lipnext_scale.data.evaluation import (
    DataSets,
    Samples,
    TestBatch,
    TestSet,
    open_test_set,
    rank_share,
    read_samples,
)
from lipnext_scale.data.loader import Batch, StreamLoader

__all__ = [
    "AugmentConfig",
    "Batch",
    "Catalog",
    "DataConfig",
    "DataSets",
    "Samples",
    "StreamLoader",
    "SyntheticConfig",
    "TestBatch",
    "TestSet",
    "open_catalog",
    "open_test_set",
    "rank_share",
    "read_samples",
    "resolve_shards",
    "to_unit_range",
]
