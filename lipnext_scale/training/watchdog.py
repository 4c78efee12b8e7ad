"""Hangs: every rank writes where it stands, and ends with exit code 75.

Training is one collective after the other, so a rank that hangs makes all hang. A small thread on
each looks at the heartbeats of `utils.progress`, waits for the reports of the other ranks (the end
of one rank ends all) and sets the exit code. Where a library holds the GIL the thread stands still,
but faulthandler's timer writes the stacks all the same, and the other ranks end the run.
"""

import faulthandler
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import torch
import torch._C._distributed_c10d as c10d

from lipnext_scale.utils.progress import LIFE, beat

PACKAGE = Path(__file__).parents[1]
HANG_EXIT_CODE = 75  # "try again later" in sysexits.h, used for nothing else here
SLOW = 6  # starts, checkpoints and first passes, which may compile, get so many times the patience
REPORTING = 60.0  # seconds for a report
NAMED = 8  # ranks at one place that the summary names


def collective_timeout(hang_timeout: float) -> float | None:
    """For torch, in seconds: longer than the watchdog waits, which reports more.

    Never below the half hour that torch has for gloo: starts are not watched, and need it.
    """
    return max(1800.0, 2 * SLOW * hang_timeout) if hang_timeout else None


@contextmanager
def watching(timeout: float, directory: Path, rank: int, world_size: int) -> Iterator[None]:
    """directory: the same for all ranks, of this start alone. timeout 0: no watchdog."""
    beat("the first step", slow=True)
    if not timeout:
        yield
        return
    watchdog = Watchdog(timeout, directory, rank, world_size)
    watchdog.set_timer(SLOW * timeout)
    watchdog.start()
    try:
        yield
    finally:
        watchdog.stop()


def clear_empty_reports(hangs: Path) -> None:
    """Remove the reports without content that killed processes left."""
    for report in hangs.glob("*/*"):
        if not report.stat().st_size:
            report.unlink()
    for start in hangs.glob("*"):
        with suppress(OSError):  # it has reports
            start.rmdir()


class Watchdog(threading.Thread):
    def __init__(self, timeout: float, directory: Path, rank: int, world_size: int) -> None:
        super().__init__(name="watchdog", daemon=True)
        self._timeout, self._poll = timeout, min(5.0, timeout / 20)
        self._directory, self._rank, self._world_size = directory, rank, world_size
        self._stopped = threading.Event()
        directory.mkdir(parents=True, exist_ok=True)
        # Open from the start: faulthandler cannot open it while the GIL is held.
        self._path = directory / f"rank-{rank}.txt"
        self._file = self._path.open("a", encoding="utf-8")

    def run(self) -> None:
        heard, silence, before = -1, 0.0, time.monotonic()
        while not self._stopped.wait(self._poll):
            now = time.monotonic()
            # Time in which this process was stopped (SIGSTOP, a suspended job) does not count.
            silence += min(now - before, 2 * self._poll)
            before = now
            allowed = self._timeout * (SLOW if LIFE.slow else 1)
            if LIFE.beats != heard:
                heard, silence = LIFE.beats, 0.0
                self.set_timer(allowed)
            if silence > allowed or (silence > allowed / 2 and self._others_reported()):
                _within(REPORTING, partial(self._report, silence))
                os._exit(HANG_EXIT_CODE)  # other threads hang: they cannot be ended in order

    def set_timer(self, allowed: float) -> None:
        if os.fstat(self._file.fileno()).st_size:  # the timer went off after a stop of the process
            self._file.truncate(0)
        faulthandler.dump_traceback_later(allowed + 2 * self._poll, file=self._file)

    def stop(self) -> None:
        """Leave no empty report behind."""
        self._stopped.set()
        self.join()
        faulthandler.cancel_dump_traceback_later()
        self._file.close()
        with suppress(OSError):  # the directories are not empty while other ranks go on
            self._path.unlink()
            self._directory.rmdir()
            self._directory.parent.rmdir()

    def _report(self, silence: float) -> None:
        faulthandler.cancel_dump_traceback_later()
        who = f"rank {self._rank} on {socket.gethostname()}, process {os.getpid()}"
        try:
            print(f"{who}, silent for {silence:.0f} s: {standing()}", file=self._file, flush=True)
            faulthandler.dump_traceback(self._file, all_threads=True)
        except OSError:  # the disk is full
            faulthandler.dump_traceback(all_threads=True)
        deadline = time.monotonic() + max(10.0, 4 * self._poll)
        while len(self._reported()) < self._world_size and time.monotonic() < deadline:
            time.sleep(min(self._poll, 0.2))
        if self._rank == min(self._reported()):
            print(f"failed: {self._summary()}", file=sys.stderr, flush=True)
        self._write_flight_record()
        time.sleep(1)  # others may still write, and our end ends them

    def _reported(self) -> set[int]:
        """The ranks that have written a report."""
        found = set()
        for rank in range(self._world_size):
            with suppress(FileNotFoundError):
                if (self._directory / f"rank-{rank}.txt").stat().st_size:
                    found.add(rank)
        return found

    def _others_reported(self) -> bool:
        found: set[int] = set()
        _within(self._poll, lambda: found.update(self._reported()))
        return bool(found - {self._rank})

    def _summary(self) -> str:
        """Where each rank stands, in one line."""
        places: dict[str, list[str]] = {}
        for rank in range(self._world_size):
            path = self._directory / f"rank-{rank}.txt"
            first = path.read_text(encoding="utf-8").partition("\n")[0] if path.exists() else ""
            place = first.partition(": ")[2]
            if not place:
                held = "its stacks only: a library holds the GIL"
                place = held if first else "no report: is it stopped, or its host gone?"
            places.setdefault(place, []).append(str(rank))
        words = []
        for place, ranks in places.items():
            more = " …" if len(ranks) > NAMED else ""
            words.append(f"rank {', '.join(ranks[:NAMED])}{more}: {place}")
        return f"hang: {'; '.join(words)}; stacks in {self._directory}"

    def _write_flight_record(self) -> None:
        """NCCL's where it can be in use, or that of the other backends, which not every torch has.
        Last: it may wait for a lock that a thread that hangs has."""
        name = "_dump_nccl_trace" if torch.cuda.is_initialized() else "_dump_fr_trace"
        with suppress(OSError, RuntimeError, AttributeError):
            self._path.with_suffix(".flight").write_bytes(getattr(c10d, name)())


def _within(seconds: float, action: Callable[[], object]) -> None:
    """Do it, but wait no longer: the file system may be what hangs."""
    thread = threading.Thread(target=action, daemon=True)
    thread.start()
    thread.join(seconds)


def standing() -> str:
    """What is under way, and the main thread's innermost line in this package."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    for entry in reversed(traceback.extract_stack(frame)):
        if Path(entry.filename).is_relative_to(PACKAGE):
            place = f"{Path(entry.filename).relative_to(PACKAGE)}:{entry.lineno} {entry.name}"
            return f"{LIFE.doing}, {place}"
    return LIFE.doing
