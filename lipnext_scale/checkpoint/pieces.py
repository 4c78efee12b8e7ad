"""The parts of named tensors that a process holds, and who of several holders writes one."""

from collections import defaultdict
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor


@dataclass(frozen=True)
class Piece:
    """This process's contiguous part of a named tensor."""

    tensor: Tensor
    shape: tuple[int, ...]  # of the whole tensor
    offset: tuple[int, ...]  # where this part begins

    def __post_init__(self) -> None:
        size = tuple(self.tensor.shape)
        fits = len(self.shape) == len(self.offset) == len(size) and all(
            0 <= start and start + length <= whole
            for start, length, whole in zip(self.offset, size, self.shape, strict=True)
        )
        assert fits, f"a part {size} at {self.offset} is not inside {self.shape}"


Pieces = dict[str, Piece]  # a process has at most one piece of a name, and may have none


@dataclass(frozen=True)
class Extent:
    """A piece without its data: what the other processes need to know of it."""

    shape: tuple[int, ...]
    offset: tuple[int, ...]
    size: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return prod(self.size) * self.dtype.itemsize


Layout = dict[str, Extent]


def layout_of(pieces: Pieces) -> Layout:
    """What of the pieces is to be stored: all but empty parts of tensors that are not empty."""
    return {
        name: Extent(piece.shape, piece.offset, tuple(piece.tensor.shape), piece.tensor.dtype)
        for name, piece in pieces.items()
        if piece.tensor.numel() or not prod(piece.shape)
    }


def share_out(layouts: list[Layout]) -> list[set[str]]:
    """For every process the names whose piece it writes: each piece once, the bytes balanced.

    The largest pieces go first, each to the one of its holders that has least so far.
    """
    holders: dict[tuple[str, Extent], list[int]] = defaultdict(list)
    for rank, layout in enumerate(layouts):
        for name, extent in layout.items():
            holders[name, extent].append(rank)
    _require_whole(list(holders))
    load = [0] * len(layouts)
    writes: list[set[str]] = [set() for _ in layouts]
    order = sorted(holders, key=lambda piece: (-piece[1].nbytes, piece[0], piece[1].offset))
    for name, extent in order:
        rank = min(holders[name, extent], key=lambda holder: (load[holder], holder))
        load[rank] += extent.nbytes
        writes[rank].add(name)
    return writes


def _require_whole(pieces: list[tuple[str, Extent]]) -> None:
    """The parts of every tensor agree on it and have its volume. (DCP checks for overlaps.)"""
    of_name: dict[str, list[Extent]] = defaultdict(list)
    for name, extent in pieces:
        of_name[name].append(extent)
    for name, extents in of_name.items():
        kinds = {(extent.shape, extent.dtype) for extent in extents}
        assert len(kinds) == 1, f"{name} is different tensors on different processes: {kinds}"
        held = sum(prod(extent.size) for extent in extents)
        whole = prod(extents[0].shape)
        assert held == whole, f"{name}: the processes hold {held} of its {whole} elements"
