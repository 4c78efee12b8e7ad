"""A thread that notices when nothing happens any more, and ends the process with a report.

What it listens to are the beats of `lipnext_scale.heartbeat`. Training is one collective after
the other, so a rank that hangs makes all hang. Each has its own watchdog with the same patience,
and one that has been silent for half of it reports as soon as it sees the report of another. Nobody
ends before all have reported, or had the time to, since the end of one would end the others.
"""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from lipnext_scale.faults.hang_report import PATIENCE, HangReports
from lipnext_scale.heartbeat import LIFE, beat

# "Try again later" in sysexits.h, which nothing else here ends with.
HANG_EXIT_CODE = 75
# Starts, checkpoints and first passes, which may compile, get so many times the patience.
SLOW = 6
# Seconds for a report, with the wait for those of others.
REPORTING = 90.0


def collective_timeout(hang_timeout: float) -> float | None:
    """For torch, in seconds: beyond all that the watchdog allows, for it has more to say.

    Never below the half hour that torch has for gloo: starts are not watched, and need it.
    """
    return max(1800.0, 2 * SLOW * hang_timeout) if hang_timeout else None


class Watchdog(threading.Thread):
    def __init__(self, timeout: float, reports: HangReports) -> None:
        super().__init__(name="watchdog", daemon=True)
        self._timeout, self._reports = timeout, reports
        self._poll = min(5.0, timeout / 20)
        self._stopped = threading.Event()

    def run(self) -> None:
        heard, silence, before = LIFE.beats, 0.0, time.monotonic()
        while not self._stopped.wait(self._poll):
            now = time.monotonic()
            # A process that was stopped (SIGSTOP, a suspended job) was not silent meanwhile.
            silence += min(now - before, 2 * self._poll)
            before = now
            if LIFE.beats != heard:
                heard, silence = LIFE.beats, 0.0
            allowed = self._timeout * (SLOW if LIFE.slow else 1)
            if silence > allowed or (silence > allowed / 2 and self._others_report()):
                self._end(silence)

    def _others_report(self) -> bool:
        found: list[bool] = []
        _within(self._poll, lambda: found.append(self._reports.any_of_others()))
        return any(found)

    def _end(self, silence: float) -> None:
        _within(REPORTING, lambda: self._report(silence))
        os._exit(HANG_EXIT_CODE)  # the other threads hang: nothing can be ended in order

    def _report(self, silence: float) -> None:
        self._reports.write(silence, LIFE.doing)
        self._wait_until(self._reports.are_complete)
        if self._reports.is_ours_the_first():
            print(f"failed: {self._reports.summary()}", file=sys.stderr)
            self._reports.note_told()
        else:
            self._wait_until(self._reports.are_told)  # our end would end the one who speaks
        sys.stdout.flush()
        sys.stderr.flush()

    def _wait_until(self, happened: Callable[[], bool]) -> None:
        deadline = time.monotonic() + max(2 * PATIENCE, 3 * self._poll)
        while not happened() and time.monotonic() < deadline:
            time.sleep(min(self._poll, 0.2))

    def stop(self) -> None:
        self._stopped.set()
        self.join()


def _within(seconds: float, action: Callable[[], object]) -> None:
    """Do it, but wait no longer: what hangs may be the file system that we report to."""

    def attempt() -> None:
        with suppress(OSError):
            action()

    thread = threading.Thread(target=attempt, daemon=True)
    thread.start()
    thread.join(seconds)


@contextmanager
def watching(timeout: float, directory: Path, rank: int, world_size: int) -> Iterator[None]:
    """directory: the same for all ranks, and of this start of theirs alone. timeout 0: nothing."""
    beat("the first step", slow=True)
    if not timeout:
        yield
        return
    watchdog = Watchdog(timeout, HangReports(directory, rank, world_size))
    watchdog.start()
    try:
        yield
    finally:
        watchdog.stop()
