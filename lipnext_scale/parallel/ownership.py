"""Who holds which rows of a matrix, who owns it, and which matrices are exchanged together.

Pure functions of numbers that are the same on every rank, so all ranks agree without asking.
"""

from collections import deque
from collections.abc import Sequence


def row_range(rows: int, ranks: int, rank: int) -> tuple[int, int]:
    """The rows [start, stop) that `rank` holds: torch.chunk's rule, which FSDP2 shards by.

    Every shard has ceil(rows/ranks) rows but the last ones, which may have fewer or none.
    """
    assert 0 <= rank < ranks
    length = -(-rows // ranks)
    return min(rank * length, rows), min((rank + 1) * length, rows)


def assign_owners(costs: Sequence[float], ranks: int) -> list[int]:
    """The owner of every matrix: the longest first, each to the rank with the least to do."""
    load = [0.0] * ranks
    owners = [0] * len(costs)
    for matrix in sorted(range(len(costs)), key=lambda index: (-costs[index], index)):
        owner = min(range(ranks), key=lambda rank: (load[rank], rank))
        owners[matrix] = owner
        load[owner] += costs[matrix]
    return owners


def make_buckets(
    owners: Sequence[int], sizes_in_bytes: Sequence[int], ranks: int, bucket_bytes: int
) -> list[list[int]]:
    """Matrices that are exchanged and moved together; every matrix is in exactly one bucket.

    Each owner puts its next matrices into a bucket, up to `bucket_bytes` and at least one: so all
    owners have work in every bucket until they have no more. The largest matrix counts as the limit
    if it is above it, for the buffers must hold it anyway.
    """
    assert len(owners) == len(sizes_in_bytes)
    limit = max([bucket_bytes, *sizes_in_bytes])
    left = [deque(i for i, owner in enumerate(owners) if owner == rank) for rank in range(ranks)]
    buckets = []
    while any(left):
        bucket: list[int] = []
        for matrices in left:
            room = limit
            while matrices and sizes_in_bytes[matrices[0]] <= room:
                room -= sizes_in_bytes[matrices[0]]
                bucket.append(matrices.popleft())
        buckets.append(sorted(bucket))
    return buckets
