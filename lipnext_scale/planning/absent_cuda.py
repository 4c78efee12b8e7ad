"""torch.cuda of a node with GPUs that are not there: streams and events are only written down."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch

from lipnext_scale.planning.ledger import Ledger
from lipnext_scale.planning.times import Device


def install(ledger: Ledger, device: Device) -> None:
    """ledger: gets every event, and where a stream or the host waits for one."""

    class Event:
        def __init__(self, *_: Any, **__: Any) -> None:
            self.number = 0

        def record(self, stream: Any = None) -> None:
            ledger.events += 1
            self.number = ledger.events
            on = ledger.stream if stream is None else stream.stream_id
            ledger.note("record", "event", event=self.number, stream=on)

        def wait(self, stream: Any = None) -> None:
            (current() if stream is None else stream).wait_event(self)

        def query(self) -> bool:
            return True

        def synchronize(self) -> None:
            ledger.note("wait", "event synchronize", event=self.number)

    class Stream:
        device, device_index, device_type = torch.device("cuda", 0), 0, 1
        count = 0

        def __init__(self, *_: Any, **__: Any) -> None:
            Stream.count += 1
            self.stream_id = Stream.count

        def wait_stream(self, stream: Any) -> None:
            self.wait_event(stream.record_event())

        def wait_event(self, event: Any) -> None:
            ledger.note("stream_wait", "event", event=event.number, stream=self.stream_id)

        def record_event(self, event: Event | None = None) -> Event:
            event = event or Event()
            event.record(self)
            return event

        def query(self) -> bool:
            return True

        def synchronize(self) -> None:
            ledger.note("wait", "stream synchronize", stream=self.stream_id)

        def __enter__(self) -> "Stream":
            return self

        def __exit__(self, *_: Any) -> None: ...

    def current(device: Any = None) -> Any:
        found = Stream.__new__(Stream)
        found.stream_id = ledger.stream
        return found

    @contextmanager
    def stream(entered: Any) -> Iterator[None]:
        before = ledger.stream
        ledger.stream = before if entered is None else entered.stream_id
        try:
            yield
        finally:
            ledger.stream = before

    torch.Tensor.record_stream = lambda tensor, stream: None  # type: ignore[assignment]
    _replace(
        device,
        Event=Event,
        Stream=Stream,
        stream=stream,
        synchronize=lambda device=None: ledger.note("wait", "device synchronize"),
        current_stream=current,
        default_stream=current,
    )


def _replace(device: Device, **names: Any) -> None:
    major, minor = device.capability
    constants: dict[str, Any] = {
        "_lazy_init": None,
        "current_device": 0,
        "device_count": 8,
        "get_device_capability": device.capability,
        "get_device_name": device.title,
        "get_device_properties": SimpleNamespace(
            major=major, minor=minor, total_memory=device.memory
        ),
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
