"""The parts of named tensors that a process holds, and who of several holders writes one."""

from collections import defaultdict
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list


@dataclass(frozen=True)
class StateShard:
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


StateShards = dict[str, StateShard]  # a process has at most one piece of a name, and may have none


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


def layout_of(pieces: StateShards) -> Layout:
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


# --------------------------------------------------------------------------------------------------
# How torch.distributed.checkpoint (DCP) is told of pieces: what to write, what to read where.


class PieceSavePlanner(DefaultSavePlanner):
    """Writes the pieces it is given, all of them; that each has one writer is settled before."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def create_local_plan(self) -> SavePlan:
        return SavePlan([_write_item(name, piece) for name, piece in self.state_dict.items()])

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        return self.state_dict[write_item.index.fqn].tensor


class PieceLoadPlanner(LoadPlanner):
    """Reads into the tensors of pieces, in place, from however the stored tensors were cut."""

    def set_up_planner(
        self,
        state_dict: StateShards,
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        assert metadata is not None
        self.pieces, self.metadata = state_dict, metadata

    def create_local_plan(self) -> LoadPlan:
        items: list[ReadItem] = []
        for name, piece in self.pieces.items():
            stored = self.metadata.state_dict_metadata[name]
            found = create_read_items_for_chunk_list(name, stored, [_chunk(piece)])  # type: ignore[arg-type]
            found = [item for item in found if prod(item.lengths)]
            held = sum(prod(item.lengths) for item in found)
            if held != piece.tensor.numel():
                raise ValueError(f"{name} is not stored as a whole")
            items += found
        return LoadPlan(items)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        part = self.pieces[read_item.dest_index.fqn].tensor.detach()
        starts_and_lengths = zip(read_item.dest_offsets, read_item.lengths, strict=True)
        for dimension, (start, length) in enumerate(starts_and_lengths):
            part = part.narrow(dimension, start, length)
        return part

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """It is a view of the piece: nothing is left to do."""

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        raise AssertionError("a checkpoint holds tensors alone")


def _write_item(name: str, piece: StateShard) -> WriteItem:
    return WriteItem(
        index=MetadataIndex(name, piece.offset),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=_chunk(piece),
            properties=TensorProperties(dtype=piece.tensor.dtype),
            size=torch.Size(piece.shape),
        ),
    )


def _chunk(piece: StateShard) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=torch.Size(piece.offset), sizes=piece.tensor.shape)
