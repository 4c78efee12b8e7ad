"""Checkpoints that move between world sizes, mesh shapes and weight layouts.

Every tensor is stored under a stable logical name, and every process only says which contiguous
part of it it holds. A checkpoint is a directory that gets its name when all of it is on the disk.
"""

from lipnext_scale.checkpoint.directory import (
    SUMS,
    latest_checkpoint,
    newest_whole_checkpoint,
    step_of,
    verify_checkpoint,
)
from lipnext_scale.checkpoint.io import CheckpointWriter, load_pieces, read_facts, stored_shapes
from lipnext_scale.checkpoint.shards import StateShard, StateShards

__all__ = [
    "SUMS",
    "CheckpointWriter",
    "StateShard",
    "StateShards",
    "latest_checkpoint",
    "load_pieces",
    "newest_whole_checkpoint",
    "read_facts",
    "step_of",
    "stored_shapes",
    "verify_checkpoint",
]
