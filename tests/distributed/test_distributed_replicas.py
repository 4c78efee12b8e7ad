"""The step that replicas share: who steps what, and what one of them says to the others."""

import pytest
import torch
import torch.distributed as dist
from gloo import run_processes
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from lipnext_scale.distributed.replicas import (
    SharedManifoldAdam,
    Sharing,
    bank_sharings,
    reduce_to_shares,
)
from lipnext_scale.manifold import random_orthogonal


def banks(entries: list[int], width: int = 1) -> nn.Module:
    """Modules `0.bank`, `1.bank`, … of so many blocks, on O(width)."""
    generator, model = torch.Generator().manual_seed(0), nn.ModuleList()
    for count in entries:
        matrices = [random_orthogonal(width, generator, torch.float64) for _ in range(2 * count)]
        model.append(nn.Module())
        stack = torch.stack(matrices) if matrices else torch.empty(0, dtype=torch.float64)
        model[-1].bank = nn.Parameter(stack.view(count, 2, width, width))
    return model


@given(st.lists(st.integers(0, 9), min_size=1, max_size=5), st.integers(1, 6))
def test_every_block_has_one_replica_and_all_have_as_much(entries, replicas):
    """To a block: of each bank, and of all of them together."""
    stepped = [0] * replicas
    for sharing, count in zip(
        bank_sharings(banks(entries), replicas).values(), entries, strict=True
    ):
        owned = [
            [e for run in sharing.share(r) for e in range(count)[run]] for r in range(replicas)
        ]
        assert sorted(entry for share in owned for entry in share) == list(range(count))
        sizes = [len(share) for share in owned]
        assert max(sizes) - min(sizes) <= 1
        assert all(run.stop > run.start for r in range(replicas) for run in sharing.share(r))
        stepped = [total + size for total, size in zip(stepped, sizes, strict=True)]
    assert max(stepped) - min(stepped) <= 1


SIZES = [5, 1, 3]  # on three ranks: even shares and some left, one block, even shares alone


def reduce_each(rank: int, world: int) -> dict[str, list[tuple[slice, Tensor]]]:
    """What each rank has of the mean of gradients that are rank + 1 times the entry's number."""
    found = {}
    for name, sharing in bank_sharings(banks(SIZES, 2), world).items():
        numbers = torch.arange(sharing.entries, dtype=torch.float64).view(-1, 1, 1, 1)
        gradient = ((rank + 1) * numbers).expand(-1, 2, 2, 2).contiguous()
        reduce_to_shares(gradient, sharing, dist.group.WORLD)()
        found[name] = [(run, gradient[run]) for run in sharing.share(rank)]
    return found


@pytest.mark.slow
def test_gradients_are_averaged_where_they_are_used() -> None:
    for shares in run_processes(3, reduce_each):
        for runs in shares.values():
            for run, gradient in runs:
                expected = 2.0 * torch.arange(run.start, run.stop, dtype=torch.float64)
                assert torch.equal(gradient, expected.view(-1, 1, 1, 1).expand_as(gradient))


def shared(rank: int, world: int) -> tuple[nn.Module, SharedManifoldAdam, dict[str, Sharing]]:
    """On three ranks; every gradient is that of a loss that all of them have."""
    model = banks(SIZES, 4)
    sharings = bank_sharings(model, world)
    named = list(model.named_parameters())
    optimizer = SharedManifoldAdam(
        named, sharings, dist.group.WORLD, lr=0.01, parametrisation="product"
    )
    generator = torch.Generator().manual_seed(1)
    for _, bank in named:
        bank.grad = torch.randn(bank.shape, generator=generator, dtype=torch.float64)
    optimizer.initialise_state()
    optimizer.share_weights()
    return model, optimizer, sharings


def everything(model: nn.Module, optimizer: SharedManifoldAdam) -> list[Tensor]:
    states = [t for state in optimizer.state.values() for t in state.values()]
    return [tensor.detach().clone() for tensor in (*model.parameters(), *states)]


def step_twice(rank: int, world: int) -> tuple[bool, bool]:
    """(whether a step that no one may use leaves all as it was, whether the next one moves all)."""
    model, optimizer, _ = shared(rank, world)
    before = everything(model, optimizer)
    optimizer.step(usable=torch.tensor(False))
    kept = all(map(torch.equal, before, everything(model, optimizer)))
    optimizer.step()
    return kept, not any(map(torch.equal, before, model.parameters()))


@pytest.mark.slow
def test_a_step_that_is_not_usable_moves_nothing() -> None:
    assert run_processes(3, step_twice) == 3 * [(True, True)]


def state_of_shares(rank: int, world: int) -> list[int]:
    model, optimizer, _ = shared(rank, world)
    optimizer.step()
    return [state["exp_avg"].shape[0] for state in optimizer.state.values()]


@pytest.mark.slow
def test_a_rank_has_the_state_of_its_share_alone() -> None:
    """Three of nine blocks, each a run of its own."""
    assert run_processes(3, state_of_shares) == [[1, 1, 1], [1, 1, 1], [1, 1, 1]]
