"""How much of the communication is hidden behind computation, and how much the step waits for.

    with MeasureExposure(device) as measured:
        ...                              # a step
    measured.exposure.as_metrics()

torch.profiler tells when this rank communicated and when it computed. Time in which it did both is
overlapped, the rest of the communication is exposed. What communication and computation are:

    on the CPU  the work of gloo's threads, from the moment one of them takes it up;
                the operators of the thread that entered the region, but for those that wait.
                Kernels of torch.compile are no operators: nothing counts as hidden behind them.
    on a GPU    NCCL's kernels;
                all other kernels.
                This has not been run on a GPU; only the sorting of made-up events is tested.

Profiling costs microseconds an operator, so measure a step now and then, not all.
"""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

Interval = tuple[float, float]

_MARK = "lipnext_scale::measured_thread"
_WAITING = "_c10d_functional::wait_tensor"


@dataclass(frozen=True)
class Exposure:
    """Seconds in which this rank communicated: without computing, and while it computed."""

    exposed_s: float
    overlapped_s: float

    @property
    def total_s(self) -> float:
        return self.exposed_s + self.overlapped_s

    def as_metrics(self) -> dict[str, float]:
        return {"traffic/exposed_s": self.exposed_s, "traffic/overlapped_s": self.overlapped_s}


def exposed_and_overlapped(
    communication: Iterable[Interval], computation: Iterable[Interval]
) -> Exposure:
    """The measure of the communication outside the computation, and inside it."""
    busy = union(communication)
    exposed = subtract(busy, union(computation))
    return Exposure(measure(exposed), measure(subtract(busy, exposed)))


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same points as disjoint intervals in order."""
    disjoint: list[Interval] = []
    for start, end in sorted(intervals):
        if end <= start:
            continue
        if disjoint and start <= disjoint[-1][1]:
            disjoint[-1] = (disjoint[-1][0], max(disjoint[-1][1], end))
        else:
            disjoint.append((start, end))
    return disjoint


def subtract(intervals: list[Interval], holes: list[Interval]) -> list[Interval]:
    """The points of the first that are not in the second; both disjoint and in order."""
    left, first = [], 0
    for start, end in intervals:
        while first < len(holes) and holes[first][1] <= start:
            first += 1
        index = first  # a hole may reach into the next interval: look at it again then
        while index < len(holes) and holes[index][0] < end:
            if start < holes[index][0]:
                left.append((start, holes[index][0]))
            start = max(start, holes[index][1])
            index += 1
        if start < end:
            left.append((start, end))
    return left


def measure(disjoint: Iterable[Interval]) -> float:
    return sum((end - start for start, end in disjoint), 0.0)


class MeasureExposure:
    """A region whose communication is timed; `exposure` is there when it has ended without error.

    Communication that has not ended with the region is not seen.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._exposure: Exposure | None = None

    @property
    def exposure(self) -> Exposure:
        assert self._exposure is not None, "the measured region has not ended"
        return self._exposure

    def __enter__(self) -> "MeasureExposure":
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or it writes to stderr at every use
        activities = [ProfilerActivity.CPU]
        if self._on_gpu:
            activities.append(ProfilerActivity.CUDA)
            torch.cuda.synchronize()
        self._profile = profile(activities=activities)
        self._profile.__enter__()
        with record_function(_MARK):
            pass
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._on_gpu and kind is None:
            torch.cuda.synchronize()
        self._profile.__exit__(kind, error, traceback)
        if kind is None:
            events = list(self._profile.events() or [])
            split = intervals_on_gpu if self._on_gpu else intervals_on_cpu
            self._exposure = exposed_and_overlapped(*split(events))
        del self._profile


def intervals_on_gpu(events: Iterable[Any]) -> tuple[list[Interval], list[Interval]]:
    """Communication and computation among the profiler's events of a GPU, in seconds.

    Annotations are spans around kernels, and copies occupy no multiprocessor: neither computes.
    """
    communication, computation = [], []
    for event in events:
        if event.device_type != DeviceType.CUDA or event.is_user_annotation:
            continue
        if event.name.startswith("nccl"):
            communication.append(_seconds(event))
        elif not event.name.startswith(("Memcpy", "Memset")):
            computation.append(_seconds(event))
    return communication, computation


def intervals_on_cpu(events: Iterable[Any]) -> tuple[list[Interval], list[Interval]]:
    """Communication and computation among the profiler's events of a CPU, in seconds.

    An operator on the result of a functional collective waits for that inside its own span, so only
    the operators called by it count, not itself.
    """
    events = list(events)
    [thread] = [event.thread for event in events if event.name == _MARK]
    waiting: set[int] = set()
    for event in events:
        caller = event.cpu_parent if event.name == _WAITING else None
        while caller is not None:
            waiting.add(id(caller))
            caller = caller.cpu_parent
    communication = [_seconds(event) for event in events if event.name.startswith("gloo:")]
    computation = [
        _seconds(event)
        for event in events
        if event.thread == thread and event.name.startswith("aten::") and id(event) not in waiting
    ]
    return communication, computation


def _seconds(event: Any) -> Interval:
    return event.time_range.start * 1e-6, event.time_range.end * 1e-6
