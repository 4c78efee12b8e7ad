"""The mathematics of the orthogonal group: pure functions on plain tensors [..., d, d].

Nothing here knows of models, optimizers or processes. Every fast function stands beside a readable
reference in the same file, and tests/manifold compares the two.
"""

from lipnext_scale.manifold.exponential import (
    ExpPlan,
    Workspace,
    exp_reference,
    fast_exp,
    multiply_by_exp_,
    orthogonality_loss_bound,
    plan_exponentials,
    taylor_exp_reference,
)
from lipnext_scale.manifold.geometry import (
    identity_deviation,
    lie_gradient,
    lie_gradient_reference,
    orthogonality_error,
    polar_reference,
    polar_retract,
    random_orthogonal,
    skew,
)

__all__ = [
    "ExpPlan",
    "Workspace",
    "exp_reference",
    "fast_exp",
    "identity_deviation",
    "lie_gradient",
    "lie_gradient_reference",
    "multiply_by_exp_",
    "orthogonality_error",
    "orthogonality_loss_bound",
    "plan_exponentials",
    "polar_reference",
    "polar_retract",
    "random_orthogonal",
    "skew",
    "taylor_exp_reference",
]
