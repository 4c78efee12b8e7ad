"""Ctrl-C and SIGTERM as a wish to stop at the next safe moment."""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from signal import Signals
from types import FrameType

GRACE = 5.0
SIGNALS = (signal.SIGINT, signal.SIGTERM)


@dataclass
class StopWish:
    """The signal that asked for a stop, once one has."""

    signal: Signals | None = None
    since: float = 0.0


@contextmanager
def stop_wishes() -> Iterator[StopWish]:
    """Inside, the first signal is only noted; one after GRACE acts as it would have without us.

    Those in between are the same wish again: a launcher that is told to stop together with its
    processes passes it on to them.
    """
    wish = StopWish()
    if threading.current_thread() is not threading.main_thread():
        yield wish  # handlers belong to the main thread
        return
    previous = {number: signal.getsignal(number) for number in SIGNALS}

    def note(number: int, _frame: FrameType | None) -> None:
        if wish.signal is None:
            wish.signal, wish.since = Signals(number), time.monotonic()
        elif time.monotonic() - wish.since > GRACE:
            restore()
            signal.raise_signal(number)

    def restore() -> None:
        for number, handler in previous.items():
            signal.signal(number, handler)

    for number in SIGNALS:
        signal.signal(number, note)
    try:
        yield wish
    finally:
        restore()
