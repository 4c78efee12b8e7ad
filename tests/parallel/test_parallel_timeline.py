"""Exposed and overlapped communication: exact on intervals, and right in kind on real processes."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from gloo import run_processes
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.autograd import DeviceType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from lipnext_scale.parallel.timeline import (
    Exposure,
    MeasureExposure,
    exposed_and_overlapped,
    intervals_on_gpu,
)
from lipnext_scale.parallel.traffic import CountTraffic

CPU = torch.device("cpu")
LENGTH = 40
intervals = st.lists(
    st.tuples(st.integers(0, LENGTH), st.integers(0, LENGTH)).map(lambda pair: tuple(sorted(pair)))
)


@given(communication=intervals, computation=intervals)
def test_intervals_are_measured_as_by_counting_cells(
    communication: list[tuple[int, int]], computation: list[tuple[int, int]]
) -> None:
    """On whole numbers: a cell [i, i+1) is covered or not."""

    def cells(spans: list[tuple[int, int]]) -> set[int]:
        return {cell for start, end in spans for cell in range(start, end)}

    busy, computing = cells(communication), cells(computation)
    assert exposed_and_overlapped(communication, computation) == Exposure(
        len(busy - computing), len(busy & computing)
    )


def test_a_gpus_events_are_sorted_by_kind() -> None:
    """NCCL's kernels communicate, others compute; annotations, copies and the host do neither."""

    def event(name: str, start: float, end: float, **other: Any) -> SimpleNamespace:
        span = SimpleNamespace(start=start, end=end)
        about = {"device_type": DeviceType.CUDA, "is_user_annotation": False, **other}
        return SimpleNamespace(name=name, time_range=span, **about)

    communication, computation = intervals_on_gpu(
        [
            event("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 0e6, 4e6),
            event("ampere_sgemm_128x64_nn", 1e6, 2e6),
            event("nccl:all_reduce", 0e6, 9e6, is_user_annotation=True),
            event("FSDP::all_gather", 0e6, 9e6, is_user_annotation=True),
            event("Memcpy HtoD (Pinned -> Device)", 2e6, 3e6),
            event("aten::mm", 0e6, 9e6, device_type=DeviceType.CPU),
        ]
    )
    assert exposed_and_overlapped(communication, computation) == Exposure(3, 1)


# ---- real processes ------------------------------------------------------------------------------


def communicate(rank: int, world: int) -> dict[tuple[str, str], list[float]]:
    """The overlapped share of some transfers, each in several ways and four times."""
    matrix, x = torch.rand(200, 200), torch.rand(2_000_000)
    received = torch.empty_like(x)

    def hide(work: dist.Work) -> None:
        while not work.is_completed():
            matrix @ matrix

    def wait(work: dist.Work) -> None:
        work.wait()
        for _ in range(5):
            matrix @ matrix

    starts: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: dist.all_reduce(x, async_op=True),
        "all_to_all": lambda: dist.all_to_all_single(received, x, async_op=True),
    }

    def add() -> None:
        functional.all_reduce(x, "sum", dist.group.WORLD) + 1

    def add_counted() -> None:
        with CountTraffic():
            add()

    transfers: dict[tuple[str, str], Callable[[], Any]] = {
        ("all_reduce", "waited for in an operator"): add,
        ("all_reduce", "waited for in an operator and counted"): add_counted,
    }
    for name, start in starts.items():
        transfers[name, "hidden"] = lambda start=start: hide(start())
        transfers[name, "waited for"] = lambda start=start: wait(start())
    return {
        key: [overlapped_share(transfer) for _ in range(4)] for key, transfer in transfers.items()
    }


def overlapped_share(transfer: Callable[[], Any]) -> float:
    dist.barrier()
    with MeasureExposure(CPU) as measured:
        transfer()
    return measured.exposure.overlapped_s / measured.exposure.total_s


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_communication_while_computing_is_overlapped_and_waiting_is_exposed(world: int) -> None:
    """Hidden behind products it is overlapped; if the products come after it, it is not.

    A busy machine may keep the processor from the products, so the best try at hiding counts.
    """
    results = run_processes(world, communicate)
    for name, way in results[0]:
        shares = [share for result in results for share in result[name, way]]
        if way == "hidden":
            assert max(shares) > 0.5, (name, way, shares)
        else:
            assert max(shares) < 0.2, (name, way, shares)


def train(rank: int, world: int) -> list[dict[str, float]]:
    def layers() -> nn.Sequential:
        return nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)])

    sharded = layers()
    for module in [*sharded.children(), sharded]:
        fully_shard(module, mesh=init_device_mesh("cpu", (world,)))
    metrics = []
    for model in (sharded, DistributedDataParallel(layers())):
        with MeasureExposure(CPU) as measured:
            model(torch.rand(8, 64)).sum().backward()
        metrics.append(measured.exposure.as_metrics())
    return metrics


@pytest.mark.parametrize("world", [1, 2])
def test_what_trains_a_model_is_seen(world: int) -> None:
    """FSDP2's and DDP's transfers take time; FSDP2 alone makes none."""
    for sharded, replicated in run_processes(world, train):
        for metrics in (sharded, replicated):
            assert metrics.keys() == {"traffic/exposed_s", "traffic/overlapped_s"}
            assert min(metrics.values()) >= 0
        assert (sum(sharded.values()) > 0) == (world > 1)
        assert sum(replicated.values()) > 0


def test_a_region_that_failed_has_no_exposure() -> None:
    """The error is the caller's to see, and the profiler is free for the next region."""
    failed = MeasureExposure(CPU)
    with pytest.raises(KeyError), failed:
        raise KeyError
    with pytest.raises(AssertionError):
        _ = failed.exposure
    with MeasureExposure(CPU) as measured:
        torch.ones(2) + 1
    assert measured.exposure == Exposure(0, 0)
