"""Rows go to their owners and back: packed, ragged, two at a time, in buffers used again."""

import pytest
import torch
import torch.distributed as dist
from gloo import run_processes
from row_matrices import rows

from lipnext_scale.parallel.rows import PackedExchange, Parcel, RowExchange, assign_owners

CPU = torch.device("cpu")
SIDES = [10, 3, 4, 7, 3]


def wholes(seed):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(side, side, generator=generator) for side in SIDES]


def gather_and_return(rank, ranks):
    return [_gather_and_return(rank, ranks, dtype) for dtype in (torch.float32, torch.bfloat16)]


def _gather_and_return(rank, ranks, return_dtype):
    """Everything to the owners, who negate it, and back; both directions two at a time."""
    owners = assign_owners(SIDES, ranks)
    exchange = RowExchange(SIDES, owners, dist.group.WORLD, torch.empty(0), return_dtype)
    sources = wholes(0)
    shards = {index: rows(whole, rank, ranks) for index, whole in enumerate(sources)}
    mine = {i: torch.full((SIDES[i],) * 2, torch.nan) for i in shards if owners[i] == rank}
    targets = {index: torch.full_like(shard, torch.nan) for index, shard in shards.items()}
    buckets = [[0, 2], [1, 3, 4]]
    for bucket in buckets:
        exchange.post_to_owners(bucket, shards, mine)
    for _ in buckets:
        exchange.finish_to_owners()
    for index, matrix in mine.items():
        assert torch.equal(matrix, sources[index])
        matrix.neg_()
    for bucket in buckets:
        exchange.post_to_shards(bucket, mine, targets)
    assert [exchange.finish_to_shards() for _ in buckets] == [[], []]
    for index, target in targets.items():
        assert torch.equal(target, -shards[index].to(return_dtype).float())
    return len(mine)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_rows_arrive_and_return(world_size):
    """Uneven and empty shards; those that stay on the rank are rounded as those that travel."""
    for counts in zip(*run_processes(world_size, gather_and_return), strict=True):
        assert sum(counts) == len(SIDES)


def report_failures(rank, ranks):
    """Owner 1 fails in the first bucket, owner 0 in the second, nobody in the third."""
    owners, sides = [0, 1, 1, 0, 2, 1], [3] * 6
    exchange = RowExchange(sides, owners, dist.group.WORLD, torch.empty(0), torch.bfloat16)
    shards = {index: rows(torch.zeros(3, 3), rank, ranks) for index in range(6)}
    mine = {index: torch.eye(3) for index in range(6) if owners[index] == rank}
    exchange.post_to_shards([0, 1, 2], mine, shards, failed=rank == 1)
    exchange.post_to_shards([3, 4], mine, shards, failed=rank == 0)
    failed = [exchange.finish_to_shards()]
    exchange.post_to_shards([5], mine, shards, failed=rank == 3)  # owns nothing, so says nothing
    failed += [exchange.finish_to_shards() for _ in range(2)]
    assert all(torch.equal(shard, rows(torch.eye(3), rank, ranks)) for shard in shards.values())
    return failed


def test_every_rank_learns_which_owner_failed():
    """Also a rank that holds no row, and each bucket by itself."""
    assert run_processes(4, report_failures) == [[[1, 2], [3], []]] * 4


def use_buffers(rank, ranks):
    """The places and sizes of all buffers on the wire, over many exchanges of changing size."""
    exchange = PackedExchange(dist.group.WORLD, torch.float32, CPU)
    seen, original = [], dist.all_to_all_single

    def spy(output, source, *args, **options):
        boxes = (output, source)
        seen.append({(t.untyped_storage().data_ptr(), t.untyped_storage().nbytes()) for t in boxes})
        return original(output, source, *args, **options)

    dist.all_to_all_single = spy
    for size in (50, 50, 3, 20, 50, 1, 7):
        send = [Parcel(peer, torch.full((size,), float(peer))) for peer in range(ranks)]
        received = [torch.zeros(size) for _ in range(ranks)]
        exchange.post(send, [Parcel(peer, t) for peer, t in enumerate(received)])
        exchange.finish()
        assert all(torch.equal(t, torch.full((size,), float(rank))) for t in received)
    return seen


def test_buffers_are_used_again():
    """After the first two exchanges nothing is allocated: two outboxes and two inboxes in turn."""
    for seen in run_processes(3, use_buffers):
        first, second = seen[0], seen[1]
        assert all(nbytes == 2 * 50 * 4 for _, nbytes in first | second)
        assert len(first | second) == 4
        assert seen == [first, second, first, second, first, second, first]


def post_too_many(rank, ranks):
    exchange = PackedExchange(dist.group.WORLD, torch.float32, CPU)
    for _ in range(2):
        exchange.post([], [])
    with pytest.raises(AssertionError, match="finish an exchange"):
        exchange.post([], [])
    for _ in range(2):
        exchange.finish()


def test_a_buffer_in_use_is_not_packed_again():
    """A third exchange before the first is finished is refused."""
    run_processes(2, post_too_many)
