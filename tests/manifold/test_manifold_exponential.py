"""The exponential of small skew matrices: which order is taken, and how far it is from exp(A)."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lipnext_scale.manifold import (
    ExpPlan,
    Workspace,
    exp_reference,
    fast_exp,
    multiply_by_exp_,
    orthogonality_loss_bound,
    plan_exponentials,
    random_orthogonal,
    skew,
    taylor_exp_reference,
)
from lipnext_scale.manifold.exponential import EXACT, default_tolerance, skew_square

EPS = torch.finfo(torch.float64).eps


def random_skew(dimension: int, seed: int, dtype=torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return skew(torch.randn(dimension, dimension, generator=generator, dtype=dtype))


def with_frobenius_norm(norm: float, dimension: int = 12, seed: int = 0) -> torch.Tensor:
    a = random_skew(dimension, seed)
    return a * (norm / torch.linalg.matrix_norm(a))


def with_spectral_norm(norm: float, dimension: int = 12, seed: int = 0) -> torch.Tensor:
    a = random_skew(dimension, seed)
    return a * (norm / torch.linalg.matrix_norm(a, ord=2))


def rotation_generator(angle: float) -> torch.Tensor:
    """A of the plane rotation by `angle`: its eigenvalues are exactly ±i·angle."""
    return torch.tensor([[0.0, -angle], [angle, 0.0]], dtype=torch.float64)


def orthogonality_loss(e: torch.Tensor) -> float:
    e = e.double()
    gram = e.mT @ e - torch.eye(e.shape[-1], dtype=torch.float64)
    return float(torch.linalg.matrix_norm(gram, ord=2).max())


# --- which order ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "norm, order",
    [
        (0.0, 2),
        (0.0499, 2),
        (0.05, 3),
        (0.2499, 3),
        (0.25, 4),
        (0.9999, 4),
        (1.0, EXACT),
        (9, EXACT),
    ],
)
def test_paper_rule_has_the_thresholds_of_equation_5(norm, order):
    """‖A‖_F < 0.05, 0.25, 1 give orders 2, 3, 4; from 1 on the exact exponential."""
    assert plan_exponentials([norm], "paper", 1e-7) == [ExpPlan(order)]


def test_paper_rule_decides_for_each_matrix_of_a_mixed_batch():
    """Every matrix of a batch gets the order of its own norm, whatever its neighbours get."""
    norms = [0.2, 0.9, 0.01, 3.0, 0.04, 0.1, 0.6, 1.5, 0.0]
    orders = [3, 4, 2, EXACT, 2, 3, 4, EXACT, 2]
    batch = torch.stack([with_frobenius_norm(n, seed=i) for i, n in enumerate(norms)])
    results = fast_exp(batch.view(3, 3, 12, 12), "paper").view(9, 12, 12)
    for a, order, result in zip(batch, orders, results, strict=True):
        expected = torch.linalg.matrix_exp(a) if order == EXACT else taylor_exp_reference(a, order)
        torch.testing.assert_close(result, expected, rtol=0, atol=20 * EPS)
        if order != EXACT and a.any():  # the next order would give another result
            other = taylor_exp_reference(a, order + 1)
            assert float((result - other).abs().max()) > 1000 * EPS


def test_paper_rule_depends_on_the_frobenius_norm_not_the_spectral_norm():
    """A matrix with ‖A‖₂ < 0.05 < ‖A‖_F gets order 3."""
    a = with_frobenius_norm(0.06)
    assert float(torch.linalg.matrix_norm(a, ord=2)) < 0.05
    torch.testing.assert_close(
        fast_exp(a, "paper"), taylor_exp_reference(a, 3), rtol=0, atol=10 * EPS
    )


def test_bounded_rule_takes_the_cheapest_plan_under_the_tolerance():
    """Order 2 while ρ⁴/4 allows, then 4, then as few squarings as the tolerance needs."""
    tolerance = 1e-6
    last_order_2 = (4 * tolerance) ** 0.25
    plans = plan_exponentials(
        [0.0, 0.99 * last_order_2, 1.01 * last_order_2, 0.1, 3.0], "bounded", tolerance
    )
    assert plans[:4] == [ExpPlan(2), ExpPlan(2), ExpPlan(4), ExpPlan(4)]
    scaled = plans[4]
    assert scaled.order == 4 and scaled.squarings > 0

    def loss_with(squarings: int) -> float:
        generator = rotation_generator(3.0 / 2**squarings)
        return orthogonality_loss(
            torch.linalg.matrix_power(taylor_exp_reference(generator, 4), 2**squarings)
        )

    assert loss_with(scaled.squarings) <= tolerance < loss_with(scaled.squarings - 1)


@pytest.mark.parametrize("rule", ["paper", "bounded"])
def test_sizes_that_are_not_finite_are_refused(rule):
    """An update that overflowed must not loop or pass silently."""
    for size in (math.nan, math.inf):
        with pytest.raises(FloatingPointError, match="not finite"):
            plan_exponentials([0.1, size], rule, 1e-7)


def test_unknown_rule_and_order_are_refused():
    """The message names what was given and what there is."""
    with pytest.raises(ValueError, match="rule = 'exact'.*paper, bounded"):
        fast_exp(rotation_generator(0.1), "exact")
    with pytest.raises(ValueError, match="order = 5"):
        orthogonality_loss_bound(0.1, 5)


# --- how far from exp(A) ----------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(log_norm=st.floats(-7, 1.5), dimension=st.integers(2, 24), seed=st.integers(0, 2**31))
def test_paper_rule_is_within_its_truncation_error(log_norm, dimension, seed):
    """‖E - exp(A)‖₂ ≤ ρ^(k+1)/(k+1)! with k the order and ρ = ‖A‖₂, plus round-off."""
    a = with_frobenius_norm(10**log_norm, dimension, seed)
    rho = float(torch.linalg.matrix_norm(a, ord=2))
    (plan,) = plan_exponentials([float(torch.linalg.matrix_norm(a))], "paper", 1e-15)
    k = plan.order
    truncation = 0.0 if k == EXACT else rho ** (k + 1) / math.factorial(k + 1)
    error = float(torch.linalg.matrix_norm(fast_exp(a, "paper") - exp_reference(a), ord=2))
    assert error <= truncation + 20 * EPS * (1 + rho) * dimension**0.5


@settings(max_examples=60, deadline=None)
@given(log_norm=st.floats(-6, math.log10(50)), seed=st.integers(0, 2**31))
def test_bounded_rule_is_within_its_truncation_error(log_norm, seed):
    """The same for `bounded`: squaring s times multiplies the error of exp(A/2^s) by 2^s."""
    a = with_spectral_norm(10**log_norm, 16, seed)
    rho = float(torch.linalg.matrix_norm(a, ord=2))
    size = float(torch.linalg.matrix_norm(a @ a) ** 0.5)
    (plan,) = plan_exponentials([size], "bounded", 1e-8)
    k, times = plan.order, 2**plan.squarings
    truncation = times * (rho / times) ** (k + 1) / math.factorial(k + 1) * (1 + 1e-6)
    error = float(torch.linalg.matrix_norm(fast_exp(a, "bounded", 1e-8) - exp_reference(a), ord=2))
    assert error <= truncation + 100 * EPS * (1 + rho)


@settings(max_examples=60, deadline=None)
@given(
    log_size=st.floats(-6, math.log10(50)),
    log_tolerance=st.floats(-15, -3),
    dimension=st.integers(2, 24),
    seed=st.integers(0, 2**31),
)
def test_bounded_rule_keeps_its_promise_in_float64(log_size, log_tolerance, dimension, seed):
    """‖EᵀE - I‖₂ ≤ tolerance for every size; round-off grows with the squarings as (1 + ρ)·s."""
    a = with_spectral_norm(10**log_size, dimension, seed)
    tolerance = 10**log_tolerance
    round_off = 20 * EPS * (1 + 10**log_size) * dimension**0.5
    assert orthogonality_loss(fast_exp(a, "bounded", tolerance)) <= tolerance + round_off


@settings(max_examples=60, deadline=None)
@given(
    log_size=st.floats(-6, math.log10(50)),
    dimension=st.integers(2, 24),
    seed=st.integers(0, 2**31),
)
def test_bounded_rule_keeps_its_promise_in_float32(log_size, dimension, seed):
    """With the default tolerance, twice the machine precision, float32 loses round-off only."""
    a = with_spectral_norm(10**log_size, dimension, seed).float()
    eps = torch.finfo(torch.float32).eps
    assert default_tolerance(torch.float32) == 2 * eps
    round_off = 20 * eps * (1 + 10**log_size) * dimension**0.5
    assert orthogonality_loss(fast_exp(a, "bounded")) <= 2 * eps + round_off


def test_bounded_rule_keeps_its_promise_in_a_mixed_batch():
    """Matrices that need 0 to many squarings, in one batch, are each right."""
    sizes = [1e-6, 5.0, 0.3, 0.3, 40.0, 1e-3, 5.0]
    batch = torch.stack([with_spectral_norm(s, seed=i) for i, s in enumerate(sizes)])
    results = fast_exp(batch, "bounded", 1e-13)
    for a, result in zip(batch, results, strict=True):
        torch.testing.assert_close(result, exp_reference(a), rtol=0, atol=1e-12)


# --- the bound of the orthogonality loss ------------------------------------------------------


@settings(max_examples=80, deadline=None)
@given(
    order=st.sampled_from([2, 3, 4]),
    rho=st.floats(1e-3, 2.5),
    dimension=st.integers(2, 16),
    seed=st.integers(0, 2**31),
)
def test_orthogonality_loss_bound_is_an_upper_bound(order, rho, dimension, seed):
    """No Taylor polynomial of a skew A with ‖A‖₂ ≤ ρ loses more orthogonality than the bound."""
    loss = orthogonality_loss(taylor_exp_reference(with_spectral_norm(rho, dimension, seed), order))
    assert loss <= orthogonality_loss_bound(rho, order) * (1 + 1e-9) + 50 * EPS


@pytest.mark.parametrize("order, share", [(2, 0.999), (3, 0.98), (4, 0.99)])
def test_orthogonality_loss_bound_is_nearly_attained(order, share):
    """A plane rotation by 0.15 loses nearly all that the bound allows: it cannot be improved."""
    loss = orthogonality_loss(taylor_exp_reference(rotation_generator(0.15), order))
    assert loss >= share * orthogonality_loss_bound(0.15, order)


@given(order=st.sampled_from([2, 3, 4]), rho=st.floats(0, 5), larger=st.floats(0, 5))
def test_orthogonality_loss_bound_grows_with_rho(order, rho, larger):
    """It may be given any ρ ≥ ‖A‖₂."""
    assert orthogonality_loss_bound(rho, order) <= orthogonality_loss_bound(rho + larger, order)


@pytest.mark.parametrize("d", [12, 256, 301])
def test_square_of_a_skew_matrix(d):
    """Also where block rows are computed from the diagonal on, and d is no multiple of them."""
    a = skew(torch.randn(2, d, d, dtype=torch.float64))
    square = skew_square(a, torch.full_like(a, torch.nan))
    torch.testing.assert_close(
        square, a @ a, rtol=0, atol=d * EPS * float(a.square().sum(-1).max())
    )


# --- the product X·exp(A) ---------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["paper", "bounded"])
@pytest.mark.parametrize("give_square", [False, True])
def test_multiply_by_exp_equals_the_product(rule, give_square):
    """In place, by plan and with or without A² known, X becomes X·fast_exp(A), for every class."""
    sizes = [0.01, 0.02, 0.2, 0.6, 0.1, 1.7, 2.5, 0.03]
    a = torch.stack([with_frobenius_norm(s, seed=i) for i, s in enumerate(sizes)])
    generator = torch.Generator().manual_seed(1)
    x = torch.stack([random_orthogonal(12, generator, torch.float64) for _ in sizes])
    square = a @ a
    measured = torch.linalg.matrix_norm(a if rule == "paper" else square)
    measured = measured if rule == "paper" else measured.sqrt()
    plans = plan_exponentials(measured.tolist(), rule, 1e-9)
    assert len({plan.cost_class for plan in plans}) >= 3

    expected, kept = x @ fast_exp(a, rule, 1e-9), a.clone()
    workspace = Workspace()
    for _ in range(2):  # the second time in used buffers
        point = x.clone()
        given = square.clone() if give_square else None
        result = multiply_by_exp_(point, a, plans, given, workspace)
        assert result.data_ptr() == point.data_ptr()
        torch.testing.assert_close(point, expected, rtol=0, atol=1e-14)
        assert torch.equal(a, kept)


def test_multiply_by_exp_keeps_small_changes_in_float32():
    """An update below the machine precision of 1 still arrives in the small entries of X."""
    a = rotation_generator(1e-9).float()[None]
    x = torch.eye(2)[None]
    multiply_by_exp_(x, a, plan_exponentials([1.4e-9], "paper", 1e-7))
    assert float(x[0, 1, 0]) == pytest.approx(1e-9, rel=1e-6)


def test_references_are_right_for_a_plane_rotation():
    """exp of the generator is the rotation by its angle, and Taylor's series tends to it."""
    angle = 0.7
    rotation = torch.tensor(
        [[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]],
        dtype=torch.float64,
    )
    a = rotation_generator(angle)
    torch.testing.assert_close(exp_reference(a.float()), rotation, rtol=0, atol=1e-6)
    torch.testing.assert_close(exp_reference(a), rotation, rtol=0, atol=4 * EPS)
    torch.testing.assert_close(taylor_exp_reference(a, 20), rotation, rtol=0, atol=4 * EPS)
    expected = torch.tensor([[1 - angle**2 / 2, -angle], [angle, 1 - angle**2 / 2]]).double()
    torch.testing.assert_close(taylor_exp_reference(a, 2), expected, rtol=0, atol=1e-7)
