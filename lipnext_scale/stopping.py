"""Ctrl-C and SIGTERM as a wish to stop at the next safe moment."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from signal import Signals
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)


@dataclass
class StopWish:
    """The signal that asked for a stop, once one has."""

    signal: Signals | None = None


@contextmanager
def stop_wishes() -> Iterator[StopWish]:
    """Inside, the first signal is only noted; a second one acts as it would have without us."""
    wish = StopWish()
    if threading.current_thread() is not threading.main_thread():
        yield wish  # handlers belong to the main thread
        return
    previous = {number: signal.getsignal(number) for number in SIGNALS}

    def note(number: int, _frame: FrameType | None) -> None:
        wish.signal = Signals(number)
        restore()

    def restore() -> None:
        for number, handler in previous.items():
            signal.signal(number, handler)

    for number in SIGNALS:
        signal.signal(number, note)
    try:
        yield wish
    finally:
        restore()
