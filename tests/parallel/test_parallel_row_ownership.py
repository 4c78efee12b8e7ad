"""Who holds which rows, who owns which matrix, what is exchanged together."""

from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lipnext_scale.parallel.rows import assign_owners, make_buckets, row_range

ranks_ = st.integers(1, 9)
costs_ = st.lists(st.integers(1, 1000), max_size=40)


@given(rows=st.integers(1, 60), ranks=ranks_)
def test_rows_are_cut_as_torch_cuts_them(rows, ranks):
    """torch.chunk's parts in order; ranks beyond its last part hold nothing."""
    parts = [list(range(*row_range(rows, ranks, rank))) for rank in range(ranks)]
    chunks = [chunk.tolist() for chunk in torch.arange(rows).chunk(ranks)]
    assert parts == chunks + [[]] * (ranks - len(chunks))


def test_small_matrices_leave_ranks_without_rows():
    """Three rows on four ranks, and ten: the last shard is short or empty."""
    assert [row_range(3, 4, rank) for rank in range(4)] == [(0, 1), (1, 2), (2, 3), (3, 3)]
    assert [row_range(10, 4, rank) for rank in range(4)] == [(0, 3), (3, 6), (6, 9), (9, 10)]


def loads(costs, owners, ranks):
    pairs = list(zip(costs, owners, strict=True))
    return [sum(cost for cost, owner in pairs if owner == rank) for rank in range(ranks)]


@given(costs=st.lists(st.integers(1, 20), min_size=1, max_size=6), ranks=st.integers(1, 3))
def test_owners_are_balanced(costs, ranks):
    """Graham's bound of longest-first: at most 4/3 - 1/3R of the best that there is."""
    assignments = product(range(ranks), repeat=len(costs))
    best = min(max(loads(costs, owners, ranks)) for owners in assignments)
    busiest = max(loads(costs, assign_owners(costs, ranks), ranks))
    assert 3 * ranks * busiest <= (4 * ranks - 1) * best


@given(costs=costs_, ranks=ranks_)
def test_nobody_would_gain_by_giving_a_matrix_away(costs, ranks):
    """The busiest rank less its last (smallest) matrix has no more to do than any other."""
    owners = assign_owners(costs, ranks)
    parts = [[c for c, o in zip(costs, owners, strict=True) if o == rank] for rank in range(ranks)]
    for part in parts:
        if part:
            assert sum(part) - min(part) <= min(sum(other) for other in parts)


def test_equal_matrices_go_round():
    """Ties are by index, so every rank of every run finds the same owners."""
    assert assign_owners([7] * 6, 4) == [0, 1, 2, 3, 0, 1]
    assert assign_owners([1, 5, 5, 1, 9], 2) == [0, 1, 1, 0, 0]
    assert assign_owners([], 3) == []


@given(costs=costs_, ranks=ranks_, limit=st.integers(1, 3000))
def test_buckets_hold_every_matrix_once_and_no_owners_part_is_too_large(costs, ranks, limit):
    """A partition whose parts are at most the limit, or the largest matrix if that is above it."""
    owners = assign_owners(costs, ranks)
    buckets = make_buckets(owners, costs, ranks, limit)
    assert sorted(matrix for bucket in buckets for matrix in bucket) == list(range(len(costs)))
    for bucket in buckets:
        assert bucket == sorted(bucket)
        for rank in range(ranks):
            part = sum(costs[matrix] for matrix in bucket if owners[matrix] == rank)
            assert part <= max(limit, max(costs))


@given(costs=costs_, ranks=ranks_, limit=st.integers(1, 3000))
def test_an_owner_works_in_every_bucket_until_it_has_no_more(costs, ranks, limit):
    """No owner waits for a bucket in which it has nothing while it has matrices left."""
    owners = assign_owners(costs, ranks)
    buckets = make_buckets(owners, costs, ranks, limit)
    for rank in range(ranks):
        busy = [any(owners[matrix] == rank for matrix in bucket) for bucket in buckets]
        assert busy == sorted(busy, reverse=True)


@given(count=st.integers(1, 40), ranks=ranks_, together=st.integers(1, 6))
def test_buckets_are_as_few_as_the_limit_allows(count, ranks, together):
    """Equal matrices: each owner's part is full in all buckets but the last."""
    owners = assign_owners([1] * count, ranks)
    buckets = make_buckets(owners, [10] * count, ranks, 10 * together + 9)
    most = max(owners.count(rank) for rank in range(ranks))
    assert len(buckets) == -(-most // together)


@pytest.mark.parametrize("rank", [-1, 4])
def test_a_rank_outside_the_group_has_no_rows(rank):
    """Asking for it is a mistake."""
    with pytest.raises(AssertionError):
        row_range(8, 4, rank)
