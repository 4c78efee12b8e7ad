"""RowManifoldAdam on real processes, bit for bit as ManifoldAdam in one.

The same numbers go through the same operations: a matrix is a parameter of its own in both, and
only copies lie between. So the bits are equal, not just the digits.
"""

import pytest
import torch
from gloo import run_processes
from row_matrices import build, give, gradients, held, joined, name_of, one_process

STEPS = 8
OPTIONS = {"lr": 0.1, "lookahead": 3, "retract_every": 5}
RETRACT_AFTER = 3
# (sides, bytes of a bucket) of matrices: six on four ranks; fewer than ranks; sides that no world
# size divides, with ranks that hold no row (3 on 4); of all sizes, in many buckets and in one.
CASES = {
    "six": ([8] * 6, 1),
    "two": ([10] * 2, 1 << 20),
    "tiny": ([3] * 5, 80),
    "many buckets": ([12, 3, 16, 5, 10, 1, 7], 1),
    "one bucket": ([12, 3, 16, 5, 10, 1, 7], 1 << 20),
}


def train(rank, ranks):
    """case → (rows after every step, the state and the X of what is owned)."""
    results = {}
    for case, (sides, bucket_bytes) in CASES.items():
        parameters, optimizer = build(sides, bucket_bytes=bucket_bytes, **OPTIONS)
        path = [held(parameters)]
        for step in range(STEPS):
            optimizer.param_groups[0]["lr"] = 0.1 / (1 + 0.1 * step)
            give(parameters, gradients(sides, step))
            optimizer.step()
            if step == RETRACT_AFTER:
                optimizer.retract()
            optimizer.zero_grad()
            path.append(held(parameters))
        states = {name: optimizer.state_of(name) for name in optimizer.owned}
        results[case] = path, states, {name: x.detach() for name, x in optimizer.owned.items()}
    return results


def expected(sides):
    parameters, optimizer = one_process(sides, **OPTIONS)
    path = [held(parameters)]
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = 0.1 / (1 + 0.1 * step)
        for parameter, gradient in zip(parameters, gradients(sides, step), strict=True):
            parameter.grad = gradient
        optimizer.step()
        if step == RETRACT_AFTER:
            before = held(parameters)
            optimizer.retract()
            assert not all(torch.equal(a, b) for a, b in zip(before, parameters, strict=True))
        path.append(held(parameters))
    states = {name_of(index): optimizer.state[p] for index, p in enumerate(parameters)}
    return path, states


def assert_same_states(states, wanted):
    assert states.keys() == wanted.keys()
    for name, state in wanted.items():
        assert states[name].keys() == state.keys()
        assert {"exp_avg", "exp_avg_sq", "buffer", "slow", "step"} <= state.keys()
        for key, tensor in state.items():
            assert torch.equal(states[name][key], tensor), (name, key)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_every_step_is_that_of_one_process(world_size):
    """Weights after every step, state and owners' X at the end: equal bits, whatever the layout."""
    results = run_processes(world_size, train)
    for case, (sides, _) in CASES.items():
        path, states = expected(sides)
        assert not torch.equal(path[0][0], path[-1][0])
        ours = [result[case] for result in results]
        for step in range(STEPS + 1):
            whole = joined([rank_path[step] for rank_path, _, _ in ours])
            for index, matrix in enumerate(whole):
                assert torch.equal(matrix, path[step][index]), (case, step, index)
        assert_same_states({n: s for _, part, _ in ours for n, s in part.items()}, states)
        owned = [(name, x) for _, _, part in ours for name, x in part.items()]
        assert sorted(name for name, _ in owned) == sorted(states)  # each has exactly one owner
        for name, matrix in owned:
            assert torch.equal(matrix, path[-1][int(name.removeprefix("matrix"))])


def train_rounded(rank, ranks, sides):
    options = {**OPTIONS, "return_dtype": torch.bfloat16}
    parameters, optimizer = build(sides, bucket_bytes=1, **options)
    path = [held(parameters)]
    for step in range(STEPS):
        give(parameters, gradients(sides, step))
        optimizer.step()
        path.append(held(parameters))
    return path, {name: x.detach() for name, x in optimizer.owned.items()}


@pytest.mark.parametrize("world_size", [1, 4])
def test_rows_may_return_in_bfloat16(world_size):
    """Every row is the rounded one of the float32 run, which the owners continue unrounded."""
    sides, _ = CASES["many buckets"]
    results = run_processes(world_size, train_rounded, sides)
    parameters, optimizer = one_process(sides, **OPTIONS)
    for step in range(STEPS + 1):
        for index, matrix in enumerate(joined([path[step] for path, _ in results])):
            assert matrix.dtype == torch.float32
            assert torch.equal(matrix, parameters[index].detach().bfloat16().float())
        if step < STEPS:
            for parameter, gradient in zip(parameters, gradients(sides, step), strict=True):
                parameter.grad = gradient
            optimizer.step()
    owned = {name: matrix for _, part in results for name, matrix in part.items()}
    for index, parameter in enumerate(parameters):
        assert torch.equal(owned[name_of(index)], parameter)


def train_partly(rank, ranks, sides, frozen):
    parameters, optimizer = build(sides, bucket_bytes=1, **OPTIONS)
    for step, absent in enumerate(frozen):
        give(parameters, gradients(sides, step), absent)
        optimizer.step()
    return held(parameters)


def test_matrices_without_a_gradient_stay():
    """Frozen or unused ones are skipped, also where a bucket has none left, or the step has."""
    sides = [8, 5, 8, 3, 8, 8]
    frozen = [{0}, {0, 1, 2, 3}, {0, 1, 2, 3, 4, 5}, {0, 4, 5}, {0}]
    results = run_processes(4, train_partly, sides, frozen)
    parameters, optimizer = one_process(sides, **OPTIONS)
    start = held(parameters)
    for step, absent in enumerate(frozen):
        for index, gradient in enumerate(gradients(sides, step)):
            parameters[index].grad = None if index in absent else gradient
        optimizer.step()
    for index, matrix in enumerate(joined(results)):
        assert torch.equal(matrix, parameters[index])
        assert torch.equal(matrix, start[index]) == (index == 0)
