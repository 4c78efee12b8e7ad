"""What a rank keeps in memory from step to step, by purpose: measured, for benchmarks and tests."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lipnext_scale.distributed import DeepSpeedEngine, Engine
from lipnext_scale.optim import Optimizers


@dataclass(frozen=True)
class Memory:
    """Bytes on this rank that last from step to step."""

    parameters: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer


def training_memory(engine: Engine, optimizers: Optimizers) -> Memory:
    """This rank's bytes of parameters, gradients and optimizer state.

    The owners' matrices of the row layout count as optimizer state: the model has rows beside them.
    DeepSpeed frees gradients in its step, so that none are left to count. Of a DTensor the local
    part counts. Storages are what takes memory, so each counts once and whole, with its padding, at
    the first of parameters, gradients and optimizer to hold it.
    """
    manifold = optimizers.manifold
    stepped = {"matrices": [group["params"] for group in manifold.param_groups]}
    states: list[Mapping[Any, Any]] = [optimizers.euclidean.state, manifold.state, stepped]
    kept: list[Tensor] = list(engine.model.parameters())
    if isinstance(engine, DeepSpeedEngine):  # the weights that compute, and the float32 ones
        kept = [getattr(p, "ds_tensor", p.detach()) for p in kept]
        kept += [partition.flat.detach() for partition in engine.partitions]
    seen: set[tuple[torch.device, int]] = set()
    return Memory(
        parameters=_new_bytes(kept, seen),
        gradients=_new_bytes([parameter.grad for parameter in kept], seen),
        optimizer=_new_bytes([list(state.values()) for state in states], seen),
    )


def _new_bytes(value: Any, seen: set[tuple[torch.device, int]]) -> int:
    """Bytes of the storages below `value` that are not in `seen`, which learns them."""
    total = 0
    for tensor in _local_tensors(value):
        storage = tensor.untyped_storage()
        key = (storage.device, storage.data_ptr())
        if tensor.is_meta or key in seen:
            continue
        seen.add(key)
        total += storage.nbytes()
    return total


def _local_tensors(value: Any) -> Iterator[Tensor]:
    """Every tensor in nested mappings, lists and tuples, without what else is there."""
    if isinstance(value, DTensor):
        yield value.to_local()
    elif isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from _local_tensors(list(value.values()))
    elif isinstance(value, list | tuple):
        for element in value:
            yield from _local_tensors(element)
