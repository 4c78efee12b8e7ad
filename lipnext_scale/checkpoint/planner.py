"""How torch.distributed.checkpoint (DCP) is told of pieces: what to write, what to read where."""

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

from lipnext_scale.checkpoint.pieces import Piece, Pieces


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
        self, state_dict: Pieces, metadata: Metadata | None = None, is_coordinator: bool = False
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


def _write_item(name: str, piece: Piece) -> WriteItem:
    return WriteItem(
        index=MetadataIndex(name, piece.offset),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=_chunk(piece),
            properties=TensorProperties(dtype=piece.tensor.dtype),
            size=torch.Size(piece.shape),
        ),
    )


def _chunk(piece: Piece) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=torch.Size(piece.offset), sizes=piece.tensor.shape)
