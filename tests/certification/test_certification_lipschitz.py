"""K is an upper bound of the true norm, close to it, and made of the weights as stored."""

from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lipnext_scale.certification import Certifier, lipschitz_bound
from lipnext_scale.certification.certifier import gram_bound, measure_layers, spectral_norm_bound
from lipnext_scale.manifold import random_orthogonal
from lipnext_scale.models import LipNeXt, LipNeXtConfig
from lipnext_scale.utils.errors import UserError


def near_orthogonal(dimension: int, seed: int, singular_values: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    u, v = (random_orthogonal(dimension, generator, torch.float64) for _ in range(2))
    return u * singular_values @ v


@pytest.mark.slow
@settings(max_examples=1000, deadline=None)
@given(
    dimension=st.integers(1, 40),
    seed=st.integers(0, 2**31),
    spread=st.sampled_from([0.0, 1e-9, 1e-6, 1e-3, 0.1]),
    largest=st.sampled_from([1.0, 1 + 1e-12, 1 + 1e-6, 1.05, 3.0, 50.0]),
)
def test_the_bound_is_never_below_the_true_norm(
    dimension: int, seed: int, spread: float, largest: float
) -> None:
    """Also where one large singular value hides in a well-conditioned rest.

    Gram iteration bounds matrices far from O(d) too, and at most by their Frobenius norm.
    """
    generator = torch.Generator().manual_seed(seed)
    values = 1 + spread * (2 * torch.rand(dimension, generator=generator, dtype=torch.float64) - 1)
    values[seed % dimension] = largest
    matrix = near_orthogonal(dimension, seed, values).float()
    true = torch.linalg.matrix_norm(matrix.double(), ord=2).item()
    bound = spectral_norm_bound(matrix)
    # The reference itself has an error of a few units in the last place.
    assert bound >= true * (1 - 1e-15)
    for scale in (1e-20, 1e-3, 1e5):
        x = scale * matrix.double()
        frobenius = torch.linalg.matrix_norm(x).item() * (1 + 1e-9)
        assert scale * true * (1 - 1e-14) <= gram_bound(x) <= frobenius


def test_the_bound_is_tight() -> None:
    """Within 5e-7 for a float32 orthogonal matrix; within 0.1 % for 1.05 among 255 ones."""
    matrix = random_orthogonal(256, torch.Generator().manual_seed(0))
    true = torch.linalg.matrix_norm(matrix.double(), ord=2).item()
    assert 0 <= spectral_norm_bound(matrix) - true < 5e-7
    values = torch.ones(256, dtype=torch.float64)
    values[100] = 1.05
    assert 1.05 <= spectral_norm_bound(near_orthogonal(256, 1, values)) < 1.05 * 1.001


def test_the_network_bound_is_the_product_over_its_layers() -> None:
    """1.1 and 1.2 in different blocks multiply, and so does 1.3 in R."""
    model = LipNeXt(LipNeXtConfig(3, 16, 8, 2, 1, 10, blocks_per_bank=2), seed=0)
    assert 1 <= lipschitz_bound(model) < 1 + 1e-5
    with pytest.raises(ValueError, match="facts of 2 layers"):  # the share of one of two ranks
        Certifier(model, measure_layers(model, 0, 2))
    with torch.no_grad():
        model.groups[0].bank[0, 1] *= 1.1  # W of the first block
        model.groups[1].bank[0, 1] *= 1.2  # of the last one
    assert 1.32 * (1 - 1e-6) <= lipschitz_bound(model) <= 1.32 * 1.005
    with torch.no_grad():
        model.groups[0].bank[0, 0] *= 1.3  # R of the first
    expected = 1.32 * 1.3
    assert expected * (1 - 1e-6) <= lipschitz_bound(model) <= expected * 1.01


@settings(max_examples=60, deadline=None)
@given(
    dimension=st.integers(1, 5), seed=st.integers(0, 2**31), noise=st.sampled_from([0.0, 1e-8, 0.1])
)
def test_the_bound_holds_in_exact_arithmetic(dimension: int, seed: int, noise: float) -> None:
    """bound²·I - XᵀX is positive semidefinite, shown with fractions: no rounding, no tolerance."""
    generator = torch.Generator().manual_seed(seed)
    matrix = random_orthogonal(dimension, generator)
    matrix = matrix + noise * torch.randn(dimension, dimension, generator=generator)
    exact = [[Fraction(value) for value in row] for row in matrix.tolist()]
    square = Fraction(spectral_norm_bound(matrix)) ** 2
    gap = [
        [
            (square if i == j else 0) - sum(row[i] * row[j] for row in exact)
            for j in range(dimension)
        ]
        for i in range(dimension)
    ]
    # Positive definite: every pivot of the elimination is positive.
    for pivot in range(dimension):
        assert gap[pivot][pivot] > 0
        for row in range(pivot + 1, dimension):
            factor = gap[row][pivot] / gap[pivot][pivot]
            for column in range(pivot, dimension):
                gap[row][column] -= factor * gap[pivot][column]


def test_norms_that_overflow_and_weights_that_are_not_finite_are_refused() -> None:
    model = LipNeXt(LipNeXtConfig(2, 16, 8, 2, 1, 10), seed=0).double()
    with torch.no_grad():
        model.groups[0].bank *= 1e155
    with pytest.raises(UserError, match="overflows"):
        lipschitz_bound(model)
    with torch.no_grad():
        model.groups[0].bank[1, 0, 2, 3] = float("nan")
    with pytest.raises(UserError, match=r"groups\.0\.bank"):
        lipschitz_bound(model)
