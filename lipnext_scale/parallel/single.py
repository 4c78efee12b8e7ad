"""One process, one device."""

import torch
from torch import Tensor, nn

from lipnext_scale.models import LipNeXt


class SingleEngine:
    rank = 0
    world_size = 1

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def prepare(self, model: LipNeXt, seed: int) -> LipNeXt:
        model.to_empty(device=self.device)
        model.reset_parameters(seed)
        return model

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def clip_gradients(self, model: nn.Module, max_norm: float) -> Tensor:
        return torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
