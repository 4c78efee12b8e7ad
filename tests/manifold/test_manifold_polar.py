"""Polar retraction by Newton-Schulz against the singular value decomposition."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lipnext_scale.manifold import (
    orthogonality_error,
    polar_reference,
    polar_retract,
    random_orthogonal,
)

# Round-off of a product of d×d matrices near O(d), in ‖XᵀX-I‖_F/√d.
ROUND_OFF = {torch.float32: 2e-6, torch.float64: 5e-15}


def orthogonal(dimension: int, seed: int) -> torch.Tensor:
    return random_orthogonal(dimension, torch.Generator().manual_seed(seed), torch.float64)


def perturbed(dimension: int, seed: int, size: float) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + 10_000)
    noise = torch.randn(dimension, dimension, generator=generator, dtype=torch.float64)
    return orthogonal(dimension, seed) + size * noise / dimension**0.5


def with_singular_values(values: list[float], seed: int) -> torch.Tensor:
    sigma = torch.tensor(values, dtype=torch.float64)
    return orthogonal(len(values), seed) * sigma @ orthogonal(len(values), seed + 1)


def assert_is_polar_factor(result: torch.Tensor, matrix: torch.Tensor, slack: float = 1) -> None:
    tolerance = slack * ROUND_OFF[matrix.dtype]
    assert result.shape == matrix.shape and result.dtype == matrix.dtype
    assert float(orthogonality_error(result.double()).max()) < tolerance
    expected = polar_reference(matrix.double())
    assert float((result.double() - expected).abs().max()) < tolerance


@settings(max_examples=40, deadline=None)
@given(
    dimension=st.integers(1, 64),
    seed=st.integers(0, 2**31),
    size=st.sampled_from([1e-6, 1e-4, 1e-3, 1e-2, 0.05]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_near_the_group_it_equals_the_svd(dimension, seed, size, dtype):
    """From a perturbation of 1e-3 (and others) Newton-Schulz lands where U·Vᵀ is."""
    matrix = perturbed(dimension, seed, size).to(dtype)
    assert_is_polar_factor(polar_retract(matrix), matrix)


def test_near_the_group_no_svd_is_taken(monkeypatch):
    """The retraction of training steps costs products only."""
    matrix = torch.stack([perturbed(32, seed, 1e-3) for seed in range(3)])
    monkeypatch.setattr(torch.linalg, "svd", lambda *_, **__: pytest.fail("an SVD was taken"))
    polar_retract(matrix)
    with pytest.raises(pytest.fail.Exception, match="an SVD was taken"):
        polar_retract(3 * matrix)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "values", [[0.01, 1, 1, 1], [3, 1, 1, 1], [0.01, 0.5, 1.8, 30], [0.3] * 6, [1.3, 0.6, 1.0]]
)
def test_far_from_the_group_it_equals_the_svd(values, dtype):
    """Singular values from which Newton-Schulz would not converge, or not soon, do no harm."""
    matrix = with_singular_values(values, 0).to(dtype)
    # The polar factor of a matrix of smallest singular value σ moves by 1/σ times a perturbation.
    assert_is_polar_factor(polar_retract(matrix), matrix, slack=max(1.0, 1 / min(values)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_batch_may_mix_near_and_far_matrices(dtype):
    """Each matrix of a batch with leading dimensions gets its own polar factor."""
    matrices = [
        perturbed(8, 0, 1e-3),
        with_singular_values([3.0, 0.1, 1, 1, 1, 1, 1, 2], 1),
        perturbed(8, 2, 1e-6),
        with_singular_values([0.01] + [1.0] * 7, 3),
        orthogonal(8, 4),
        perturbed(8, 5, 0.05),
    ]
    batch = torch.stack(matrices).view(2, 3, 8, 8).to(dtype)
    assert_is_polar_factor(polar_retract(batch), batch, slack=100)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_orthogonal_matrices_stay_where_they_are(dtype):
    """Retracting twice is retracting once, to round-off, and the identity is not touched at all."""
    matrix = torch.stack([orthogonal(48, seed) for seed in range(2)]).to(dtype)
    again = polar_retract(matrix)
    assert float((again - matrix).abs().max()) < ROUND_OFF[dtype]
    assert torch.equal(polar_retract(torch.eye(48, dtype=dtype)), torch.eye(48, dtype=dtype))


def test_it_removes_drift_in_float32():
    """The error it leaves is below the stated round-off, 4·eps, whatever it was before."""
    for size in (1e-7, 1e-5, 1e-3, 0.1):
        result = polar_retract(perturbed(64, 7, size).float())
        assert float(orthogonality_error(result.double())) < 4 * torch.finfo(torch.float32).eps


def test_it_returns_new_memory():
    """The argument is left as it was, also when nothing had to be done."""
    for matrix in (perturbed(6, 0, 1e-3), torch.eye(6), 3 * torch.eye(6)):
        kept = matrix.clone()
        result = polar_retract(matrix)
        assert torch.equal(matrix, kept) and result.data_ptr() != matrix.data_ptr()


def test_an_empty_stack_is_no_exception():
    """A rank that owns no matrix of a bank retracts none."""
    assert polar_retract(torch.empty(0, 5, 5)).shape == (0, 5, 5)


def test_non_finite_matrices_are_refused():
    """NaN is a bug further up: an error, not a result."""
    with pytest.raises(AssertionError, match="non-finite"):
        polar_retract(torch.full((2, 3, 3), float("nan")))
