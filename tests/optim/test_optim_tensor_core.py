"""ManifoldAdam on tensor cores, emulated: bfloat16 operands, float32 sums."""

import math

import pytest
import torch
from banks import bank
from torch import Tensor

from lipnext_scale.manifold import kernels, skew, tensor_core
from lipnext_scale.optim import ManifoldAdam

BF16 = 2.0**-8  # rounding to bfloat16, relative

# In the mean square an entry of hi·hi + hi·lo + lo·hi misses 4.5e-6 of a product: 1.6e-3 squared
# each for lo·lo and for what lo itself leaves of either operand. Over a row of X·C that is
# 4.5e-6·‖C‖_F/d, and a symmetric random matrix has 2√2·√d times the norm: so much of ‖XᵀX - I‖₂
# for a step, times ‖C‖_F/√d.
X3 = 1.3e-5


def deviation(stack: Tensor) -> float:
    """The largest ‖XᵀX - I‖₂."""
    x = stack.detach().double()
    gram = x.mT @ x - torch.eye(x.shape[-1], dtype=torch.float64)
    return float(torch.linalg.matrix_norm(gram, ord=2).max())


def rank_two(d: int, generator: torch.Generator) -> Tensor:
    """A skew matrix of norm 1 that turns one plane."""
    plane, _ = torch.linalg.qr(torch.randn(d, 2, generator=generator))
    return torch.outer(plane[:, 0], plane[:, 1]) - torch.outer(plane[:, 1], plane[:, 0])


def norms(a: Tensor) -> Tensor:
    return a.float().square().sum(2)


def matched(d: int, width: int = 4096) -> float:
    """The learning rate that gives random steps at d the norms they have at 1e-3 and the width."""
    return 1e-3 * math.sqrt(width / d)


@pytest.fixture
def exponents(monkeypatch) -> list[tuple[Tensor, Tensor]]:
    """(A, t) of every exponential of the test."""
    seen, original = [], tensor_core.exp_operand

    def recorded(exponent, *arguments):
        operand, shrink = original(exponent, *arguments)
        seen.append((exponent.clone(), shrink))
        return operand, shrink

    monkeypatch.setattr(tensor_core, "exp_operand", recorded)
    return seen


def random_steps(x: torch.nn.Parameter, steps: int, **options) -> ManifoldAdam:
    optimizer = ManifoldAdam([x], products="tensor_core", **options)
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        x.grad = torch.randn(x.shape, generator=generator)
        optimizer.step()
    return optimizer


# --- one step ---------------------------------------------------------------------------------


def test_a_step_is_the_float32_step_but_for_rounding():
    """With the paper's v0 the first Δ is smooth in XᵀG, so its rounding can be followed."""
    d, lr = 48, 0.02
    one, two = bank(3, d, d, dtype=torch.float32), bank(3, d, d, dtype=torch.float32)
    start, gradient = one.detach().double(), torch.randn(3, d, d)
    for x, products in ((one, "fp32"), (two, "tensor_core")):
        x.grad = gradient.clone()
        ManifoldAdam([x], lr=lr, second_moment_init="paper", products=products).step()

    a = skew(start.mT @ gradient.double())
    delta = lr * 0.1 * a / (0.999 / d + 0.001 * a * a).sqrt()
    # Both operands of XᵀG are rounded, and d/da of Δ is at most lr·0.1/√(0.999/d).
    # So is XᵀG itself.
    rounded = 2.01 * BF16 * (start.abs().mT @ gradient.double().abs())
    rounded += 1.01 * BF16 * (start.mT @ gradient.double()).abs()
    of_direction = lr * 0.1 / math.sqrt(0.999 / d) * (rounded + rounded.mT) / 2
    of_direction += 1.01 * BF16 * delta.abs()
    frobenius = torch.linalg.matrix_norm
    # exp is 1-Lipschitz on skew matrices. The cubic term is 0.0203 off, and rounded three times.
    cubic = (0.0203 + 3 * BF16 * 0.15) * frobenius(delta, ord=2) ** 2 * frobenius(delta)
    of_product = 2**-15 * frobenius(start.abs() @ delta.abs()) * 1.5
    bound = frobenius(of_direction) + cubic + of_product
    apart = frobenius((one - two).detach().double())
    assert (apart < bound).all()
    assert (apart > 0).all()
    assert (frobenius(delta) > 10 * bound).all()  # the bound says something


def test_exponents_and_moments_are_exactly_skew(exponents):
    x = bank(2, 33, 33, dtype=torch.float32)
    state = random_steps(x, 13, lr=1e-2).state[x]
    assert len(exponents) == 13
    for matrix in [a for a, _ in exponents] + [state["exp_avg"], state["buffer"]]:
        assert torch.equal(matrix, -matrix.mT)
        assert matrix.any()
    assert torch.equal(state["exp_avg_sq"], state["exp_avg_sq"].mT)


# --- how large an exponent may be ---------------------------------------------------------------


@pytest.mark.parametrize("lr, d", [(1e-2, 64), (1e-2, 256), (3e-3, 128), (1e-3, 512), (8e-3, 512)])
@pytest.mark.parametrize("steps", [1, 3])
def test_usual_steps_are_not_shrunk(lr, d, steps):
    """Neither noise nor, of the same ‖A‖_F, a turn of one plane; it keeps to the tolerance."""
    generator = torch.Generator().manual_seed(0)
    entry = tensor_core.usual_entry(0.9, 1000) * lr * steps
    frobenius = entry * d
    tolerance = tensor_core.TOLERANCE if steps > 1 else tensor_core.FAST_TOLERANCE
    squarings = tensor_core.squarings_for(entry, d, tolerance)
    noise = skew(torch.randn(d, d, generator=generator))
    for a in (noise, rank_two(d, generator)):
        a = (a * frobenius / a.norm()).bfloat16()[None]
        operand, shrink = tensor_core.exp_operand(a, norms(a), squarings, tolerance)
        assert shrink.item() == 1
        change = operand[:, :d].double() + operand[:, d : 2 * d]
        # Beside the tolerance: the rounding of the cubic term, as in `X3`, in all 2ˢ parts of A.
        part = float(torch.linalg.matrix_norm(a.float(), ord=2)) / 2**squarings
        rounding = 2**squarings * 0.01 * 0.15 * part**2 * frobenius / 2**squarings / math.sqrt(d)
        rounding += (squarings + 1) * X3 * frobenius / math.sqrt(d)
        assert deviation(change + torch.eye(d)) < tolerance + 3 * rounding


@pytest.mark.parametrize("size", [2.0, 30.0, 1e4])
@pytest.mark.parametrize("squarings", [0, 2])
def test_an_exponent_that_is_too_large_is_shrunk(size, squarings):
    d, tolerance = 96, tensor_core.TOLERANCE
    limit = tensor_core.reach(squarings, tensor_core.LARGEST * tolerance)
    a = rank_two(d, torch.Generator().manual_seed(0))
    a = (a * size * limit).bfloat16()[None]
    operand, shrink = tensor_core.exp_operand(a, norms(a), squarings)
    assert shrink.item() == pytest.approx(1 / size, rel=0.01)
    change = operand[:, :d].double() + operand[:, d : 2 * d]
    assert deviation(change + torch.eye(d)) < 1e-3


def test_the_loss_of_an_exponential_is_what_reach_says():
    """|p(iλ)|² - 1 = LOSS·λ⁸ for the polynomial that the operators make."""
    for squarings, tolerance in ((0, 1e-6), (0, 1e-3), (2, 1e-5)):
        z = 1j * tensor_core.reach(squarings, tolerance) / 2**squarings
        c = kernels.CUBIC
        p = (1 + z + z**2 / 2 + c * z**3 + c**2 * z**4) ** (2**squarings)
        assert abs(p) ** 2 - 1 == pytest.approx(tolerance, rel=0.01)


def test_coherent_steps_that_are_too_large_leave_the_matrix_orthogonal():
    """The same plane, far too fast: five steps that cost 4·3e-4 each, and some rounding, until
    Lookahead forgets them; its own cost 4e-6, and some rounding."""
    x = bank(1, 64, 64, dtype=torch.float32)
    plane = rank_two(64, torch.Generator().manual_seed(0))
    optimizer = ManifoldAdam([x], lr=1.0, products="tensor_core")
    worst = []
    for _ in range(60):
        x.grad = x.detach() @ plane
        optimizer.step()
        worst.append(deviation(x))
    assert max(worst) < 1e-2
    assert max(worst[5::6]) < 1e-3


# --- drift --------------------------------------------------------------------------------------


def test_drift_is_the_rounding_of_the_steps_that_are_kept(exponents):
    """Lookahead's and those after the last of them. Each is rounded anew: a random walk."""
    d = 64
    x = bank(2, d, d, dtype=torch.float32)
    random_steps(x, 300, lr=matched(d))
    assert all(bool((t == 1).all()) for _, t in exponents)
    kept = torch.stack([a for a, _ in exponents[5::6]]).float()
    walk = X3 * float(kept.square().sum((0, 2, 3)).max() / d) ** 0.5
    assert deviation(x) < 3 * walk
    assert walk < 1e-5


def test_product_form_writes_w_to_two_to_the_minus_15():
    d = 64
    x = bank(2, 2, d, d, dtype=torch.float32)
    optimizer = random_steps(x, 60, lr=matched(d), parametrisation="product")
    m, (r, w) = optimizer.state[x]["factor"].double(), x.detach().double().unbind(1)
    error = (w - m @ r.mT).abs()
    assert (error < 1.1 * 2**-15 * (m.abs() @ r.mT.abs())).all()
    drift = deviation(r) + deviation(m)
    assert drift < 2e-5
    assert deviation(w) < drift + 3 * X3  # ‖M‖_F/√d = 1


def test_operands_kept_from_the_last_step_are_those_of_the_weights():
    """Steps that split R and M anew are the same, also after something else changed them."""
    banks = [bank(2, 2, 32, 32, dtype=torch.float32) for _ in range(2)]
    kept, anew = (
        ManifoldAdam([x], products="tensor_core", parametrisation="product") for x in banks
    )
    splits, generator = [], torch.Generator().manual_seed(1)
    for step in range(8):
        gradient = torch.randn(banks[0].shape, generator=generator)
        for x in banks:
            x.grad = gradient.clone()
        splits.append(bool(kept._operands))
        anew._operands.clear()
        kept.step(), anew.step()
        assert torch.equal(*banks)
        for x, optimizer in zip(banks, (kept, anew), strict=True):
            if step == 3:
                x.detach()[:, 0] = x.detach()[:, 0].flip(-1)
            if step == 5:
                optimizer.state[x]["factor"].neg_()
    assert splits == [False] + 7 * [True]


def test_state_is_complete_where_it_is_read():
    x = bank(2, 16, 16, dtype=torch.float32)
    optimizer = random_steps(x, 2)
    for read in (optimizer.initialise_state, optimizer.state_dict):
        state = {kind: tensor.clone() for kind, tensor in optimizer.state[x].items()}
        for kind in ("exp_avg", "exp_avg_sq", "buffer"):
            optimizer.state[x][kind].triu_()
        read()
        assert all(torch.equal(tensor, state[kind]) for kind, tensor in optimizer.state[x].items())


@pytest.mark.slow
def test_drift_of_1500_steps_is_far_below_that_of_bfloat16(monkeypatch):
    d = 128
    x = bank(1, d, d, dtype=torch.float32)
    random_steps(x, 1500, lr=matched(d))
    assert deviation(x) < 2e-5

    def plain_(x: Tensor, left: Tensor, right: Tensor, times: float = 1) -> Tensor:
        return x.baddbmm_(left[..., :d].float(), right[:, :d].float(), beta=times)

    monkeypatch.setattr(tensor_core, "add_product_", plain_)
    y = bank(1, d, d, dtype=torch.float32)
    random_steps(y, 1500, lr=matched(d))
    assert deviation(y) > 1e-4
