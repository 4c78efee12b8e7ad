"""Engines: how a model is placed on devices, differentiated and clipped."""

import torch

from lipnext_scale.parallel.engine import Engine, ParallelConfig
from lipnext_scale.parallel.single import SingleEngine

__all__ = ["Engine", "ParallelConfig", "SingleEngine", "build_engine"]


def build_engine(config: ParallelConfig, device: torch.device) -> Engine:
    """The engine that the configuration names."""
    assert config.engine == "single"
    return SingleEngine(device)
