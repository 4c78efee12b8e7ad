"""Processes find those of their own start in a store that is older than they are."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from lipnext_scale.errors import RunFailed
from lipnext_scale.parallel.processes import store_of_this_start


def start(store: dist.Store, world_size: int) -> list[dist.Store]:
    """All processes of a start, here as threads; the first one comes last."""
    with ThreadPoolExecutor(world_size) as pool:
        ranks = reversed(range(world_size))
        parts = list(pool.map(lambda rank: store_of_this_start(store, rank, world_size), ranks))
    return parts[::-1]


def test_a_start_sees_nothing_of_earlier_ones() -> None:
    """Not what they wrote, nor the questions of processes that died before they were answered."""
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=30))
    for attempt in range(4):
        parts = start(store, 3)
        assert not parts[0].check(["address"])
        parts[1].set("address", f"of attempt {attempt}")
        assert {part.get("address") for part in parts} == {f"of attempt {attempt}".encode()}
        store.add("asked", attempt)  # so many of the next start were killed at once


def test_those_that_do_not_come_are_told() -> None:
    """After the store's own time-out, which is half an hour, in a line."""
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=0.2))
    with pytest.raises(RunFailed, match="2 of 3 processes did not come"):
        store_of_this_start(store, 0, 3)
    with pytest.raises(RunFailed, match="the first process was not met: "):
        store_of_this_start(store, 1, 3)
