"""The row layout: owners, buckets, exchanges; RowManifoldAdam has the bits of ManifoldAdam."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gloo import run_processes
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from lipnext_scale.distributed.rows import (
    RowManifoldAdam,
    make_buckets,
    row_range,
)
from lipnext_scale.manifold import random_orthogonal
from lipnext_scale.optim import ManifoldAdam

ranks_ = st.integers(1, 9)


@given(rows=st.integers(1, 60), ranks=ranks_)
def test_rows_are_cut_as_torch_cuts_them(rows: int, ranks: int) -> None:
    """torch.chunk's parts in order; ranks beyond its last part hold nothing."""
    parts = [list(range(*row_range(rows, ranks, rank))) for rank in range(ranks)]
    chunks = [chunk.tolist() for chunk in torch.arange(rows).chunk(ranks)]
    assert parts == chunks + [[]] * (ranks - len(chunks))


@given(units=st.integers(1, 40), size=st.integers(1, 99), ranks=ranks_, limit=st.integers(1, 999))
def test_buckets_hold_every_unit_once(units: int, size: int, ranks: int, limit: int) -> None:
    """In order; no owner's part is above the limit, but for one unit, nor empty before its last."""
    buckets = make_buckets(units, size, ranks, limit)
    assert [unit for bucket in buckets for unit in bucket] == list(range(units))
    for rank in range(ranks):
        parts = [sum(unit % ranks == rank for unit in bucket) for bucket in buckets]
        assert size * max(parts) <= max(limit, size)
        assert parts == sorted(parts, reverse=True)


# ---- matrices in rows over ranks -----------------------------------------------------------------


def name_of(index: int) -> str:
    return f"matrix{index}"


def starts(sides: list[int]) -> dict[str, Tensor]:
    """name → an orthogonal matrix, the same on every rank."""
    return {
        name_of(index): random_orthogonal(side, torch.Generator().manual_seed(index))
        for index, side in enumerate(sides)
    }


def gradients(sides: list[int], step: int) -> list[Tensor]:
    """The whole gradients of a step, the same on every rank."""
    generator = torch.Generator().manual_seed(1000 + step)
    return [torch.randn(side, side, generator=generator) for side in sides]


def rows(whole: Tensor) -> Tensor:
    start, stop = row_range(whole.shape[0], dist.get_world_size(), dist.get_rank())
    return whole[start:stop].clone()


def give(parameters: list[nn.Parameter], wholes: list[Tensor]) -> None:
    """Each parameter gets its rows of its gradient."""
    for parameter, whole in zip(parameters, wholes, strict=True):
        parameter.grad = rows(whole)


def build(sides: list[int], **options: Any) -> tuple[list[nn.Parameter], RowManifoldAdam]:
    """This rank's rows and their optimizer, with the weights of `starts`."""
    weights = starts(sides)
    parameters = [nn.Parameter(rows(torch.full((side, side), torch.nan))) for side in sides]
    named = list(zip(weights, parameters, strict=True))

    def initial(name: str, matrix: Tensor) -> None:
        matrix.copy_(weights[name])

    return parameters, RowManifoldAdam(named, dist.group.WORLD, initial, **options)


def one_process(sides: list[int], **options: Any) -> tuple[list[nn.Parameter], ManifoldAdam]:
    """The same matrices whole, and ManifoldAdam for them."""
    named = [(name, nn.Parameter(matrix.contiguous())) for name, matrix in starts(sides).items()]
    return [parameter for _, parameter in named], ManifoldAdam(named, **options)


def held(parameters: list[nn.Parameter]) -> list[Tensor]:
    """A copy of what this rank holds of every matrix."""
    return [parameter.detach().clone() for parameter in parameters]


def joined(results: list[list[Tensor]]) -> list[Tensor]:
    """Whole matrices from the rows that the ranks hold: results[rank][matrix]."""
    return [torch.cat(parts) for parts in zip(*results, strict=True)]


# ---- the optimizer -------------------------------------------------------------------------------

STEPS, RETRACT_AFTER = 8, 3
OPTIONS = {"lr": 0.1, "lookahead": 3, "retract_every": 5}
# (sides, bytes of a bucket) of matrices: six on four ranks; fewer than ranks; sides that no world
# size divides, with ranks that hold no row (3 on 4); in many buckets and in one.
CASES = {
    "six": ([8] * 6, 1),
    "two": ([10] * 2, 1 << 20),
    "tiny": ([3] * 5, 80),
    "many buckets": ([7] * 9, 1),
    "one bucket": ([7] * 9, 1 << 20),
}


def train(
    sides: list[int],
    parameters: list[nn.Parameter],
    optimizer: Any,
    give: Callable[[list[nn.Parameter], list[Tensor]], None],
) -> list[list[Tensor]]:
    """The weights after every step, at last the slow ones."""
    path = [held(parameters)]
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = 0.1 / (1 + 0.1 * step)
        give(parameters, gradients(sides, step))
        optimizer.step()
        if step == RETRACT_AFTER:
            optimizer.retract()
        optimizer.zero_grad()
        path.append(held(parameters))
    with optimizer.slow_weights():
        path.append(held(parameters))
    assert all(torch.equal(a, b) for a, b in zip(path[-2], held(parameters), strict=True))
    return path


def give_whole(parameters: list[nn.Parameter], wholes: list[Tensor]) -> None:
    for parameter, whole in zip(parameters, wholes, strict=True):
        parameter.grad = whole


def train_rows(rank: int, ranks: int, return_dtype: torch.dtype) -> dict[str, tuple]:
    """case → (rows after every step, X and its state of what is owned)."""
    results = {}
    for case, (sides, bucket_bytes) in CASES.items():
        options = {**OPTIONS, "bucket_bytes": bucket_bytes, "return_dtype": return_dtype}
        parameters, optimizer = build(sides, **options)
        path = train(sides, parameters, optimizer, give)
        owned = {name: optimizer.owned_tensors(name, with_state=True) for name in optimizer.names}
        results[case] = (
            path,
            {
                name: {kind: tensor[found[0]] for kind, tensor in found[1].items()}
                for name, found in owned.items()
                if found is not None
            },
        )
    return results


@pytest.mark.slow
@pytest.mark.parametrize("world_size, dtype", [(1, torch.float32), (3, torch.float32), (4, None)])
def test_every_step_is_that_of_one_process(world_size: int, dtype: torch.dtype | None) -> None:
    """Weights after every step, slow weights, state, owners' X: equal bits in every case.

    On four ranks rows return in bfloat16: each is the rounded one, and the owners keep float32.
    """
    return_dtype = dtype or torch.bfloat16
    results = run_processes(world_size, train_rows, return_dtype)
    for case, (sides, _) in CASES.items():
        parameters, optimizer = one_process(sides, **OPTIONS)
        path = train(sides, parameters, optimizer, give_whole)
        assert not torch.equal(path[0][0], path[-1][0])
        ours = [result[case] for result in results]
        for step, wholes in enumerate(path):
            matrices = joined([rank_path[step] for rank_path, _ in ours])
            for index, matrix in enumerate(matrices):
                expected = wholes[index].to(return_dtype).float()
                assert torch.equal(matrix, expected), (case, step, index)
        owned = [item for _, states in ours for item in states.items()]
        assert sorted(name for name, _ in owned) == sorted(starts(sides))  # one owner each
        for name, state in owned:
            parameter = parameters[int(name.removeprefix("matrix"))]
            expected = {"model": parameter.detach(), **optimizer.state[parameter]}
            assert state.keys() == expected.keys() - {"step"}
            for kind, tensor in state.items():
                assert torch.equal(tensor, expected[kind]), (name, kind)
