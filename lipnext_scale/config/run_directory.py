"""The layout of a run directory, and the lock that keeps other runs out of it."""

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

from lipnext_scale.checkpoint import latest_checkpoint
from lipnext_scale.checkpoint.exports import DataFacts, load_checkpoint_model
from lipnext_scale.config.recipe import CHANGEABLE, Recipe, load_recipe
from lipnext_scale.models import LipNeXt
from lipnext_scale.utils import config as configuration
from lipnext_scale.utils.config import ConfigError
from lipnext_scale.utils.errors import UserError
from lipnext_scale.utils.files import nearest_existing, write_atomically


class RunDirectory:
    """config.yaml, metrics.jsonl, tensorboard/, checkpoints/, and what certification adds."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.config = self.path / "config.yaml"
        self.metrics = self.path / "metrics.jsonl"
        self.tensorboard = self.path / "tensorboard"
        self.wandb_id = self.path / "wandb_id"
        self.checkpoints = self.path / "checkpoints"
        self.summary = self.path / "summary.png"
        self.profile = self.path / "profile"
        self.checked_shards = self.path / "checked_shards.txt"
        self.bad_samples = self.path / "bad_samples.txt"
        self.classes = self.path / "classes.json"
        # Exists after SIGUSR1 has stopped the run, until it continues.
        self.requeue = self.path / "requeue"
        self.hangs = self.path / "hangs"
        self.lock = RunLock(self.path)
        self.certificate = self.path / "certificate.json"
        self.samples = self.path / "samples.csv"
        self.report = self.path / "report.html"
        self.attack = self.path / "attack.json"
        self.curve_picture = self.path / "cra.png"
        self.examples_picture = self.path / "examples.png"

    def require_free_or_same(self, recipe: Recipe) -> None:
        """The directory is new, or holds this run and no other process continues it."""
        try:
            self.require_new_or_same(recipe)
            self.lock.require_free()
        except OSError as error:
            raise self._not_writable(error) from None

    def require_new_or_same(self, recipe: Recipe) -> None:
        there = self.recipe() if self.config.exists() else recipe
        changed = configuration.differences(there, recipe)
        changed = {key: pair for key, pair in changed.items() if key not in CHANGEABLE}
        backbone = {key for key in changed if key.startswith("model.")} - {"model.num_classes"}
        way = "" if backbone else f", with run.init_from={self.path} to start from its weights,"
        for key, (old, new) in changed.items():
            raise UserError(
                f"run.dir = {str(self.path)!r}: holds a run with another configuration ({key} "
                f"= {old!r} there, {new!r} here); choose another run.dir{way} or remove it"
            )

    def open_for(
        self, recipe: Recipe, checked_shards: list[str], classes: tuple[str, ...] = ()
    ) -> None:
        """Take the lock; write the resolved configuration, which shards were checked, and the names
        of the classes."""
        try:
            self.checkpoints.mkdir(parents=True, exist_ok=True)
            self.lock.take()
            write_atomically(self.config, configuration.dump(recipe).encode())
            self.requeue.unlink(missing_ok=True)
            if checked_shards:
                write_atomically(self.checked_shards, "\n".join(checked_shards).encode())
            if classes:
                write_atomically(self.classes, json.dumps(classes).encode())
        except OSError as error:
            raise self._not_writable(error) from None

    def intact_files(self) -> frozenset[str]:
        """Stamps of shards and indexes that earlier starts of the run found intact."""
        try:
            return frozenset(self.checked_shards.read_text("utf-8").splitlines())
        except (OSError, ValueError):  # it does not exist, or is damaged: all are checked again
            return frozenset()

    def ask_for_requeue(self, reason: str) -> None:
        """For the job script, which cannot tell a stop from a finished run by its exit code."""
        try:
            write_atomically(self.requeue, f"{reason}\n".encode())
        except OSError as error:
            raise UserError(
                f"{reason}, but no requeue can be asked for: {self.requeue}: {error.strerror}"
            ) from None

    def _not_writable(self, error: OSError) -> UserError:
        return UserError(f"run.dir = {str(self.path)!r}: cannot be written: {error.strerror}")

    def recipe(self) -> Recipe:
        """The configuration of the run that is here."""
        if not self.path.exists():
            raise UserError(f"{self.path}: no such run directory")
        if not self.config.is_file():
            raise UserError(f"{self.path}: is not a run directory (it has no {self.config.name})")
        try:
            return load_recipe(str(self.config))
        except ConfigError as error:
            raise UserError(f"{self.config}: {error}") from None

    def data_facts(self) -> DataFacts:
        """What an export says of the data; runs of sets without class names have no classes.json"""
        names = ()
        if self.classes.is_file():
            names = tuple(json.loads(self.classes.read_bytes()))
        return DataFacts(self.recipe().data.test_resize, names)

    def load_model(self, checkpoint: Path | None = None) -> LipNeXt:
        """The slow weights of the newest checkpoint, or of a given one."""
        return load_checkpoint_model(self.recipe().model, checkpoint or self.newest_checkpoint())

    def newest_checkpoint(self) -> Path:
        path = latest_checkpoint(self.checkpoints)
        if path is None:
            raise UserError(f"{self.path}: has no checkpoint yet")
        return path


# --------------------------------------------------------------------------------------------------
# One run at a time in a run directory.
#
# Rank 0 keeps `lock` locked by the system (fcntl). Such a lock ends with the process, however that
# ends, and its workers do not inherit it: on one machine it is never stale. Network file systems
# may not carry it from host to host. So the file also names its holder, who renews its mtime. A
# holder on another host is watched until it renews the mtime, or until that is STALE seconds old.

RENEW, STALE = 15.0, 60.0  # seconds
PATIENCE = 2.0  # others may hold it for a moment, such as the checks of all nodes before a start
LOOK = 1.0  # between looks at a holder on another host
_JOB_VARIABLES = ("SLURM_JOB_ID", "TORCHELASTIC_RUN_ID")


class RunLock:
    """Of rank 0, for the life of its process or until `release`."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.path = directory, directory / "lock"
        self._file: TextIO | None = None
        self._released = threading.Event()

    def require_free(self) -> None:
        """Refuse a directory that is in use; an OSError where nothing can be written."""
        tempfile.TemporaryFile(dir=nearest_existing(self.directory)).close()
        if self.path.exists():
            self._file = self._lock()

    def take(self) -> None:
        """Make us the holder, in a directory that exists."""
        if self._file is None:
            self._file = self._lock()
        self._file.seek(0)
        self._file.truncate()
        json.dump(_ourselves(), self._file)
        self._file.flush()
        threading.Thread(target=self._renew, name="run lock", daemon=True).start()

    def release(self) -> None:
        """Another process may take it, on any host and at once."""
        self._released.set()
        if self._file is not None:
            # On a disk that fails, others wait until the mtime is old.
            with suppress(OSError):
                self._file.truncate(0)
            with suppress(OSError):
                self._file.close()
            self._file = None

    def _lock(self) -> TextIO:
        first_seen = None  # mtime of the file of a holder on another host
        while True:
            file = self.path.open("a+", encoding="utf-8")  # again: NFS then asks for the mtime
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
            if holder["host"] == socket.gethostname() or first_seen not in (None, seen):
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
            with suppress(OSError):  # it passes, or the run meets it by itself
                os.utime(self.path)


def _lock_soon(file: TextIO) -> bool:
    """False where the file system has no locks: then only the mtime decides."""
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
    """The holder; empty after a release, and for anything that is no holder."""
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) and found.keys() == _ourselves().keys() else {}


def _is_ended_or_ours(holder: dict[str, Any], locked: bool) -> bool:
    """On our own host the system knows; a job may move its rank 0 to another host."""
    ours = _ourselves()
    if holder["host"] == ours["host"]:
        return locked or holder["pid"] == ours["pid"] or not Path(f"/proc/{holder['pid']}").exists()
    return bool(ours["job"]) and holder["job"] == ours["job"]
