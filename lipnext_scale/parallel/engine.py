"""The protocol between the trainer and whatever runs the model."""

from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor, nn

from lipnext_scale.models import LipNeXt


@dataclass(frozen=True)
class ParallelConfig:
    engine: Literal["single"] = "single"


class Engine(Protocol):
    device: torch.device
    rank: int
    world_size: int

    def prepare(self, model: LipNeXt, seed: int) -> LipNeXt:
        """Take a model built on the meta device; place it and fill its initial weights."""
        ...

    def backward(self, loss: Tensor) -> None: ...

    def clip_gradients(self, model: nn.Module, max_norm: float) -> Tensor:
        """Scale all gradients to a global norm of at most `max_norm`; returns the norm before."""
        ...
