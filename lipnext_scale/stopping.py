"""Ctrl-C, SIGTERM and SIGUSR1 as a request to stop at the next safe moment.

SIGUSR1 is what Slurm sends before a job's time is over (launch/*.slurm): the run saves and leaves
as if it had finished, so that no launcher starts it again, and asks for a requeue in its directory.
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
    """The signal that asked for a stop, once one has."""

    signal: Signals | None = None
    since: float = 0.0


@contextmanager
def stop_requests(
    request: StopRequest | None = None, signals: Iterable[Signals] = SIGNALS
) -> Iterator[StopRequest]:
    """Inside, the first signal is only noted; one after GRACE acts as it would have without us.

    Those in between are the same request again: a launcher that is told to stop together with its
    processes passes it on to them. SIGUSR1 never acts: it is a warning, however often it comes,
    and another signal after it is a first one.
    request: where to note it; one that was noted there before counts.
    """
    request = request or StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request  # handlers belong to the main thread
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
