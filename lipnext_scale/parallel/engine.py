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

    def gradient_norm(self, model: nn.Module) -> Tensor:
        """The global norm of all gradients."""
        ...

    def clip_gradients(self, model: nn.Module, max_norm: float, norm: Tensor) -> None:
        """Scale all gradients, whose global norm is `norm`, to one of at most `max_norm`."""
        ...
