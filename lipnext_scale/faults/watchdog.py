"""A thread that notices when nothing happens any more, and ends the process with a report.

What it listens to are the beats of `lipnext_scale.heartbeat`. Training is one collective after
the other, so a rank that hangs makes all hang. Each has its own watchdog with the same patience,
and one that has been silent for half of it reports as soon as it sees the report of another. Nobody
ends before all have reported, or had the time to, since the end of one would end the others.
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
from pathlib import Path

import torch
import torch._C._distributed_c10d as c10d

from lipnext_scale.heartbeat import LIFE, beat

# --------------------------------------------------------------------------------------------------
# What ranks write when they hang: a file each, with the stacks of all threads.
#
# RUN/hangs/START/rank-3.txt first line: where it stands; then the stacks
# RUN/hangs/START/rank-3.flight torch's flight recorder: the last collectives, by rank

PACKAGE = Path(__file__).parents[1]
# There once somebody has spoken for all.
TOLD = ".told"
# Of the flight recorder: it may wait for a lock that somebody who hangs has.
PATIENCE = 5.0


class HangReports:
    """Those of all ranks of one start of a run."""

    def __init__(self, directory: Path, rank: int, world_size: int) -> None:
        self.directory, self.rank, self.world_size = directory, rank, world_size

    def write(self, silence: float, doing: str) -> None:
        """Ours; to stderr if there is no room for it on the disk."""
        first = f"rank {self.rank} ({socket.gethostname()}, process {os.getpid()}): "
        first += f"silent for {silence:.0f} s in {doing}, {place_of_main_thread()}"
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            aside = self.directory / f".rank-{self.rank}"
            with aside.open("w", encoding="utf-8") as file:
                print(first, file=file, flush=True)
                faulthandler.dump_traceback(file, all_threads=True)
            aside.rename(self._path(self.rank))
        except OSError:
            print(first, file=sys.stderr, flush=True)
            faulthandler.dump_traceback(sys.stderr, all_threads=True)
        recorder = threading.Thread(target=self._write_flight_record, daemon=True)
        recorder.start()
        recorder.join(PATIENCE)

    def _write_flight_record(self) -> None:
        """NCCL's own where it can be in use, or else that of the other backends."""
        names = ["_dump_fr_trace", "_dump_nccl_trace"]  # the first that this torch has
        for name in reversed(names) if torch.cuda.is_initialized() else names:
            dump = getattr(c10d, name, None)
            if dump is not None:
                path = self._path(self.rank).with_suffix(".flight")
                try:
                    path.write_bytes(dump())
                except (OSError, RuntimeError) as error:
                    print(f"{path}: {error}", file=sys.stderr)
                return

    def _path(self, rank: int) -> Path:
        return self.directory / f"rank-{rank}.txt"

    def _ranks(self) -> list[int]:
        names = [path.stem for path in self.directory.glob("rank-*.txt")]
        return sorted(int(name.removeprefix("rank-")) for name in names)

    def any_of_others(self) -> bool:
        return any(rank != self.rank for rank in self._ranks())

    def are_complete(self) -> bool:
        return len(self._ranks()) == self.world_size

    def note_told(self) -> None:
        (self.directory / TOLD).touch()

    def are_told(self) -> bool:
        return (self.directory / TOLD).exists()

    def is_ours_the_first(self) -> bool:
        """Whether this rank speaks for all; where nothing could be written, every one does."""
        return [self.rank] == (self._ranks() or [self.rank])[:1]

    def summary(self) -> str:
        """Who stands where, in one line."""
        places: dict[str, list[int]] = {}
        for rank in self._ranks():
            with self._path(rank).open(encoding="utf-8") as file:
                place = file.readline().strip().partition(": ")[2]
            places.setdefault(place, []).append(rank)
        told = [f"{_ranks_in_words(ranks)} {place}" for place, ranks in places.items()]
        if missing := sorted(set(range(self.world_size)) - set(self._ranks())):
            told.append(f"{_ranks_in_words(missing)}: no report, is it stopped or its host gone?")
        return f"hang: {'; '.join(told)}; stacks in {self.directory}"


def place_of_main_thread() -> str:
    """Its innermost line in this package, and what it called there."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    stack = traceback.extract_stack(frame)
    ours = [entry for entry in stack if Path(entry.filename).is_relative_to(PACKAGE)]
    if not ours:
        return "outside of this package"
    entry = ours[-1]
    return f"{Path(entry.filename).relative_to(PACKAGE)}:{entry.lineno} {entry.name}"


def _ranks_in_words(ranks: list[int]) -> str:
    """[0, 2, 3, 4] → ranks 0, 2-4."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and spans[-1][1] == rank - 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    words = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {words}"


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
