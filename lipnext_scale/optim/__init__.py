"""Optimizers: Adam on the orthogonal group for the banks, NAdam for the rest, their schedule."""

from lipnext_scale.optim.lookahead_nadam import LookaheadNAdam
from lipnext_scale.optim.manifold_adam import (
    ManifoldAdam,
    manifold_adam_reference,
    require_orthogonal,
)
from lipnext_scale.optim.optimizers import (
    ManifoldOptimizer,
    OptimConfig,
    Optimizers,
    split_parameters,
)
from lipnext_scale.optim.schedule import learning_rate
from lipnext_scale.optim.slow_weights import local_part

__all__ = [
    "LookaheadNAdam",
    "ManifoldAdam",
    "ManifoldOptimizer",
    "OptimConfig",
    "Optimizers",
    "learning_rate",
    "local_part",
    "manifold_adam_reference",
    "require_orthogonal",
    "split_parameters",
]
