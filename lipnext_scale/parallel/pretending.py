"""One process as any of many that are not there: engines can then place a model, and nothing is
allocated."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore


@contextmanager
def fake_processes(rank: int, world_size: int) -> Iterator[None]:
    """This process as one of many that are not there."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()
