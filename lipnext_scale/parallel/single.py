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

    def gradient_norm(self, model: nn.Module) -> Tensor:
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        return torch.nn.utils.get_total_norm(gradients)

    def clip_gradients(self, model: nn.Module, max_norm: float, norm: Tensor) -> None:
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), max_norm, norm)
