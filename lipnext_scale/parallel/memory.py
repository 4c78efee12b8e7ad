"""What a rank keeps in memory from step to step, by purpose, and its peak."""

import re
import resource
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


@dataclass(frozen=True)
class Memory:
    """Bytes on this rank. `peak` is the process's highest yet, activations and all."""

    parameters: int
    gradients: int
    optimizer: int
    peak: int

    @property
    def total(self) -> int:
        """What lasts from step to step: all but the peak."""
        return self.parameters + self.gradients + self.optimizer

    def as_metrics(self) -> dict[str, float]:
        """Scalars for `Metrics`; mega is 10⁶ and giga 10⁹."""
        return {
            "memory/parameters_mb": self.parameters / 1e6,
            "memory/gradients_mb": self.gradients / 1e6,
            "memory/optimizer_mb": self.optimizer / 1e6,
            "memory/total_mb": self.total / 1e6,
            "memory/peak_gb": self.peak / 1e9,
        }


def memory_per_rank(
    parameters: nn.Module | Iterable[Tensor], states: Iterable[Mapping[Any, Any]] = ()
) -> Memory:
    """Measure a model or its parameters, their gradients and optimizers' `state` mappings.

    Of a DTensor the local part counts. Storages are what takes memory, so each counts once and
    whole, with its padding, at the first of parameters, gradients and optimizer to hold it.
    """
    if isinstance(parameters, nn.Module):
        parameters = parameters.parameters()
    kept = list(parameters)
    seen: set[tuple[torch.device, int]] = set()
    return Memory(
        parameters=_new_bytes(kept, seen),
        gradients=_new_bytes([parameter.grad for parameter in kept], seen),
        optimizer=_new_bytes([list(state.values()) for state in states], seen),
        peak=peak_memory({parameter.device for parameter in kept}),
    )


def peak_memory(devices: Iterable[torch.device]) -> int:
    """The most bytes yet: allocated on the GPUs among `devices`, or without any resident in RAM."""
    gpus = [device for device in devices if device.type == "cuda"]
    if gpus:
        return sum(torch.cuda.max_memory_allocated(device) for device in gpus)
    return _peak_resident()


def _peak_resident() -> int:
    status = Path("/proc/self/status")
    found = re.search(r"^VmHWM:\s+(\d+) kB", status.read_text(), re.M) if status.exists() else None
    if found:
        return int(found[1]) * 1024
    # Not every kernel tells it there. This one may count what was before an exec, too.
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


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
