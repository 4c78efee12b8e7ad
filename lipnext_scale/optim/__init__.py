"""Optimizers: Adam on the orthogonal group for the banks, NAdam for the rest, their schedule."""

from lipnext_scale.optim.lookahead_nadam import LookaheadNAdam, local_part
from lipnext_scale.optim.manifold_adam import (
    ManifoldAdam,
    manifold_adam_reference,
    require_orthogonal,
)
from lipnext_scale.optim.optimizers import (
    ManifoldOptimizer,
    OptimConfig,
    Optimizers,
    learning_rate,
    split_parameters,
)

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
