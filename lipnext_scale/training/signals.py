"""Ctrl-C, SIGTERM and SIGUSR1 as a request to stop at the next step.

SIGUSR1 is what Slurm sends before a job's time is over (launch/*.slurm): the run saves and exits
with code 0, so that no launcher starts it again, and asks for a requeue in its directory.
"""

import signal
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from signal import Signals
from types import FrameType

GRACE = 5.0
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


@dataclass
class StopRequest:
    """The signal that asked for a stop, if one has."""

    signal: Signals | None = None
    since: float = 0.0


@contextmanager
def stop_requests(
    request: StopRequest | None = None, signals: Iterable[Signals] = SIGNALS
) -> Iterator[StopRequest]:
    """Inside, the first signal is only noted; one that comes after GRACE has its usual effect.

    Those in between are the same request again: a launcher that is stopped together with its
    processes passes the signal on to them. SIGUSR1 never has its usual effect, however often it
    comes, and another signal after it counts as the first.
    request: where to note it; it may hold an earlier signal already.
    """
    request = request or StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request  # only the main thread can set handlers
        return
    previous = {number: signal.getsignal(number) for number in signals}

    def note(number: int, _frame: FrameType | None) -> None:
        if request.signal is None or (request.signal == signal.SIGUSR1 != number):
            request.signal, request.since = Signals(number), time.monotonic()
        elif number != signal.SIGUSR1 and time.monotonic() - request.since > GRACE:
            restore()
            signal.raise_signal(number)

    def restore() -> None:
        for number, handler in previous.items():
            signal.signal(number, handler)

    for number in previous:
        signal.signal(number, note)
    try:
        yield request
    finally:
        restore()
