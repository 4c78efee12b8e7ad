"""ManifoldAdam against its reference; Lookahead, slow weights, retraction."""

import copy

import pytest
import torch
from banks import bank, gradients, run

from lipnext_scale.manifold import orthogonality_error, random_orthogonal, skew
from lipnext_scale.optim import ManifoldAdam, manifold_adam_reference
from lipnext_scale.optim import manifold_adam as module
from lipnext_scale.optim.manifold_adam import adam_direction

# --- the mathematics --------------------------------------------------------------------------


@pytest.mark.parametrize("second_moment_init", ["zero", "paper"])
@pytest.mark.parametrize("lookahead", [1, 2, 5, 6])
@pytest.mark.parametrize("shape", [(8, 8), (3, 8, 8)])
def test_follows_the_reference(shape, lookahead, second_moment_init):
    """Every matrix of a bank follows Algorithm 2 with exact exponentials, to 1e-10 in float64."""
    x = bank(*shape)
    start, grads = x.detach().clone().view(-1, 8, 8), gradients(x, 13)
    options = {"lr": 0.02, "lookahead": lookahead, "second_moment_init": second_moment_init}
    optimizer = ManifoldAdam([x], exp_rule="bounded", exp_tolerance=1e-15, **options)
    run(optimizer, x, grads)
    for index, matrix in enumerate(x.detach().view(-1, 8, 8)):
        mine = grads.view(13, -1, 8, 8)[:, index]
        fast, slow = manifold_adam_reference(start[index], mine, **options)
        torch.testing.assert_close(matrix, fast, rtol=0, atol=1e-10)
        kept = optimizer.state[x]["slow"].view(-1, 8, 8)[index]
        torch.testing.assert_close(kept, slow, rtol=0, atol=1e-10)
        assert float((fast - start[index]).abs().max()) > 1e-3  # there was something to follow


@pytest.mark.parametrize("betas, eps", [((0.0, 0.0), 1e-8), ((0.5, 0.9), 1e-3), ((0.9, 0.99), 1.0)])
def test_follows_the_reference_for_other_hyperparameters(betas, eps):
    """β1, β2 and ε mean in the optimizer what they mean in the reference."""
    x = bank(6, 6)
    start, grads = x.detach().clone(), gradients(x, 7)
    optimizer = ManifoldAdam(
        [x], lr=0.03, betas=betas, eps=eps, exp_rule="bounded", exp_tolerance=1e-15
    )
    run(optimizer, x, grads)
    fast, _ = manifold_adam_reference(start, grads, lr=0.03, betas=betas, eps=eps)
    torch.testing.assert_close(x.detach(), fast, rtol=0, atol=1e-10)


@pytest.mark.parametrize("exp_rule", ["paper", "bounded"])
def test_follows_the_reference_in_float32(exp_rule):
    """In float32 and at a training learning rate the paths differ by less than 2e-5 in 20 steps."""
    x = bank(4, 24, 24, dtype=torch.float32)
    start, grads = x.detach().double(), gradients(x, 20)
    run(ManifoldAdam([x], lr=1e-3, exp_rule=exp_rule), x, grads)
    for index in range(4):
        fast, _ = manifold_adam_reference(start[index], grads[:, index].double(), lr=1e-3)
        assert float((x.detach()[index] - fast).abs().max()) < 2e-5


def test_large_steps_take_the_exact_exponential():
    """Where ‖Δ‖_F ≥ 1 the paper's rule is exact, so it follows the reference to round-off."""
    x = bank(2, 8, 8)
    start, grads = x.detach().clone(), gradients(x, 6)
    run(ManifoldAdam([x], lr=1.0, exp_rule="paper", lookahead=3), x, grads)
    for index in range(2):
        fast, _ = manifold_adam_reference(start[index], grads[:, index], lr=1.0, lookahead=3)
        torch.testing.assert_close(x.detach()[index], fast, rtol=0, atol=1e-10)


@pytest.mark.parametrize("matrices_at_once", [1, 2, 100])
def test_every_matrix_gets_the_exponential_of_its_own_size(matrices_at_once, monkeypatch):
    """Banks whose matrices need order 2, order 4 or many squarings each follow the reference."""
    monkeypatch.setitem(module.CHUNK_BYTES, "cpu", matrices_at_once * 8 * 8 * 8)
    banks = [bank(3, 8, 8), bank(5, 8, 8, seed=1)]
    # With the paper's v0 the first steps are proportional to the gradient.
    scales = [torch.tensor([1e-5, 1.0, 30.0]), torch.tensor([30.0, 1e-5, 3.0, 1e-5, 1.0])]
    grads = [gradients(x, 4) * s.view(-1, 1, 1) for x, s in zip(banks, scales, strict=True)]
    starts = [x.detach().clone() for x in banks]
    options = {"lr": 1.0, "lookahead": 3, "second_moment_init": "paper"}
    optimizer = ManifoldAdam(banks, exp_rule="bounded", exp_tolerance=1e-15, **options)
    for step in range(4):
        for x, mine in zip(banks, grads, strict=True):
            x.grad = mine[step].clone()
        optimizer.step()
    for x, start, mine in zip(banks, starts, grads, strict=True):
        for index, matrix in enumerate(x.detach()):
            fast, _ = manifold_adam_reference(start[index], mine[:, index], **options)
            torch.testing.assert_close(matrix, fast, rtol=0, atol=1e-10)


def test_chunks_do_not_change_the_result(monkeypatch):
    """A bank worked on one, two or all matrices at a time ends at the same place."""
    ends = []
    for matrices_at_once in (1, 2, 100):
        monkeypatch.setitem(module.CHUNK_BYTES, "cpu", matrices_at_once * 8 * 8 * 8)
        x = bank(5, 8, 8)
        run(ManifoldAdam([x], lr=0.05, lookahead=2, retract_every=3), x, gradients(x, 5))
        ends.append(x.detach())
    torch.testing.assert_close(ends[0], ends[2], rtol=0, atol=1e-14)
    torch.testing.assert_close(ends[1], ends[2], rtol=0, atol=1e-14)


def test_direction_is_exactly_skew():
    """Δ = -η·m̂/(√v̂ + ε) is skew to the last bit over many steps, in float32, both starts."""
    for paper in (True, False):
        m, v = torch.zeros(2, 16, 16), torch.full((2, 16, 16), 1 / 16 if paper else 0.0)
        for step in range(1, 30):
            generator = torch.Generator().manual_seed(step)
            delta = adam_direction(
                skew(torch.randn(2, 16, 16, generator=generator)),
                m,
                v,
                step=step,
                lr=0.1,
                betas=(0.9, 0.999),
                eps=1e-8,
                bias_correction=not paper,
            )
            assert torch.equal(delta.mT, -delta) and delta.any()
            assert torch.equal(m.mT, -m) and torch.equal(v.mT, v)


def test_direction_is_that_of_adam():
    """With bias correction Δ is the step that torch's Adam takes for the same gradients."""
    weight = torch.nn.Parameter(torch.zeros(5, 5, dtype=torch.float64))
    adam = torch.optim.Adam([weight], lr=0.1, betas=(0.8, 0.95), eps=1e-3)
    m, v = torch.zeros_like(weight.detach()), torch.zeros_like(weight.detach())
    for step, gradient in enumerate(gradients(weight, 10), start=1):
        before, gradient = weight.detach().clone(), skew(gradient)
        weight.grad = gradient
        adam.step()
        delta = adam_direction(
            gradient, m, v, step=step, lr=0.1, betas=(0.8, 0.95), eps=1e-3, bias_correction=True
        )
        torch.testing.assert_close(delta, weight.detach() - before, rtol=1e-10, atol=1e-13)


def test_first_step_is_lr_per_entry_or_tiny():
    """From v0 = 0 the first step has entries ±lr; from the paper's v0 = 1/d it is far smaller."""
    sizes = {}
    for init in ("zero", "paper"):
        x = bank(16, 16)
        start = x.detach().clone()
        run(ManifoldAdam([x], lr=1e-3, second_moment_init=init), x, 1e-3 * gradients(x, 1))
        sizes[init] = float(torch.linalg.matrix_norm(start.mT @ x.detach() - torch.eye(16)))
    assert sizes["zero"] == pytest.approx(1e-3 * (16 * 15) ** 0.5, rel=1e-3)
    assert 0 < sizes["paper"] < 0.01 * sizes["zero"]


@pytest.mark.parametrize("lookahead", [0, 6])
def test_solves_least_squares_on_the_group(lookahead):
    """min ‖XA - B‖ with B = X*·A is solved when the start has the determinant of X*."""
    generator = torch.Generator().manual_seed(0)
    solution = random_orthogonal(12, generator, torch.float64)
    x = bank(12, 12, seed=1)
    with torch.no_grad():
        if torch.linalg.det(x) * torch.linalg.det(solution) < 0:
            x[:, 0] *= -1
    a = torch.randn(12, 40, generator=generator, dtype=torch.float64)
    b = solution @ a
    optimizer = ManifoldAdam([x], lr=0.1, lookahead=lookahead)
    first = float((x.detach() @ a - b).norm())
    for step in range(800):
        optimizer.param_groups[0]["lr"] = 0.1 * 0.985**step
        optimizer.zero_grad()
        (x @ a - b).square().sum().backward()
        optimizer.step()
    optimizer.retract()
    assert float((x.detach() @ a - b).norm()) < 1e-4 * first
    assert float((x.detach() - solution).abs().max()) < 1e-4


# --- pairs (R, W = M·Rᵀ) of which M is learned ------------------------------------------------


def product_pairs(dtype=torch.float64) -> tuple[torch.nn.Parameter, torch.nn.Parameter]:
    """The same pairs twice, [3, 2, 12, 12]: (R, W) and (R, M)."""
    learned = bank(3, 2, 12, 12, dtype=dtype)
    shown = torch.nn.Parameter(learned.detach().clone())
    shown.data[:, 1] = weights_of(learned).detach()
    return shown, learned


def weights_of(learned: torch.Tensor) -> torch.Tensor:
    """W = M·Rᵀ of pairs (R, M)."""
    rotation, factor = learned.unbind(1)
    return factor @ rotation.mT


def smooth(rotation: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Any function of R and W; both gradients are those of both."""
    a, b, c = gradients(rotation, 3, seed=5)
    return ((weight @ torch.tanh(rotation @ a) + b).sin() * c).sum()


@pytest.mark.parametrize("second_moment_init", ["zero", "paper"])
def test_the_product_form_follows_autograd_through_the_product(second_moment_init):
    """(R, W) with M in the optimizer against (R, M) with W = M·Rᵀ in the function: to 1e-10."""
    shown, learned = product_pairs()
    start = shown.detach().clone()
    options = {"lr": 0.02, "lookahead": 6, "second_moment_init": second_moment_init}
    options |= {"exp_rule": "bounded", "exp_tolerance": 1e-15}
    product = ManifoldAdam([shown], parametrisation="product", **options)
    merged = ManifoldAdam([learned], **options)

    def require_same() -> None:
        expected = torch.stack([learned[:, 0], weights_of(learned)], 1).detach()
        torch.testing.assert_close(shown.detach(), expected, rtol=0, atol=1e-10)
        factor = product.state[shown]["factor"]
        torch.testing.assert_close(factor, learned.detach()[:, 1], rtol=0, atol=1e-10)

    def train(steps: int) -> None:
        for _ in range(steps):
            product.zero_grad()
            merged.zero_grad()
            smooth(*shown.unbind(1)).backward()
            smooth(learned[:, 0], weights_of(learned)).backward()
            product.step()
            merged.step()
            require_same()

    product.initialise_state()
    torch.testing.assert_close(shown.detach(), start, rtol=0, atol=1e-14)  # the same function
    train(20)
    moved = (shown.detach() - start).flatten(2).norm(dim=2)
    assert float(moved.min()) > 1e-2
    fast = shown.detach().clone()
    with product.slow_weights(), merged.slow_weights():
        assert float((shown.detach() - fast).flatten(2).norm(dim=2).min()) > 1e-3
        require_same()
    require_same()
    noise = 1e-3 * gradients(learned, 1)[0]
    with torch.no_grad():  # off the manifold, as by rounding
        learned += noise
        shown[:, 0] += noise[:, 0]
        product.state[shown]["factor"] += noise[:, 1]
    product.retract()
    merged.retract()
    require_same()
    assert float(orthogonality_error(shown.detach()).max()) < 1e-12
    with product.slow_weights(), merged.slow_weights():
        require_same()
    train(7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_fast_weights_of_the_product_form_return_bit_for_bit(dtype):
    """R, W and M, though W is made anew of them; inside, W is that of the slow R and M."""
    x, _ = product_pairs(dtype)
    optimizer = ManifoldAdam([x], lr=0.02, lookahead=5, parametrisation="product")
    run(optimizer, x, gradients(x, 7))
    fast, state = x.detach().clone(), optimizer.state[x]
    kept = {name: value.clone() for name, value in state.items()}
    with optimizer.slow_weights():
        assert torch.equal(x[:, 0], kept["slow"][:, 0])
        torch.testing.assert_close(x.detach()[:, 1], weights_of(kept["slow"]))
        assert not torch.equal(x[:, 1], fast[:, 1])
    assert torch.equal(x, fast)
    assert all(torch.equal(state[name], value) for name, value in kept.items())


@pytest.mark.parametrize("parametrisation", ["product", "merged"])
def test_a_scale_is_that_of_the_gradients(parametrisation):
    """For clipping: with an ε that makes it matter, and the gradients given as they were."""
    ends = []
    for given, scale in ((1.0, 0.01), (0.01, 1.0), (1.0, 1.0)):
        x, _ = product_pairs()
        optimizer = ManifoldAdam([x], lr=0.02, eps=0.1, parametrisation=parametrisation)
        for gradient in gradients(x, 4):
            x.grad = given * gradient
            optimizer.step(scale=torch.tensor(scale, dtype=torch.float64))
        ends.append(x.detach())
    torch.testing.assert_close(ends[0], ends[1], rtol=0, atol=1e-12)
    assert float((ends[0] - ends[2]).abs().max()) > 1e-3


def test_only_pairs_have_a_product():
    with pytest.raises(ValueError, match="parametrisation = 'cayley': must be merged or product"):
        ManifoldAdam([bank(3, 2, 6, 6)], parametrisation="cayley")
    for shape in ((6, 6), (3, 6, 6), (2, 3, 6, 6)):
        with pytest.raises(ValueError, match="takes pairs of square matrices"):
            ManifoldAdam([bank(*shape)], parametrisation="product")


# --- Lookahead, slow weights, retraction ------------------------------------------------------


@pytest.mark.parametrize("period", [1, 3, 5])
def test_lookahead_synchronises_after_each_period(period):
    """X equals Xslow and the buffer is zero after every `period` steps, and only then."""
    x = bank(2, 6, 6)
    optimizer = ManifoldAdam([x], lr=0.02, lookahead=period)
    for step, gradient in enumerate(gradients(x, 11), start=1):
        run(optimizer, x, gradient[None])
        state = optimizer.state[x]
        if step % period == 0:
            assert torch.equal(x.detach(), state["slow"]) and not state["buffer"].any()
        else:
            assert not torch.equal(x.detach(), state["slow"]) and state["buffer"].any()
            assert torch.equal(state["buffer"].mT, -state["buffer"])


def test_lookahead_steps_half_way():
    """For a constant direction the slow weight goes half the way that the fast ones went."""
    x = bank(6, 6)
    start = x.detach().clone()
    # A gradient X·Ω with Ω = ±1: A = Ω for every X on the path, so Δ = -lr·Ω in every step.
    direction = torch.sign(skew(gradients(x, 1)[0]))
    optimizer = ManifoldAdam(
        [x], lr=0.01, eps=1e-12, lookahead=4, exp_rule="bounded", exp_tolerance=1e-15
    )
    for _ in range(4):
        x.grad = x.detach() @ direction
        optimizer.step()
    expected = start @ torch.linalg.matrix_exp(-0.01 * 4 / 2 * direction)
    torch.testing.assert_close(x.detach(), expected, rtol=0, atol=1e-9)


def test_without_lookahead_there_are_no_slow_weights():
    """lookahead=0 is plain Adam on the group: no buffer, no slow copy, slow_weights shows X."""
    x, same = bank(2, 6, 6), bank(2, 6, 6)
    optimizer = ManifoldAdam([x], lr=0.02, lookahead=0)
    never = ManifoldAdam([same], lr=0.02, lookahead=1000)
    grads = gradients(x, 9)
    run(optimizer, x, grads)
    run(never, same, grads)
    assert torch.equal(x, same)
    assert set(optimizer.state[x]) == {"step", "exp_avg", "exp_avg_sq"}
    kept = x.detach().clone()
    with optimizer.slow_weights():
        assert torch.equal(x, kept)
    assert torch.equal(x, kept)


def test_slow_weights_are_shown_and_the_fast_ones_return():
    """Inside, the parameter is Xslow; outside again everything is as it was, to the last bit."""
    x, idle = bank(2, 6, 6), bank(6, 6, seed=3)
    optimizer = ManifoldAdam([x, idle], lr=0.02, lookahead=5)
    run(optimizer, x, gradients(x, 7))
    fast, slow = x.detach().clone(), optimizer.state[x]["slow"].clone()
    assert not torch.equal(fast, slow)
    with optimizer.slow_weights():
        assert torch.equal(x, slow)
    assert torch.equal(x, fast) and torch.equal(optimizer.state[x]["slow"], slow)
    with pytest.raises(RuntimeError, match="evaluation failed"):
        with optimizer.slow_weights():
            raise RuntimeError("evaluation failed")
    assert torch.equal(x, fast) and torch.equal(optimizer.state[x]["slow"], slow)
    run(optimizer, x, gradients(x, 1))  # and training goes on


def test_no_step_while_the_slow_weights_are_shown():
    """Whatever would train, save or retract the wrong weights asserts; so does nesting."""
    x = bank(6, 6)
    optimizer = ManifoldAdam([x])
    run(optimizer, x, gradients(x, 1))
    with optimizer.slow_weights():
        for forbidden in (optimizer.step, optimizer.retract, optimizer.state_dict):
            with pytest.raises(AssertionError, match="inside slow_weights"):
                forbidden()
        with pytest.raises(AssertionError, match="inside slow_weights"):
            with optimizer.slow_weights():
                pass


def test_a_copied_optimizer_goes_on_like_the_original():
    """copy.deepcopy keeps all that a step needs."""
    x = bank(2, 6, 6)
    optimizer = ManifoldAdam([x], lr=0.01)
    first, second = gradients(x, 2)
    run(optimizer, x, [first])
    copied = copy.deepcopy(optimizer)
    y = copied.param_groups[0]["params"][0]
    run(optimizer, x, [second])
    run(copied, y, [second])
    assert torch.equal(x, y)


@pytest.mark.parametrize("rule", ["paper", "bounded"])
def test_a_gradient_that_is_not_finite_never_reaches_the_weights(rule):
    """Nor moments and buffers: the run goes on with the next gradient as if it had not been."""
    weights = []
    for bad in (None, float("nan"), float("inf"), 1e200):  # the square of the last overflows
        good, x = bank(2, 6, 6, seed=1), bank(2, 6, 6)
        optimizer = ManifoldAdam([("good", good), ("x", x)], exp_rule=rule, lr=0.02)
        for step in range(3):
            good.grad, x.grad = gradients(good, 3)[step], gradients(x, 3)[step]
            if bad is not None:
                right, x.grad = x.grad, x.grad.clone()
                x.grad[1, 2, 3] = bad
                with pytest.raises(FloatingPointError, match="gradient of x is not finite"):
                    optimizer.step()
                x.grad = right
            optimizer.step()
        weights.append((good.detach(), x.detach()))
    for ours in weights[1:]:
        assert all(torch.equal(a, b) for a, b in zip(ours, weights[0], strict=True))


def test_retract_joins_slow_and_fast():
    """retract() puts X onto O(d), sets Xslow to it and empties the buffer."""
    x = bank(2, 6, 6, dtype=torch.float32)
    optimizer = ManifoldAdam([x], lr=0.05, lookahead=6)
    run(optimizer, x, gradients(x, 4))
    with torch.no_grad():
        x.add_(1e-3 * torch.randn(2, 6, 6, generator=torch.Generator().manual_seed(0)))
    before = x.detach().clone()
    optimizer.retract()
    state = optimizer.state[x]
    assert torch.equal(x, state["slow"]) and not state["buffer"].any() and state["exp_avg"].any()
    assert float(orthogonality_error(x.detach()).max()) < 1e-6
    assert float((x.detach() - before).abs().max()) < 1e-2


def test_retract_every_counts_steps():
    """With retract_every=4 a perturbed matrix comes back onto O(d) at step 4, not before."""
    x = bank(6, 6, dtype=torch.float32)
    optimizer = ManifoldAdam([x], lr=1e-3, lookahead=0, retract_every=4)
    with torch.no_grad():
        x.mul_(1.001)
    errors = []
    for gradient in gradients(x, 5):
        run(optimizer, x, gradient[None])
        errors.append(float(orthogonality_error(x.detach())))
    assert min(errors[:3]) > 1e-3 and max(errors[3:]) < 1e-6


def test_retract_before_the_first_step():
    """There is no state yet, and none is needed."""
    x = bank(6, 6)
    optimizer = ManifoldAdam([x])
    optimizer.retract()
    assert not optimizer.state[x]
