"""The network. Knows nothing of processes: `lipnext_scale.distributed` shards it from outside."""

from lipnext_scale.models.blocks import BlockSpec, block_reference, group_reference
from lipnext_scale.models.fused import fused_group
from lipnext_scale.models.lipnext import (
    BlockGroup,
    Head,
    LipNeXt,
    LipNeXtConfig,
    WeightLayout,
    freeze,
    is_frozen,
)

__all__ = [
    "BlockGroup",
    "BlockSpec",
    "Head",
    "LipNeXt",
    "LipNeXtConfig",
    "WeightLayout",
    "block_reference",
    "freeze",
    "fused_group",
    "group_reference",
    "is_frozen",
]
