"""Checkpoints that move between world sizes, mesh shapes and weight layouts.

Every tensor is stored under a stable logical name, and every process only says which contiguous
part of it it holds. A checkpoint is a directory that gets its name when all of it is on the disk.
"""

from lipnext_scale.checkpoint.directory import latest_checkpoint, step_of
from lipnext_scale.checkpoint.integrity import SUMS, verify_checkpoint
from lipnext_scale.checkpoint.pieces import Piece, Pieces
from lipnext_scale.checkpoint.reader import load_pieces, read_facts, stored_shapes
from lipnext_scale.checkpoint.whole import newest_whole_checkpoint
from lipnext_scale.checkpoint.writer import CheckpointWriter

__all__ = [
    "SUMS",
    "CheckpointWriter",
    "Piece",
    "Pieces",
    "latest_checkpoint",
    "load_pieces",
    "newest_whole_checkpoint",
    "read_facts",
    "step_of",
    "stored_shapes",
    "verify_checkpoint",
]
