"""A group of blocks: the readable form against loops, and the fused form against the readable."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lipnext_scale.manifold import random_orthogonal
from lipnext_scale.models import BlockSpec, block_reference, fused_group, group_reference

WIDTH = 12


def spec(**changes) -> BlockSpec:
    fields = {
        "shift_part": 2,
        "padding": "circular",
        "activation": "beta_abs",
        "beta": 0.75,
    }
    return BlockSpec(**{**fields, **changes})


def draw(count: int, side: int, has_pos: bool, seed: int = 0, images: int = 3, width: int = WIDTH):
    """(x, bank [count, 2, C, C], bias, pos) of a group of blocks, in float64."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    matrices = [random_orthogonal(width, generator, torch.float64) for _ in range(2 * count)]
    pos = normal(count, side, side, 1) if has_pos else None
    bank = torch.stack(matrices).view(count, 2, width, width)
    return normal(images, side, side, width), bank, normal(count, width), pos


def gradients_of(function, inputs, wanted, the_spec, weight):
    """(output, gradients of the wanted inputs) of a scalar that weighs every output entry."""
    leaves = [None if i is None else i.clone() for i in inputs]
    for leaf, want in zip(leaves, wanted, strict=True):
        if leaf is not None and want:
            leaf.requires_grad_()
    out = function(*leaves, the_spec)
    (out * weight).sum().backward()
    return out.detach(), [None if leaf is None else leaf.grad for leaf in leaves]


# --- the readable form ------------------------------------------------------------------------


def paper_block(x, rotation, mixing, bias, pos, alpha_part, beta, padding):
    """The paper's listing with loops over tokens (β-Abs on the channels, as the text says)."""
    images, height, width, channels = x.shape
    mixed = np.empty_like(x)
    for n, i, j in itertools.product(range(images), range(height), range(width)):
        mixed[n, i, j] = rotation @ (x[n, i, j] + pos[i, j, 0])
    shifted, d = mixed.copy(), alpha_part
    a1, a2, a3, a4 = (slice(channels - (4 - k) * d, channels - (3 - k) * d) for k in range(4))
    shifted[..., a1] = np.roll(mixed[..., a1], 1, axis=1)
    shifted[..., a2] = np.roll(mixed[..., a2], -1, axis=1)
    shifted[..., a3] = np.roll(mixed[..., a3], 1, axis=2)
    shifted[..., a4] = np.roll(mixed[..., a4], -1, axis=2)
    if padding == "zero":
        shifted[:, 0, :, a1] = shifted[:, -1, :, a2] = 0
        shifted[:, :, 0, a3] = shifted[:, :, -1, a4] = 0
    out = np.empty_like(x)
    for n, i, j in itertools.product(range(images), range(height), range(width)):
        out[n, i, j] = (mixing @ rotation.T) @ shifted[n, i, j] + bias
    folded = int(beta * channels)
    out[..., :folded] = np.abs(out[..., :folded])
    return out


@pytest.mark.parametrize("padding", ["circular", "zero"])
@pytest.mark.parametrize("part, beta", [(1, 0.75), (3, 0.5), (2, 1.0)])
def test_block_is_the_listing_of_the_paper(part, beta, padding):
    """Z = β-Abs(M·Rᵀ·S(R·(X + pos)) + b), written with loops over tokens and np.roll."""
    x, bank, bias, pos = draw(1, 4, has_pos=True)
    rotation, mixing = bank[0]
    the_spec = spec(shift_part=part, beta=beta, padding=padding)
    result = block_reference(x, rotation, mixing @ rotation.mT, bias[0], pos[0], the_spec)
    arrays = (t.numpy() for t in (x, rotation, mixing, bias[0], pos[0]))
    expected = torch.from_numpy(paper_block(*arrays, part, beta, padding))
    torch.testing.assert_close(result, expected, rtol=0, atol=1e-13)


def test_group_is_its_blocks_one_after_the_other():
    """The bank holds the pairs (R₀, W₀), (R₁, W₁), …: block i uses the pair i."""
    x, bank, bias, pos = draw(3, 4, has_pos=True)
    expected = x
    for i in range(3):
        expected = block_reference(expected, *bank[i], bias[i], pos[i], spec())
    assert torch.equal(group_reference(x, bank, bias, pos, spec()), expected)


# --- the fused form ---------------------------------------------------------------------------

specs = st.builds(
    spec,
    shift_part=st.integers(0, WIDTH // 4),
    padding=st.sampled_from(["circular", "zero"]),
    activation=st.sampled_from(["beta_abs", "beta_abs", "minmax"]),
    beta=st.sampled_from([0.0, 0.3, 0.5, 0.75, 1.0]),
)
NAMES = ("x", "bank", "bias", "pos")


@settings(max_examples=80, deadline=None)
@given(
    the_spec=specs,
    count=st.integers(1, 3),
    side=st.integers(1, 4),
    has_pos=st.booleans(),
    wanted=st.tuples(*[st.booleans()] * 4).filter(lambda w: any(w[:3])),
    seed=st.integers(0, 2**31),
)
def test_fused_equals_reference(the_spec, count, side, has_pos, wanted, seed):
    """Values and gradients agree for every setting and every choice of frozen inputs."""
    inputs = draw(count, side, has_pos, seed, images=2)
    generator = torch.Generator().manual_seed(seed + 1)
    weight = torch.randn(inputs[0].shape, generator=generator, dtype=torch.float64)
    out, grads = gradients_of(fused_group, inputs, wanted, the_spec, weight)
    expected_out, expected = gradients_of(group_reference, inputs, wanted, the_spec, weight)
    torch.testing.assert_close(out, expected_out, rtol=1e-11, atol=1e-11)
    for name, one, other in zip(NAMES, grads, expected, strict=True):
        assert (one is None) == (other is None), name
        if one is not None:
            torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("frozen", range(4))
def test_fused_with_one_input_frozen(frozen):
    """A frozen input gets no gradient and the others get theirs: bank alone, bias alone, …"""
    inputs, the_spec = draw(2, 3, has_pos=True), spec()
    for wanted in ([i != frozen for i in range(4)], [i == frozen for i in range(4)]):
        _, grads = gradients_of(fused_group, inputs, wanted, the_spec, 1.0)
        _, expected = gradients_of(group_reference, inputs, wanted, the_spec, 1.0)
        for want, one, other in zip(wanted, grads, expected, strict=True):
            assert (one is not None) == want
            if want:
                torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("activation", ["beta_abs", "minmax"])
def test_fused_gradient_by_finite_differences(activation):
    """Not only the same as the reference: the derivative."""
    x, bank, bias, pos = draw(2, 2, has_pos=True, images=1, width=4)
    the_spec = spec(shift_part=1, activation=activation)
    leaves = tuple(t.clone().requires_grad_() for t in (x, bank, bias, pos))
    assert torch.autograd.gradcheck(lambda *t: fused_group(*t, the_spec), leaves)


@pytest.mark.parametrize("activation", ["beta_abs", "minmax"])
def test_fused_at_ties_and_zeros(activation):
    """Where the activation has a kink (zeros, equal halves) both forms choose the same gradient."""
    x, bank, bias, _ = draw(1, 2, has_pos=False)
    inputs = (torch.zeros_like(x), bank, torch.zeros_like(bias), None)
    weight = torch.randn(x.shape, generator=torch.Generator().manual_seed(0)).double()
    wanted = (True, True, True, False)
    _, grads = gradients_of(fused_group, inputs, wanted, spec(activation=activation), weight)
    _, expected = gradients_of(group_reference, inputs, wanted, spec(activation=activation), weight)
    for one, other in zip(grads[:3], expected[:3], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_fused_without_gradients():
    """Under no_grad the values are the same and nothing is kept for a backward pass."""
    inputs, the_spec = draw(3, 4, has_pos=True), spec()
    leaves = [t.clone().requires_grad_() for t in inputs]
    with torch.no_grad():
        out = fused_group(*leaves, the_spec)
    assert not out.requires_grad and out.grad_fn is None
    torch.testing.assert_close(out, group_reference(*inputs, the_spec), rtol=1e-12, atol=1e-12)
    with torch.inference_mode():
        assert torch.equal(fused_group(*inputs, the_spec), out)


@pytest.mark.parametrize("has_pos", [True, False])
def test_fused_leaves_its_inputs_alone(has_pos):
    """Neither forward nor backward writes into the input, the weights or the incoming gradient."""
    inputs = draw(2, 3, has_pos)
    kept = [None if t is None else t.clone() for t in inputs]
    leaves = [None if t is None else t.requires_grad_() for t in inputs]
    out = fused_group(*leaves, spec())
    shown = out.detach().clone()
    incoming = torch.ones_like(out)
    out.backward(incoming)
    for leaf, before in zip(leaves, kept, strict=True):
        assert leaf is None or torch.equal(leaf, before)
    assert torch.equal(out, shown) and torch.equal(incoming, torch.ones_like(out))


def test_fused_gradients_accumulate():
    """Two passes before a step give the sum of their gradients; one graph can be used twice."""
    inputs = draw(2, 3, has_pos=True)
    leaves = [t.clone().requires_grad_() for t in inputs]
    fused_group(*leaves, spec()).sum().backward()
    first = [leaf.grad.clone() for leaf in leaves]
    fused_group(*leaves, spec()).square().sum().backward()
    fresh = [t.clone().requires_grad_() for t in inputs]
    fused_group(*fresh, spec()).square().sum().backward()
    for leaf, one, other in zip(leaves, first, fresh, strict=True):
        torch.testing.assert_close(leaf.grad, one + other.grad, rtol=1e-12, atol=1e-12)

    again = [t.clone().requires_grad_() for t in inputs]
    loss = fused_group(*again, spec()).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    for leaf, one in zip(again, first, strict=True):
        torch.testing.assert_close(leaf.grad, 2 * one, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 0, 1, 2), (0, 3, 1, 2), (1, 0, 3, 2)])
def test_fused_takes_inputs_and_gradients_of_any_memory_layout(order):
    """Images that are not channels-last in memory, and gradients of permuted outputs."""
    x, bank, bias, pos = draw(2, 3, has_pos=True)
    inverse = [order.index(i) for i in range(4)]
    strided = x.permute(order).contiguous().permute(inverse)
    assert torch.equal(strided, x)
    weight = torch.arange(x.numel(), dtype=torch.float64)
    grads = []
    for function, value in ((fused_group, strided), (group_reference, x)):
        leaf, matrices = value.detach().requires_grad_(), bank.clone().requires_grad_()
        out = function(leaf, matrices, bias, pos, spec())
        (out.permute(order).reshape(-1) * weight).sum().backward()
        grads.append((leaf.grad, matrices.grad))
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-9)


def test_fused_refuses_double_backward():
    """Its backward is not differentiable, and says so instead of giving a wrong answer."""
    x, bank, bias, pos = draw(1, 2, has_pos=False)
    x.requires_grad_()
    (gradient,) = torch.autograd.grad(
        fused_group(x, bank, bias, pos, spec()).square().sum(), x, create_graph=True
    )
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


def test_fused_notices_weights_changed_before_backward():
    """Changing the bank between forward and backward is an error, not a wrong gradient."""
    x, bank, bias, pos = draw(1, 2, has_pos=False)
    bank.requires_grad_()
    out = fused_group(x, bank, bias, pos, spec())
    with torch.no_grad():
        bank.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_fused_works_under_activation_checkpointing():
    """torch's checkpointing recomputes the group and gets the same gradients."""
    from torch.utils.checkpoint import checkpoint

    inputs = draw(2, 3, has_pos=True)
    plain = [t.clone().requires_grad_() for t in inputs]
    fused_group(*plain, spec()).square().sum().backward()
    saved = [t.clone().requires_grad_() for t in inputs]
    checkpoint(fused_group, *saved, spec(), use_reentrant=False).square().sum().backward()
    for one, other in zip(plain, saved, strict=True):
        assert torch.equal(one.grad, other.grad)


def test_fused_in_float32_is_as_accurate_as_the_reference():
    """The fast form does not lose accuracy: its float32 errors are like the readable form's."""
    inputs, the_spec = draw(3, 4, has_pos=True), spec()
    wanted = (True,) * 4
    exact_out, exact = gradients_of(group_reference, inputs, wanted, the_spec, 1.0)
    single = [t.float() for t in inputs]
    out, grads = gradients_of(fused_group, single, wanted, the_spec, 1.0)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out.double(), exact_out, rtol=1e-5, atol=1e-5)
    for one, other in zip(grads, exact, strict=True):
        assert one.dtype == torch.float32
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-4)


# --- matrices one by one, and what is kept ----------------------------------------------------


def test_matrices_one_by_one_are_a_bank():
    """The same output and gradients, bit for bit, given as one bank or each as a parameter."""
    x, bank, bias, pos = draw(3, 3, has_pos=True)
    whole = bank.clone().requires_grad_()
    apart = [matrix.clone().requires_grad_() for matrix in bank.flatten(0, 1)]
    out = fused_group(x, whole, bias, pos, spec())
    again = fused_group(x, apart, bias, pos, spec())
    assert torch.equal(out, again)
    out.square().sum().backward()
    again.square().sum().backward()
    for gradient, matrix in zip(whole.grad.flatten(0, 1), apart, strict=True):
        assert torch.equal(gradient, matrix.grad)


def test_nothing_of_a_matrix_is_kept():
    """The forward pass leaves no tensor of a matrix's size but the weights."""
    x, bank, bias, pos = draw(3, 1, has_pos=True, images=2)
    bank.requires_grad_()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        fused_group(x, bank, bias, pos, spec())
    assert [tuple(t.shape) for t in saved if t.numel() >= WIDTH**2] == [(3, 2, WIDTH, WIDTH)]
