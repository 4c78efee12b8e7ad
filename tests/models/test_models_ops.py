"""The operations of a block one by one: isometries, directions, activations, pooling."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lipnext_scale.models import blocks

sides = st.integers(1, 5)


def tokens(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


@settings(max_examples=40, deadline=None)
@given(
    channels=st.integers(1, 4),
    patch=st.integers(1, 4),
    side=st.integers(1, 4),
    extra=st.integers(0, 5),
)
def test_space_to_depth_is_an_isometry(channels, patch, side, extra):
    """Every pixel arrives exactly once; what is appended is zero; distances stay."""
    images = tokens(2, channels, side * patch, side * patch)
    width = channels * patch**2 + extra
    out = blocks.space_to_depth(images, patch, width)
    assert out.shape == (2, side, side, width)
    assert not out[..., channels * patch**2 :].any()
    for image, result in zip(images, out[..., : channels * patch**2], strict=True):
        assert torch.equal(image.flatten().sort().values, result.flatten().sort().values)
    assert float(out[0].sub(out[1]).norm()) == pytest.approx(float(images[0].sub(images[1]).norm()))


def test_space_to_depth_keeps_patches_together():
    """The token in row i, column j holds the pixels of patch (i, j)."""
    images = torch.zeros(1, 3, 6, 6)
    images[0, :, 2:4, 4:6] = torch.arange(1.0, 13.0).view(3, 2, 2)
    out = blocks.space_to_depth(images, 2, 12)
    assert torch.equal(out[0, 1, 2].sort().values, images[0, :, 2:4, 4:6].flatten().sort().values)
    assert int(out.any(dim=-1).sum()) == 1


@settings(max_examples=40, deadline=None)
@given(height=sides, width=sides, part=st.integers(0, 3), still=st.integers(0, 3))
def test_circular_shift_is_a_permutation(height, width, part, still):
    """Circular padding permutes the entries of each channel: the norm is kept exactly."""
    x = tokens(2, height, width, 4 * part + still)
    out = blocks.spatial_shift(x, part, "circular")
    assert out.shape == x.shape
    before, after = x.flatten(1, 2), out.flatten(1, 2)
    assert torch.equal(before.sort(dim=1).values, after.sort(dim=1).values)
    assert torch.equal(out[..., :still], x[..., :still])


@settings(max_examples=40, deadline=None)
@given(height=sides, width=sides, part=st.integers(1, 3), still=st.integers(0, 3))
def test_zero_padded_shift_drops_what_leaves(height, width, part, still):
    """Zero padding loses exactly the one row or column that is pushed out, and never more norm."""
    x = tokens(2, height, width, 4 * part + still)
    out = blocks.spatial_shift(x, part, "zero")
    assert float(out.norm()) <= float(x.norm())
    down, up, right, left = x[..., still:].split(part, dim=-1)
    lost = down[:, -1].norm() ** 2 + up[:, 0].norm() ** 2
    lost = lost + right[:, :, -1].norm() ** 2 + left[:, :, 0].norm() ** 2
    assert float(out.norm() ** 2 + lost) == pytest.approx(float(x.norm() ** 2))


@pytest.mark.parametrize("padding", ["circular", "zero"])
def test_shift_moves_a_token_down_up_right_left(padding):
    """The four parts move by (+1, 0), (-1, 0), (0, +1), (0, -1); the first channels stay."""
    x = torch.zeros(1, 5, 5, 6)
    x[0, 2, 2] = torch.arange(1.0, 7.0)
    out = blocks.spatial_shift(x, 1, padding)
    expected = torch.zeros_like(x)
    expected[0, 2, 2, :2] = torch.tensor([1.0, 2.0])
    for channel, (row, column) in enumerate([(3, 2), (1, 2), (2, 3), (2, 1)], start=2):
        expected[0, row, column, channel] = channel + 1.0
    assert torch.equal(out, expected)


def test_shift_at_the_border_wraps_or_vanishes():
    """A token in the corner reappears on the other side with circular padding only."""
    x = torch.zeros(1, 3, 3, 4)
    x[0, 2, 2] = 1.0  # down and right leave the image
    circular, zero = (blocks.spatial_shift(x, 1, padding)[0] for padding in ("circular", "zero"))
    assert circular[0, 2, 0] == 1 and circular[2, 0, 2] == 1 and circular.sum() == 4
    assert zero[0, 2, 0] == 0 and zero[2, 0, 2] == 0 and zero.sum() == 2


@pytest.mark.parametrize(
    "width, ratio, part", [(1024, 1 / 16, 64), (48, 1 / 16, 3), (50, 0.25, 12)]
)
def test_shift_width(width, ratio, part):
    """k = int(αC)."""
    assert blocks.shift_width(width, ratio) == part


@pytest.mark.parametrize("beta, folded", [(0.0, 0), (0.5, 4), (0.75, 6), (0.8, 6), (1.0, 8)])
def test_beta_abs_folds_the_first_channels(beta, folded):
    """|·| on int(βC) channels of the last dimension (not the first, as printed)."""
    x = -torch.ones(5, 3, 3, 8)
    expected = torch.cat([torch.ones(5, 3, 3, folded), -torch.ones(5, 3, 3, 8 - folded)], dim=-1)
    assert torch.equal(blocks.beta_abs(x, beta), expected)


@pytest.mark.parametrize("half", [1, 3, 8])
def test_minmax_is_a_rotated_beta_abs(half):
    """Theorem 2: MinMax(x) = Rᵀ·β-Abs(R·x) at β = 1/2 with R = [[I, -I], [I, I]]/√2."""
    x = tokens(50, 2 * half)
    identity = torch.eye(half, dtype=torch.float64)
    r = (
        torch.cat([torch.cat([identity, -identity], 1), torch.cat([identity, identity], 1)])
        / 2**0.5
    )
    expected = blocks.beta_abs(x @ r.mT, 0.5) @ r
    torch.testing.assert_close(blocks.minmax(x), expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize("function", [lambda x: blocks.beta_abs(x, 0.75), blocks.minmax])
def test_activations_are_one_lipschitz(function):
    """|act(x) - act(y)| ≤ |x - y| token by token."""
    x, y = tokens(1000, 8), tokens(1000, 8, seed=1)
    ratio = (function(x) - function(y)).norm(dim=-1) / (x - y).norm(dim=-1)
    assert float(ratio.max()) <= 1 + 1e-12
    assert float(ratio.min()) < 0.99  # it is not linear


def test_l2_pool_is_the_norm_over_positions():
    """One norm for each image and channel, over H and W."""
    x = torch.zeros(2, 3, 4, 5)
    x[1, 0, 1, 2], x[1, 2, 3, 2] = 3.0, -4.0
    expected = torch.zeros(2, 5)
    expected[1, 2] = 5.0
    assert torch.equal(blocks.l2_pool(x), expected)


def test_l2_pool_has_a_finite_gradient_at_zero():
    """A channel that is zero everywhere gets gradient 0, not NaN; the others get x/‖x‖."""
    x = tokens(2, 3, 3, 4)
    x[..., 1] = 0
    x.requires_grad_()
    blocks.l2_pool(x).sum().backward()
    assert not x.grad[..., 1].any()
    value = x.detach()
    expected = value / value.norm(dim=(1, 2), keepdim=True)
    torch.testing.assert_close(x.grad[..., [0, 2, 3]], expected[..., [0, 2, 3]])


def test_l2_pool_of_bfloat16_is_summed_in_float32():
    """The pooled features are at least float32: a bfloat16 sum of 4,096 squares would stall."""
    pooled = blocks.l2_pool(torch.ones(1, 64, 64, 2, dtype=torch.bfloat16))
    assert pooled.dtype == torch.float32 and torch.equal(pooled, torch.full((1, 2), 64.0))
