"""The shards of named tensors that a rank holds, which rank writes each, and DCP's planners."""

from collections import defaultdict
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list


@dataclass(frozen=True)
class StateShard:
    """This rank's contiguous part of a named tensor."""

    tensor: Tensor
    shape: tuple[int, ...]  # of the full tensor
    offset: tuple[int, ...]  # where this part begins

    @classmethod
    def full(cls, tensor: Tensor) -> "StateShard":
        """All of a tensor, without its gradient."""
        return cls(tensor.detach(), tuple(tensor.shape), (0,) * tensor.dim())


StateShards = dict[str, StateShard]  # a rank has at most one shard of a name, and may have none


Layout = dict[str, tuple[tuple[int, ...], int]]  # offset and bytes of a rank's shards


def layout_of(shards: StateShards) -> Layout:
    """What is to be stored: all shards but empty parts of tensors that are not empty."""
    return {
        name: (shard.offset, shard.tensor.nbytes)
        for name, shard in shards.items()
        if shard.tensor.numel() or not prod(shard.shape)
    }


def assign_writers(layouts: list[Layout]) -> list[set[str]]:
    """For every rank the names whose shard it writes: each shard once, the bytes balanced.

    The largest shards go first, each to the one of its holders that has least so far. DCP removes
    duplicates too, but only after every replica was copied to the host's memory. DCP refuses shards
    that overlap or do not make the full tensor.
    """
    holders: dict[tuple[str, tuple[int, ...], int], list[int]] = defaultdict(list)
    for rank, layout in enumerate(layouts):
        for name, (offset, size) in layout.items():
            holders[name, offset, size].append(rank)
    load = [0] * len(layouts)
    writes: list[set[str]] = [set() for _ in layouts]
    for name, offset, size in sorted(holders, key=lambda shard: (-shard[2], *shard)):
        rank = min(holders[name, offset, size], key=lambda holder: (load[holder], holder))
        load[rank] += size
        writes[rank].add(name)
    return writes


# --------------------------------------------------------------------------------------------------
# torch.distributed.checkpoint (DCP): what to write, what to read where.


class ShardSavePlanner(DefaultSavePlanner):
    """Writes the shards it is given, all of them: `assign_writers` gives each to one rank."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def create_local_plan(self) -> SavePlan:
        return SavePlan([_write_item(name, shard) for name, shard in self.state_dict.items()])

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        return self.state_dict[write_item.index.fqn].tensor


class ShardLoadPlanner(DefaultLoadPlanner):
    """Reads into the tensors of shards, in place, however the stored tensors were cut."""

    def set_up_planner(
        self,
        state_dict: StateShards,
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        self.shards, self.metadata = state_dict, metadata

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        items: list[ReadItem] = []
        for name, shard in self.shards.items():
            stored = self.metadata.state_dict_metadata[name]
            found = create_read_items_for_chunk_list(name, stored, [_chunk(shard)])  # type: ignore[arg-type]
            found = [item for item in found if prod(item.lengths)]
            if sum(prod(item.lengths) for item in found) != shard.tensor.numel():
                raise ValueError(f"{name} is not stored completely")
            items += found
        return LoadPlan(items)

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        part = self.shards[read_item.dest_index.fqn].tensor.detach()
        starts_and_lengths = zip(read_item.dest_offsets, read_item.lengths, strict=True)
        for dimension, (start, length) in enumerate(starts_and_lengths):
            part = part.narrow(dimension, start, length)
        return part  # a view: it is in the shard when it is read


def _write_item(name: str, shard: StateShard) -> WriteItem:
    return WriteItem(
        index=MetadataIndex(name, shard.offset),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=_chunk(shard),
            properties=TensorProperties(dtype=shard.tensor.dtype),
            size=torch.Size(shard.shape),
        ),
    )


def _chunk(shard: StateShard) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=torch.Size(shard.offset), sizes=shard.tensor.shape)
