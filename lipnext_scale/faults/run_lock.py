"""One run at a time in a run directory.

The first process keeps `lock` locked by the system (fcntl). Such a lock ends with the process,
however that ends, and is not inherited by its workers: on one machine it is never stale. Network
file systems may not carry it from host to host. So the file also names its holder, who renews its
time. Whether a holder on another host is alive is seen by waiting: until its next sign of life, or
until the last one is STALE seconds old.
"""

import errno
import fcntl
import json
import os
import socket
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from lipnext_scale.errors import UserError
from lipnext_scale.files import nearest_existing

RENEW, STALE = 15.0, 60.0  # seconds
# Others may just be looking, such as the checks of all nodes before a start.
PATIENCE = 2.0
LOOK = 1.0  # seconds between looks at a holder on another host
_JOB_VARIABLES = ("SLURM_JOB_ID", "TORCHELASTIC_RUN_ID")


class RunLock:
    """Of the first process, for its life or until `release`."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.path = directory, directory / "lock"
        self._file: TextIO | None = None
        self._released = threading.Event()

    def require_free(self) -> None:
        """Refuse a directory that is in use or cannot be written; change nothing in it."""
        if obstacle := _obstacle(nearest_existing(self.directory)):
            raise UserError(f"run.dir = {str(self.directory)!r}: cannot be written: {obstacle}")
        if self.path.exists():
            self._file = self._lock()

    def take(self) -> None:
        """Make us the holder, in a directory that is there."""
        if self._file is None:
            self._file = self._lock()
        self._file.seek(0)
        self._file.truncate()
        json.dump(_ourselves(), self._file)
        self._file.flush()
        threading.Thread(target=self._renew, name="run lock", daemon=True).start()

    def release(self) -> None:
        """Another may take it, from any host and at once."""
        self._released.set()
        if self._file is not None:
            # On a disk that fails, others will wait until our last sign of life is old.
            with suppress(OSError):
                self._file.truncate(0)
            with suppress(OSError):
                self._file.close()
            self._file = None

    def _lock(self) -> TextIO:
        first_seen = None  # the time of the sign of life of a holder on another host
        while True:
            file = self.path.open("a+", encoding="utf-8")  # anew: its time is not a cached one then
            file.seek(0)
            holder = _parse(file.read())
            try:
                locked = _lock_soon(file)
            except (BlockingIOError, PermissionError):
                file.close()
                raise self._in_use(holder) from None
            silence, seen = self._silence(), os.fstat(file.fileno()).st_mtime_ns
            if not holder or silence >= STALE or _is_ended_or_ours(holder, locked):
                return file
            file.close()  # others may look meanwhile
            if _is_here(holder) or first_seen not in (None, seen):
                raise self._in_use(holder)
            if first_seen is None:
                wait = f"it may be dead: waiting up to {STALE - silence:.0f} s for a sign of life"
                print(f"{self._in_use(holder)}; {wait}", file=sys.stderr, flush=True)
            first_seen = seen
            time.sleep(LOOK)

    def _in_use(self, holder: dict[str, Any]) -> UserError:
        who = "another process that is just starting"
        if holder:
            who = "process {pid} on {host}, started {started}".format(**holder)
            who += f" (job {holder['job']})" if holder["job"] else ""
        return UserError(f"run.dir = {str(self.directory)!r}: is in use by {who}")

    def _silence(self) -> float:
        """Seconds since the file was renewed, by the clock of its file system."""
        with tempfile.NamedTemporaryFile(dir=self.directory, prefix=".now-") as now:
            return os.fstat(now.fileno()).st_mtime - self.path.stat().st_mtime

    def _renew(self) -> None:
        while not self._released.wait(RENEW):
            try:
                os.utime(self.path)
            except OSError:  # for a moment, or the run will meet it by itself
                continue


def _lock_soon(file: TextIO) -> bool:
    """False where the file system has no locks: the sign of life is all there is."""
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except (BlockingIOError, PermissionError):
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
        except OSError:
            return False


def _ourselves() -> dict[str, Any]:
    jobs = [os.environ[name] for name in _JOB_VARIABLES if os.environ.get(name, "none") != "none"]
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "started": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "job": jobs[0] if jobs else "",
    }


def _parse(text: str) -> dict[str, Any]:
    """The holder; empty after a release, and for whatever is no holder."""
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) and found.keys() == _ourselves().keys() else {}


def _is_ended_or_ours(holder: dict[str, Any], locked: bool) -> bool:
    """On our own host the system tells; a job may move its first process."""
    ours = _ourselves()
    if _is_here(holder):
        return locked or holder["pid"] == ours["pid"] or not _is_alive(holder["pid"])
    return bool(ours["job"]) and holder["job"] == ours["job"]


def _is_here(holder: dict[str, Any]) -> bool:
    return bool(holder["host"] == socket.gethostname())


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _obstacle(directory: Path) -> str:
    """Why nothing can be made in an existing directory; empty if it can."""
    if not directory.is_dir():
        return os.strerror(errno.ENOTDIR)
    if os.statvfs(directory).f_flag & os.ST_RDONLY:
        return os.strerror(errno.EROFS)
    return "" if os.access(directory, os.W_OK | os.X_OK) else os.strerror(errno.EACCES)
