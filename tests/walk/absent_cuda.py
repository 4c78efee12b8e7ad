"""torch.cuda of a node with eight H100s that are not there: streams and events do nothing."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch

NAME = "NVIDIA H100 80GB HBM3"


def install(wait: Callable[[str], None]) -> None:
    """wait: called where the host waits for a stream, an event or the device."""

    class Event:
        def __init__(self, *_: Any, **__: Any) -> None: ...

        def record(self, stream: Any = None) -> None: ...

        def wait(self, stream: Any = None) -> None: ...  # a stream waits, not the host

        def query(self) -> bool:
            return True

        def synchronize(self) -> None:
            wait("event synchronize")

    class Stream:
        device, device_index, device_type, stream_id = torch.device("cuda", 0), 0, 1, 0

        def __init__(self, *_: Any, **__: Any) -> None: ...

        def wait_stream(self, stream: Any) -> None: ...

        def wait_event(self, event: Any) -> None: ...

        def record_event(self, event: Event | None = None) -> Event:
            return event or Event()

        def query(self) -> bool:
            return True

        def synchronize(self) -> None:
            wait("stream synchronize")

        def __enter__(self) -> "Stream":
            return self

        def __exit__(self, *_: Any) -> None: ...

    @contextmanager
    def stream(_: Any) -> Iterator[None]:
        yield

    only = Stream()
    torch.Tensor.record_stream = lambda tensor, stream: None  # type: ignore[assignment]
    _replace(
        Event=Event,
        Stream=Stream,
        stream=stream,
        synchronize=lambda device=None: wait("device synchronize"),
        current_stream=lambda device=None: only,
        default_stream=lambda device=None: only,
    )


def _replace(**names: Any) -> None:
    constants = {
        "_lazy_init": None,
        "current_device": 0,
        "device_count": 8,
        "get_device_capability": (9, 0),
        "get_device_name": NAME,
        "get_device_properties": SimpleNamespace(major=9, minor=0, total_memory=80 << 30),
        "is_available": True,
        "is_initialized": True,
        "max_memory_allocated": 0,
        "max_memory_reserved": 0,
        "memory_allocated": 0,
        "memory_stats": {},
        "reset_peak_memory_stats": None,
        "set_device": None,
    }
    names |= {name: lambda *_, value=value, **__: value for name, value in constants.items()}
    for name, value in names.items():
        setattr(torch.cuda, name, value)
