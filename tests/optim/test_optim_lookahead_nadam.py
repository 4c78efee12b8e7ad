"""LookaheadNAdam: torch's NAdam with Lookahead around it."""

import copy

import pytest
import torch

from lipnext_scale.optim import LookaheadNAdam


def parameters(seed: int = 0) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(5,), (3, 4, 4, 1)]
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


def set_gradients(params: list[torch.nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(1000 + step)
    for parameter in params:
        parameter.grad = torch.randn(parameter.shape, generator=generator)


def run(optimizer: torch.optim.Optimizer, params: list[torch.nn.Parameter], steps: range) -> None:
    for step in steps:
        set_gradients(params, step)
        optimizer.step()


@pytest.mark.parametrize("period", [1, 3, 6])
def test_equals_nadam_with_lookahead_by_hand(period):
    """Every `period` steps of torch's NAdam the weights go back half way to the last such point."""
    mine, theirs = parameters(), parameters()
    optimizer = LookaheadNAdam(mine, lr=0.01, betas=(0.8, 0.99), eps=1e-6, lookahead=period)
    nadam = torch.optim.NAdam(theirs, lr=0.01, betas=(0.8, 0.99), eps=1e-6)
    slow = [parameter.detach().clone() for parameter in theirs]
    for step in range(13):
        set_gradients(mine, step)
        set_gradients(theirs, step)
        optimizer.step()
        nadam.step()
        if (step + 1) % period == 0:
            for index, parameter in enumerate(theirs):
                slow[index] = (slow[index] + parameter.detach()) / 2
                parameter.data.copy_(slow[index])
        for one, other, kept in zip(mine, theirs, slow, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)
            torch.testing.assert_close(optimizer.state[one]["slow"], kept, rtol=1e-6, atol=1e-7)


def test_without_lookahead_it_is_nadam():
    """lookahead=0 is torch's NAdam, bit by bit, and has no slow weights."""
    mine, theirs = parameters(), parameters()
    optimizer = LookaheadNAdam(mine, lr=0.01, lookahead=0)
    run(optimizer, mine, range(8))
    run(torch.optim.NAdam(theirs, lr=0.01), theirs, range(8))
    for one, other in zip(mine, theirs, strict=True):
        assert torch.equal(one, other) and "slow" not in optimizer.state[one]
    with optimizer.slow_weights():
        assert torch.equal(mine[0], theirs[0])


def test_slow_weights_are_shown_and_the_fast_ones_return():
    """Inside, the parameters are the slow weights; after it, and after an error, the fast ones."""
    params = parameters()
    optimizer = LookaheadNAdam(params, lr=0.01, lookahead=5)
    run(optimizer, params, range(7))
    fast = [parameter.detach().clone() for parameter in params]
    slow = [optimizer.state[parameter]["slow"].clone() for parameter in params]
    for error in (None, KeyError):
        try:
            with optimizer.slow_weights():
                for parameter, expected, other in zip(params, slow, fast, strict=True):
                    assert torch.equal(parameter, expected) and not torch.equal(parameter, other)
                if error:
                    raise error
        except KeyError:
            pass
        for parameter, expected, other in zip(params, fast, slow, strict=True):
            assert torch.equal(parameter, expected)
            assert torch.equal(optimizer.state[parameter]["slow"], other)


def test_no_step_while_the_slow_weights_are_shown():
    """As in ManifoldAdam."""
    params = parameters()
    optimizer = LookaheadNAdam(params)
    run(optimizer, params, range(1))
    with optimizer.slow_weights():
        with pytest.raises(AssertionError, match="inside slow_weights"):
            optimizer.step()


def test_synchronise_moves_the_slow_weights():
    """slow ← fast; the fast weights stay, and the next period starts from there."""
    params = parameters()
    optimizer = LookaheadNAdam(params, lr=0.01, lookahead=5)
    run(optimizer, params, range(7))
    fast = [parameter.detach().clone() for parameter in params]
    optimizer.synchronise()
    for parameter, expected in zip(params, fast, strict=True):
        assert torch.equal(parameter, expected)
        assert torch.equal(optimizer.state[parameter]["slow"], expected)


def test_state_dict_round_trip_continues_bit_equal():
    """A run resumed in the middle of a period is the same run."""
    params = parameters()
    optimizer = LookaheadNAdam(params, lr=0.01, lookahead=5)
    run(optimizer, params, range(8))
    saved = copy.deepcopy(optimizer.state_dict())
    others = [torch.nn.Parameter(parameter.detach().clone()) for parameter in params]
    run(optimizer, params, range(8, 16))
    resumed = LookaheadNAdam(others, lr=0.01, lookahead=5)
    resumed.load_state_dict(saved)
    run(resumed, others, range(8, 16))
    for one, other in zip(params, others, strict=True):
        assert torch.equal(one, other)


def test_parameters_may_come_late():
    """A parameter that has no gradient at first starts its own count when it gets one."""
    params = parameters()
    optimizer = LookaheadNAdam(params, lr=0.01, lookahead=3)
    kept = params[1].detach().clone()
    run(optimizer, params[:1], range(2))
    assert torch.equal(params[1], kept) and not optimizer.state.get(params[1])
    run(optimizer, params, range(2, 4))
    assert torch.equal(optimizer.state[params[1]]["slow"], kept)
    assert not torch.equal(params[1], kept)


def test_closure_gradients_are_looked_ahead_as_well():
    """step(closure) and backward-then-step are the same; this failed at the second step once."""
    (one, _), (other, _) = parameters(), parameters()
    with_closure = LookaheadNAdam([one], lr=0.1, lookahead=2)
    without = LookaheadNAdam([other], lr=0.1, lookahead=2)

    def closure() -> torch.Tensor:
        with_closure.zero_grad()
        loss = one.square().sum()
        loss.backward()
        return loss

    for _ in range(5):
        expected = other.square().sum()
        without.zero_grad()
        expected.backward()
        without.step()
        assert torch.equal(with_closure.step(closure), expected)
        assert torch.equal(one, other)


def test_lookahead_may_be_switched_on_later():
    """A run without Lookahead can go on with it: the slow weights start there."""
    params, fast = parameters(), parameters()
    optimizer, plain = LookaheadNAdam(params, lookahead=0), LookaheadNAdam(fast, lookahead=0)
    run(optimizer, params, range(3))
    optimizer.param_groups[0]["lookahead"] = 2
    before = [parameter.detach().clone() for parameter in params]
    run(optimizer, params, range(3, 4))
    run(plain, fast, range(4))
    for parameter, start, without in zip(params, before, fast, strict=True):
        torch.testing.assert_close(parameter.detach(), (start + without.detach()) / 2)


def test_wrong_lookahead_is_refused():
    """The message names the value."""
    with pytest.raises(ValueError, match="lookahead = -1"):
        LookaheadNAdam(parameters(), lookahead=-1)


@pytest.mark.parametrize("period", [0, 1, 3])
@pytest.mark.parametrize("first", [0, 2])
def test_a_step_that_is_not_usable_moves_nothing(period, first):
    """Whatever its gradient is; with the count set right, it has not been. A usable one is any."""
    (mine, theirs), optimizers = (parameters(), parameters()), []
    for params in (mine, theirs):
        optimizers.append(LookaheadNAdam(params, lr=0.01, lookahead=period))
        run(optimizers[-1], params, range(first))
    optimizer, undisturbed = optimizers
    optimizer.initialise_state()
    before = [[p.detach().clone(), *map(torch.clone, optimizer.state[p].values())] for p in mine]
    for _ in range(4):
        for parameter in mine:
            parameter.grad = torch.full_like(parameter, float("nan"))
        optimizer.step(scale=torch.tensor(float("nan")), usable=torch.tensor(False))
    optimizer.set_step(first)
    for parameter, old in zip(mine, before, strict=True):
        now = [parameter, *optimizer.state[parameter].values()]
        assert all(torch.equal(*both) for both in zip(old, now, strict=True))
    for step in range(first, 8):
        set_gradients(mine, step)
        optimizer.step(usable=torch.tensor(True))
    run(undisturbed, theirs, range(first, 8))
    for one, other in zip(mine, theirs, strict=True):
        assert torch.equal(one, other)
        for key, value in undisturbed.state[other].items():
            assert torch.equal(optimizer.state[one][key], value), key


def test_the_count_of_steps_fixes_all_counters():
    """After so many that the running product of momenta is 0."""
    params = parameters()
    optimizer, counted = (LookaheadNAdam(params, lookahead=0) for _ in range(2))
    counted.initialise_state()
    for steps in (1, 2, 50, 1200):
        run(optimizer, params, range(int(optimizer.state[params[0]].get("step", 0)), steps))
        counted.set_step(steps)
        for key in ("step", "mu_product"):
            assert torch.equal(counted.state[params[0]][key], optimizer.state[params[0]][key])
    assert counted.state[params[0]]["mu_product"] == 0
