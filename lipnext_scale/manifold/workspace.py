"""Scratch memory that is used again instead of allocated anew."""

import math

import torch
from torch import Tensor


class Workspace:
    """Named buffers for temporaries of one kind of loop.

    On the CPU every large allocation is fresh memory from the system, and touching it first costs
    page faults: more than the elementwise work done in it. On a GPU the caching allocator does this
    job, so there nothing is kept.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def like(self, name: str, model: Tensor, row_padding: int = 0) -> Tensor:
        """A buffer with the shape, type and device of `model`, its content undefined.

        With `row_padding` every row is followed by so many unused numbers. A matrix that is read
        along its columns needs that on the CPU: a row length that is a power of two puts a whole
        column into a few cache lines (the transposed difference in `lie_gradient`: 4.5 times faster
        at d = 1024).
        """
        if model.device.type != "cpu":
            return torch.empty(model.shape, dtype=model.dtype, device=model.device)
        *outer, columns = model.shape
        stored = (*outer, columns + row_padding)
        needed = math.prod(stored)
        kept = self._buffers.get(name)
        if kept is None or kept.dtype != model.dtype or kept.numel() < needed:
            kept = torch.empty(needed, dtype=model.dtype)
            self._buffers[name] = kept
        return kept[:needed].view(stored)[..., :columns]
