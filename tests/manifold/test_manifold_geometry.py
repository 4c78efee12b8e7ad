"""skew, the Lie gradient, the orthogonality error, random points of O(d), and scratch memory."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lipnext_scale.manifold import (
    Workspace,
    lie_gradient,
    lie_gradient_reference,
    orthogonality_error,
    random_orthogonal,
    skew,
)

SHAPES = [(1, 1), (5, 5), (3, 8, 8), (2, 2, 17, 17), (1, 32, 32)]


def orthogonal_stack(shape: tuple[int, ...], seed: int, dtype=torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    count = int(torch.Size(shape[:-2]).numel())
    matrices = [random_orthogonal(shape[-1], generator, dtype) for _ in range(count)]
    return torch.stack(matrices).view(shape)


def normal(shape: tuple[int, ...], seed: int, dtype=torch.float64) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@settings(max_examples=30, deadline=None)
@given(
    shape=st.sampled_from(SHAPES),
    seed=st.integers(0, 2**31),
    log_scale=st.floats(-30, 30),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_skew_is_exact_and_idempotent(shape, seed, log_scale, dtype):
    """skew(A)ᵀ = -skew(A) and skew(skew(A)) = skew(A) to the last bit, at every scale."""
    result = skew(normal(shape, seed, dtype) * 10**log_scale)
    assert torch.equal(result.mT, -result)
    assert torch.equal(skew(result), result)
    assert not result.diagonal(dim1=-2, dim2=-1).any()


def test_skew_keeps_skew_and_kills_symmetric_matrices():
    """skew is the projection onto the skew matrices along the symmetric ones."""
    a = normal((4, 6, 6), 0)
    assert not skew(a + a.mT).any()
    torch.testing.assert_close(skew(a - a.mT), a - a.mT, rtol=0, atol=0)


@settings(max_examples=30, deadline=None)
@given(shape=st.sampled_from(SHAPES), seed=st.integers(0, 2**31))
def test_lie_gradient_equals_the_three_product_formula(shape, seed):
    """On O(d) one product gives what the paper's Riemannian gradient gives with three."""
    x, g = orthogonal_stack(shape, seed), normal(shape, seed + 1)
    fast = lie_gradient(x, g)
    torch.testing.assert_close(fast, lie_gradient_reference(x, g), rtol=1e-12, atol=1e-12)
    assert torch.equal(fast.mT, -fast)


def test_lie_gradient_is_the_derivative_along_the_group():
    """d/dt f(X·exp(tΩ)) at 0 is <A, Ω> for every skew Ω: A is the gradient in the Lie algebra."""
    x, target = orthogonal_stack((7, 7), 3), normal((7, 7), 4)
    direction = skew(normal((7, 7), 5))

    def f(t: float) -> float:
        return float(((x @ torch.linalg.matrix_exp(t * direction) - target) ** 4).sum())

    gradient = 4 * (x - target) ** 3
    slope = (f(1e-5) - f(-1e-5)) / 2e-5
    assert slope == pytest.approx(float((lie_gradient(x, gradient) * direction).sum()), rel=1e-7)


def test_lie_gradient_in_a_workspace_has_the_same_values():
    """Reused buffers change nothing, also when later calls have other sizes or types."""
    workspace = Workspace()
    for shape, dtype in [
        ((3, 16, 16), torch.float64),
        ((1, 8, 8), torch.float64),
        ((2, 16, 16), torch.float32),
        ((4, 33, 33), torch.float32),
        ((3, 16, 16), torch.float64),
    ]:
        x, g = orthogonal_stack(shape, 1, dtype), normal(shape, 2, dtype)
        result = lie_gradient(x, g, workspace)
        accuracy = 1e-12 if dtype == torch.float64 else 1e-5
        torch.testing.assert_close(result, lie_gradient(x, g), rtol=accuracy, atol=accuracy)
        assert torch.equal(result.mT, -result)


def test_orthogonality_error_by_hand():
    """‖XᵀX - I‖_F/√d: of s·Q it is |s²-1|, of a zero matrix 1, and each matrix has its own."""
    q = orthogonal_stack((9, 9), 0)
    batch = torch.stack([q, 1.5 * q, 0 * q]).view(3, 1, 9, 9)
    expected = torch.tensor([[0.0], [1.25], [1.0]], dtype=torch.float64)
    torch.testing.assert_close(orthogonality_error(batch), expected, rtol=1e-12, atol=1e-14)

    one_wrong_entry = torch.eye(4, dtype=torch.float64)
    one_wrong_entry[0, 1] = 0.5  # XᵀX - I = [[0, ½], [½, ¼]] in the corner
    expected = (2 * 0.25 + 0.0625) ** 0.5 / 2
    assert float(orthogonality_error(one_wrong_entry)) == pytest.approx(expected)


@pytest.mark.parametrize("dimension", [1, 2, 31, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_random_orthogonal_is_orthogonal(dimension, dtype):
    """The start of training is on O(d) to the round-off of its type."""
    x = random_orthogonal(dimension, torch.Generator().manual_seed(0), dtype)
    assert x.dtype == dtype and x.shape == (dimension, dimension)
    assert float(orthogonality_error(x.double())) < 10 * torch.finfo(dtype).eps


def test_random_orthogonal_depends_on_its_generator_alone():
    """Equal seeds give equal matrices whatever torch's global generator does, others differ."""
    draws = []
    for seed, global_seed in [(5, 0), (5, 1), (6, 0)]:
        torch.manual_seed(global_seed)
        draws.append(random_orthogonal(12, torch.Generator().manual_seed(seed)))
    assert torch.equal(draws[0], draws[1])
    assert not torch.allclose(draws[0], draws[2])


def test_random_orthogonal_covers_both_components_evenly():
    """Rotations and reflections both occur, and no entry has a preferred sign (Haar measure)."""
    generator = torch.Generator().manual_seed(0)
    sample = torch.stack([random_orthogonal(4, generator, torch.float64) for _ in range(400)])
    share_of_rotations = float((torch.linalg.det(sample) > 0).double().mean())
    assert 0.4 < share_of_rotations < 0.6
    # Every entry has mean 0 and variance 1/d; five standard deviations of 400 draws.
    assert float(sample.mean(0).abs().max()) < 5 * 0.5 / 20
    assert float((sample.square().mean(0) - 0.25).abs().max()) < 0.1


def test_workspace_buffers_have_the_shape_asked_for_and_are_reused():
    """A buffer looks like its model; the same name is the same memory, another name is not."""
    workspace, model = Workspace(), torch.empty(3, 5, 8)
    first = workspace.like("a", model)
    assert first.shape == model.shape and first.dtype == model.dtype and first.is_contiguous()
    assert workspace.like("a", model).data_ptr() == first.data_ptr()
    assert workspace.like("a", model[:2]).data_ptr() == first.data_ptr()
    assert workspace.like("b", model).data_ptr() != first.data_ptr()
    assert workspace.like("a", model.double()).dtype == torch.float64


def test_workspace_row_padding_separates_rows_without_changing_values():
    """Padded rows lie further apart in memory, and products written there are the same."""
    workspace = Workspace()
    a, b = normal((2, 16, 16), 0), normal((2, 16, 16), 1)
    padded = workspace.like("a", a, row_padding=16)
    assert padded.shape == a.shape and padded.stride() == (16 * 32, 32, 1)
    torch.matmul(a, b, out=padded)
    torch.testing.assert_close(padded, a @ b, rtol=1e-13, atol=1e-13)
    larger = workspace.like("a", torch.empty(3, 40, 40, dtype=torch.float64), row_padding=8)
    assert larger.shape == (3, 40, 40) and larger.stride(-2) == 48
