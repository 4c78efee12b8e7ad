"""From shards to batches. A loader is endless, knows its place, and can be put back there."""

from lipnext_scale.data.config import DataConfig
from lipnext_scale.data.loader import Batch, Loader, MemoryLoader, rank_share
from lipnext_scale.data.samples import Samples, read_samples, resolve_shards

__all__ = [
    "Batch",
    "DataConfig",
    "Loader",
    "MemoryLoader",
    "Samples",
    "rank_share",
    "read_samples",
    "resolve_shards",
]
