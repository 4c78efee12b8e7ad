"""How far ManifoldAdam leaves O(d) in a thousand steps: with retraction, and without, by bound."""

import math

import pytest
import torch

from lipnext_scale.manifold import (
    orthogonality_error,
    orthogonality_loss_bound,
    random_orthogonal,
)
from lipnext_scale.optim import ManifoldAdam

STEPS = 1000


def start(count: int, dimension: int, dtype: torch.dtype) -> torch.nn.Parameter:
    generator = torch.Generator().manual_seed(0)
    return torch.nn.Parameter(
        torch.stack([random_orthogonal(dimension, generator, dtype) for _ in range(count)])
    )


@pytest.mark.parametrize("exp_rule", ["paper", "bounded"])
def test_retraction_keeps_the_matrices_on_the_group(exp_rule):
    """‖XᵀX-I‖_F/√d < 1e-5 at every moment of 1,000 random steps in float32, slow weights too."""
    x = start(2, 32, torch.float32)
    optimizer = ManifoldAdam([x], lr=1e-3, exp_rule=exp_rule, retract_every=50)
    generator = torch.Generator().manual_seed(1)
    worst, first = 0.0, x.detach().clone()
    for step in range(STEPS):
        x.grad = torch.randn(x.shape, generator=generator)
        optimizer.step()
        if step % 7 == 0 or step >= STEPS - 50:
            worst = max(worst, float(orthogonality_error(x.detach()).max()))
    with optimizer.slow_weights():
        assert float(orthogonality_error(x.detach()).max()) < 1e-5
    assert worst < 1e-5
    assert float((x.detach() - first).abs().max()) > 0.01


def test_retract_at_the_end_of_an_epoch_is_enough():
    """An epoch of 250 steps, then retract(): four epochs end below 1e-6."""
    x = start(2, 32, torch.float32)
    optimizer = ManifoldAdam([x], lr=1e-3)
    generator = torch.Generator().manual_seed(1)
    for _ in range(4):
        for _ in range(250):
            x.grad = torch.randn(x.shape, generator=generator)
            optimizer.step()
        assert float(orthogonality_error(x.detach()).max()) < 1e-5
        optimizer.retract()
        assert float(orthogonality_error(x.detach()).max()) < 1e-6


@pytest.mark.parametrize("lr, orders", [(2e-3, {2}), (8e-3, {2, 3}), (0.03, {3, 4})])
def test_drift_without_retraction_follows_the_bound(lr, orders):
    """Without retraction the drift of the paper's rule is what its truncation bound allows.

    X' = X·E has X'ᵀX' - I = Eᵀ(XᵀX - I)E + (EᵀE - I), so with b_t the bound of step t the drift
    e_t = ‖XᵀX - I‖₂ obeys e' ≤ (1+b)·e + b: at most Π(1+b_t) - 1, the sum of the b_t to first
    order. In float64 the drift is far above round-off, so the bound says something, and it is
    within a factor of a thousand of what happens.
    """
    dimension = 16
    x = start(1, dimension, torch.float64)
    optimizer = ManifoldAdam([x], lr=lr, lookahead=0, exp_rule="paper")
    generator = torch.Generator().manual_seed(1)
    allowed, seen = 0.0, set()
    for step in range(1, STEPS + 1):
        x.grad = torch.randn(x.shape, generator=generator, dtype=torch.float64)
        optimizer.step()
        state = optimizer.state[x]
        m, v = state["exp_avg"] / (1 - 0.9**step), state["exp_avg_sq"] / (1 - 0.999**step)
        delta = lr * m / (v.sqrt() + 1e-8)
        norm = float(torch.linalg.matrix_norm(delta))
        order = 2 if norm < 0.05 else 3 if norm < 0.25 else 4
        assert norm < 1
        seen.add(order)
        rho = float(torch.linalg.matrix_norm(delta, ord=2))
        allowed += math.log1p(orthogonality_loss_bound(rho, order))
    assert seen == orders
    gram = x.detach().mT @ x.detach() - torch.eye(dimension, dtype=torch.float64)
    drift = float(torch.linalg.matrix_norm(gram, ord=2))
    # A step rounds X to eps; in the mean square these add up like a random walk, at worst linearly.
    round_off = STEPS * torch.finfo(torch.float64).eps
    assert drift <= math.expm1(allowed) * (1 + 1e-6) + 10 * round_off
    assert drift > 100 * round_off
    assert drift > 1e-3 * math.expm1(allowed)
