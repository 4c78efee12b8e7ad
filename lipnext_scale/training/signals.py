"""Ctrl-C, SIGTERM and SIGUSR1 as a request to stop at the next step.

SIGUSR1 is what Slurm sends before a job's time is over (launch/*.slurm): the run saves and exits
with code 0, so that no launcher starts it again, and asks for a requeue in its directory.
"""

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from signal import Signals
from types import FrameType

GRACE = 5.0
# Seconds that the main thread may be inside one call: longer than a step on a GPU, which it waits
# for, and shorter than the 30 that torchrun and Slurm give a process.
BLOCKED = 20.0
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
        with _ending_blocked(request, previous.keys() & {signal.SIGINT, signal.SIGTERM}):
            yield request
    finally:
        restore()


@contextmanager
def _ending_blocked(request: StopRequest, stops: set[Signals]) -> Iterator[None]:
    """End the process where one of `stops` comes and the main thread never gets to note it.

    It may wait in a collective of NCCL for a process that has died; Python runs handlers only after
    that. The system's own handler writes the signal to a socket, which a thread reads.
    """
    ours, systems = socket.socketpair()
    systems.setblocking(False)
    left = threading.Event()

    def end_if_blocked() -> None:
        with ours:
            while received := ours.recv(1):
                number = received[0]
                if number in stops and not left.wait(BLOCKED) and request.signal not in stops:
                    why = f"nothing else happened for {BLOCKED:.0f} s: is another process gone?"
                    print(f"{Signals(number).name}, and {why}", file=sys.stderr, flush=True)
                    os._exit(128 + number)  # as Stopped; nothing can be saved or closed

    threading.Thread(target=end_if_blocked, name="signals", daemon=True).start()
    before = signal.set_wakeup_fd(systems.fileno(), warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        left.set()
        systems.close()


# A child would write its own signals to our socket.
os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))
