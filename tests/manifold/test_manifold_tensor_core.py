"""The exponential by tensor-core products, emulated."""

import pytest
import torch

from lipnext_scale import manifold
from lipnext_scale.manifold import kernels, tensor_core


def skew_stack(*sizes: float, width: int = 24) -> torch.Tensor:
    """Random skew matrices with these norms, in bf16."""
    generator = torch.Generator().manual_seed(0)
    a = manifold.skew(torch.randn(len(sizes), width, width, generator=generator))
    norms = torch.linalg.matrix_norm(a, ord=2, keepdim=True)
    return (a / norms * torch.tensor(sizes)[:, None, None]).bfloat16()


def norms(a: torch.Tensor) -> torch.Tensor:
    return a.float().square().sum(2)


def change_of(operand: torch.Tensor) -> torch.Tensor:
    hi, lo, again = operand.double().chunk(3, dim=1)
    assert torch.equal(hi, again)
    return hi + lo


@pytest.mark.parametrize("squarings", [0, 1, 2])
def test_operand_is_the_exponential_less_one(squarings):
    a = skew_stack(*(size * 2**squarings for size in (0.01, 0.1, 0.15)))
    operand, shrink = tensor_core.exp_operand(a, norms(a), squarings)
    exact = torch.linalg.matrix_exp(a.double()) - torch.eye(24)
    assert shrink.eq(1).all()
    # The cubic term is another one than exp's, and in bf16; a squaring doubles what is wrong.
    error = torch.linalg.matrix_norm(change_of(operand) - exact, ord=2)
    third = (1 / 6 - kernels.CUBIC + kernels.CUBIC * 2**-8) * 0.15**3
    limit = 2**squarings * (third + 0.15 * 2**-15 + 0.15**4 / 24)
    assert error.max() < limit, (error, limit)


@pytest.mark.parametrize("squarings", [0, 1])
def test_an_exponent_too_large_is_shrunk(squarings):
    a = skew_stack(0.1, 30.0)
    operand, shrink = tensor_core.exp_operand(a, norms(a), squarings)
    assert shrink[0] == 1 and shrink[1] < 0.1
    e = change_of(operand) + torch.eye(24)
    loss = torch.linalg.matrix_norm(manifold.identity_deviation(e), ord=2)
    # The series' end, and roundings of C: 2⁻¹⁷ as hi + lo, 2⁻⁹ of its small tail.
    assert loss.max() < 2**squarings * (tensor_core.LARGEST * tensor_core.TOLERANCE + 1e-3 * 0.5**3)
