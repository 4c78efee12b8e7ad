"""Orthogonal parameters, gradients for them, and a run of steps."""

import torch

from lipnext_scale.manifold import random_orthogonal
from lipnext_scale.optim import ManifoldAdam


def bank(*shape: int, seed: int = 0, dtype=torch.float64) -> torch.nn.Parameter:
    """A parameter of the shape [d, d] or [n, d, d] on O(d)."""
    generator = torch.Generator().manual_seed(seed)
    count = int(torch.Size(shape[:-2]).numel())
    matrices = [random_orthogonal(shape[-1], generator, dtype) for _ in range(count)]
    return torch.nn.Parameter(torch.stack(matrices).view(shape))


def gradients(parameter: torch.Tensor, steps: int, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(steps, *parameter.shape, generator=generator, dtype=torch.float64).to(
        parameter.dtype
    )


def run(optimizer: ManifoldAdam, parameter: torch.nn.Parameter, grads: torch.Tensor) -> None:
    for gradient in grads:
        parameter.grad = gradient.clone()
        optimizer.step()
