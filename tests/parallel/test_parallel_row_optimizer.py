"""RowManifoldAdam as an object: start, slow weights, state, failures."""

import copy

import pytest
import torch
import torch.distributed as dist
from gloo import run_processes
from row_matrices import (
    build,
    give,
    gradients,
    held,
    joined,
    name_of,
    named,
    one_process,
    rows,
    starts,
    unfilled,
)

from lipnext_scale.parallel.rows import RowManifoldAdam

SIDES = [8, 3, 10, 8, 5, 8]
OPTIONS = {"lr": 0.05, "lookahead": 3, "bucket_bytes": 1}


def take_steps(parameters, optimizer, sides=SIDES, count=4, first=0):
    for step in range(first, first + count):
        give(parameters, gradients(sides, step))
        optimizer.step()


# --- the start --------------------------------------------------------------------------------


def initialise(rank, ranks):
    parameters, filled, weights = unfilled(SIDES), [], starts(SIDES)
    optimizer = RowManifoldAdam(named(parameters), dist.group.WORLD, **OPTIONS)
    with pytest.raises(AssertionError, match="step.. before initialise"):
        optimizer.step()

    def fill(name, matrix):
        filled.append(name)
        matrix.copy_(weights[name])

    optimizer.initialise(fill)
    assert filled == list(optimizer.owned)
    for parameter, whole in zip(parameters, weights.values(), strict=True):
        assert torch.equal(parameter, rows(whole, rank, ranks))
    return filled


def test_only_the_owner_makes_a_matrix():
    """Every matrix is filled once, on one rank, and all ranks have their rows of it."""
    filled = run_processes(4, initialise)
    assert sorted(name for names in filled for name in names) == sorted(starts(SIDES))


def start_again(rank, ranks):
    parameters, optimizer = build(SIDES, **OPTIONS)
    take_steps(parameters, optimizer)
    once, weights = held(parameters), starts(SIDES)
    optimizer.initialise(lambda name, matrix: matrix.copy_(weights[name]))
    take_steps(parameters, optimizer)
    assert all(torch.equal(a, b) for a, b in zip(once, held(parameters), strict=True))


def test_a_new_start_forgets_the_old():
    """Initialised anew it takes the same steps again: no moments or slow weights are left."""
    run_processes(2, start_again)


def own_nothing(rank, ranks):
    sides = [6, 6]
    parameters, optimizer = build(sides, lr=0.05)
    take_steps(parameters, optimizer, sides)
    optimizer.retract()
    with optimizer.slow_weights():
        pass
    optimizer.initialise_state()
    assert optimizer.param_groups[0]["lr"] == 0.05
    return len(optimizer.owned)


def test_a_rank_may_own_nothing():
    """Two matrices on four ranks: the others still hold, send and receive rows."""
    assert run_processes(4, own_nothing) == [1, 1, 0, 0]


def fill_wrongly(rank, ranks):
    parameters = unfilled(SIDES)
    optimizer = RowManifoldAdam(named(parameters), dist.group.WORLD, **OPTIONS)
    with pytest.raises(ValueError) as error:
        optimizer.initialise(lambda name, x: x.mul_(torch.nan if name == "matrix1" else 1))
    with pytest.raises(AssertionError, match="before initialise"):
        optimizer.step()
    return str(error.value)


def test_all_ranks_refuse_a_start_that_is_not_orthogonal():
    """One owner finds it; every rank says the same, naming the owner's part of the bucket."""
    messages = run_processes(4, fill_wrongly)
    assert set(messages) == {"one of matrix1, matrix3 is not orthogonal as it was filled"}


def shard_wrongly(rank, ranks):
    short = torch.nn.Parameter(torch.zeros(3 if rank == 0 else 1, 4))
    with pytest.raises(AssertionError) as error:
        RowManifoldAdam([("w", short)], dist.group.WORLD)
    return str(error.value)


def test_rows_must_lie_where_the_owner_looks_for_them():
    """Rows that are not those of torch.chunk are refused with what was expected."""
    messages = run_processes(2, shard_wrongly)
    assert messages[1] == "w: rank 1 of 2 holds (1, 4), not rows 2 to 4"


# --- slow weights, retraction, state ----------------------------------------------------------


def show_slow_weights(rank, ranks):
    parameters, optimizer = build(SIDES, **OPTIONS)
    take_steps(parameters, optimizer)
    before = held(parameters)
    with optimizer.slow_weights():
        slow = held(parameters)
        for forbidden in (
            optimizer.step,
            optimizer.retract,
            optimizer.rows_from_owners,
            optimizer.initialise_state,
            lambda: optimizer.state_of("matrix0"),
            lambda: optimizer.initialise(lambda name, x: None),
            lambda: optimizer.slow_weights().__enter__(),
        ):
            with pytest.raises(AssertionError, match=r"inside slow_weights\(\)"):
                forbidden()
    assert all(torch.equal(a, b) for a, b in zip(before, held(parameters), strict=True))
    take_steps(parameters, optimizer, first=4, count=1)
    return slow, held(parameters)


def test_the_rows_show_the_slow_weights():
    """Inside they are those of ManifoldAdam; afterwards training goes on as if nothing was."""
    results = run_processes(3, show_slow_weights)
    parameters, optimizer = one_process(SIDES, lr=0.05, lookahead=3)
    for step in range(5):
        if step == 4:
            with optimizer.slow_weights():
                slow = held(parameters)
        for parameter, gradient in zip(parameters, gradients(SIDES, step), strict=True):
            parameter.grad = gradient
        optimizer.step()
    for index, matrix in enumerate(joined([shown for shown, _ in results])):
        assert torch.equal(matrix, slow[index])
        assert not torch.equal(matrix, parameters[index])
    for index, matrix in enumerate(joined([after for _, after in results])):
        assert torch.equal(matrix, parameters[index])


def fail_inside(rank, ranks):
    parameters, optimizer = build(SIDES, **OPTIONS)
    take_steps(parameters, optimizer)
    before = held(parameters)
    if rank == 1:  # the others leave in good order, and must not be waited for
        with pytest.raises(KeyError):
            with optimizer.slow_weights():
                raise KeyError
        with pytest.raises(AssertionError, match=r"before .* rows_from_owners\(\)"):
            optimizer.step()
        optimizer.rows_from_owners()
    else:
        with optimizer.slow_weights():
            pass
    assert all(torch.equal(a, b) for a, b in zip(before, held(parameters), strict=True))
    take_steps(parameters, optimizer, first=4, count=1)


def test_an_error_under_the_slow_weights_does_not_hang():
    """The rank that fails sends nothing by itself; `rows_from_owners` brings the fast rows back."""
    run_processes(3, fail_inside)


def save_and_load(rank, ranks):
    parameters, optimizer = build(SIDES, **OPTIONS)
    take_steps(parameters, optimizer)
    saved = {
        name: (x.detach().clone(), copy.deepcopy(optimizer.state_of(name)))
        for name, x in optimizer.owned.items()
    }
    take_steps(parameters, optimizer, first=4, count=3)
    wanted = held(parameters)

    others = unfilled(SIDES)
    resumed = RowManifoldAdam(named(others), dist.group.WORLD, **OPTIONS)
    resumed.initialise_state()
    for name, (x, state) in saved.items():
        resumed.owned[name].data.copy_(x)
        for key, value in state.items():
            if key != "step":
                resumed.state_of(name)[key].copy_(value)
    resumed.set_step(4)
    resumed.rows_from_owners()
    take_steps(others, resumed, first=4, count=3)
    assert all(torch.equal(a, b) for a, b in zip(wanted, held(others), strict=True))
    return {key for name in saved for key in saved[name][1]}


def test_state_is_loaded_in_place():
    """A run that goes on from another's X and state takes the same steps, bit for bit."""
    for keys in run_processes(3, save_and_load):
        assert keys == {"step", "exp_avg", "exp_avg_sq", "buffer", "slow"}


def clear_gradients(rank, ranks):
    parameters, optimizer = build(SIDES, **OPTIONS)
    give(parameters, gradients(SIDES, 0), frozen={2})
    optimizer.zero_grad(set_to_none=False)
    assert [p.grad is None for p in parameters] == [index == 2 for index in range(len(SIDES))]
    assert not any(p.grad.any() for p in parameters if p.grad is not None)
    optimizer.zero_grad()
    assert all(p.grad is None for p in parameters)


def test_gradients_of_the_rows_are_cleared():
    """Set to None, or to zero when asked."""
    run_processes(2, clear_gradients)


# --- updates that are not finite --------------------------------------------------------------


def meet_infinity(rank, ranks, sides, where):
    """A gradient that overflows in one matrix, in a row that its owner does not hold."""
    parameters, optimizer = build(sides, **OPTIONS)
    take_steps(parameters, optimizer, sides, count=2)
    before = held(parameters)
    grads = gradients(sides, 2)
    grads[where][0, 0] = torch.inf
    give(parameters, grads)
    with pytest.raises(FloatingPointError) as error:
        optimizer.step()
    after = held(parameters)
    optimizer.rows_from_owners()  # the exchanges are in order, and nothing was to be mended
    assert all(torch.equal(a, b) for a, b in zip(after, held(parameters), strict=True))
    assert all(x.isfinite().all() for x in after)
    # Without that matrix it goes on.
    give(parameters, gradients(sides, 3), frozen={where})
    optimizer.step()
    return str(error.value), before, after


@pytest.mark.parametrize("sides", [[8] * 16, [3] * 16], ids=["rows on all", "a rank without rows"])
def test_all_ranks_raise_and_nothing_hangs(sides):
    """Buckets of four, the first with a bad one: it stays, the third and fourth are not begun."""
    bad = 1
    results = run_processes(4, meet_infinity, sides, bad)
    assert {message for message, _, _ in results} == {f"the update of {name_of(bad)} is not finite"}
    before = joined([path for _, path, _ in results])
    after = joined([path for _, _, path in results])
    moved = [not torch.equal(a, b) for a, b in zip(before, after, strict=True)]
    assert moved == [True, False, True, True] + [True] * 4 + [False] * 8


@pytest.mark.parametrize("world_size, where", [(1, 0), (2, 5), (3, 3)])
def test_a_failure_in_any_bucket_is_told(world_size, where):
    """The first, the last, and with one rank alone."""
    results = run_processes(world_size, meet_infinity, [6] * 6, where)
    messages = {message for message, _, _ in results}
    assert messages == {f"the update of {name_of(where)} is not finite"}


def meet_infinity_in_a_large_bucket(rank, ranks):
    parameters, optimizer = build([4] * 4, lr=0.05, bucket_bytes=1 << 20)
    grads = gradients([4] * 4, 0)
    grads[3][0, 0] = torch.nan
    give(parameters, grads)
    with pytest.raises(FloatingPointError, match="^the update of one of matrix1, matrix3 is not"):
        optimizer.step()
    starting = starts([4] * 4)
    for index in (1, 3):  # the owner plans all its moves before it makes one
        assert torch.equal(parameters[index], rows(starting[name_of(index)], rank, ranks))


def test_a_failure_names_the_owners_part_of_the_bucket():
    """Which of the matrices it was the owner cannot tell, so the message names all it may be."""
    run_processes(2, meet_infinity_in_a_large_bucket)
