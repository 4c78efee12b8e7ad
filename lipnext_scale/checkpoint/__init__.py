"""Checkpoints that move between world sizes, mesh shapes and weight layouts; exports.

Every tensor is stored under a stable logical name, and every rank only says which contiguous part
of it it holds. A checkpoint is a directory that gets its name when all of it is on the disk.
"""

from lipnext_scale.checkpoint.directory import (
    SUMS,
    latest_checkpoint,
    newest_intact_checkpoint,
    verify_checkpoint,
)
from lipnext_scale.checkpoint.io import CheckpointWriter, load_shards, read_facts, stored_shapes
from lipnext_scale.checkpoint.shards import StateShard, StateShards

__all__ = [
    "SUMS",
    "CheckpointWriter",
    "StateShard",
    "StateShards",
    "latest_checkpoint",
    "load_shards",
    "newest_intact_checkpoint",
    "read_facts",
    "stored_shapes",
    "verify_checkpoint",
]
