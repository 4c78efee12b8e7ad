"""One run at a time in a directory; what cannot be written is refused before anything is built."""

import errno
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from small_disk import mounted
from training.small import SETTINGS, small_recipe

from lipnext_scale.config import run_directory
from lipnext_scale.config.run_directory import RunLock
from lipnext_scale.train import main
from lipnext_scale.training.trainer import Trainer
from lipnext_scale.utils.errors import UserError

HOLDER = """
import os, sys, time
from pathlib import Path
from lipnext_scale.config.run_directory import RunLock
lock = RunLock(Path(sys.argv[1])); lock.take()
if os.fork() == 0: time.sleep(60)   # a worker that outlives its rank
print(os.getpid(), flush=True)
time.sleep(60)
"""


@contextmanager
def held_by_another(directory: Path) -> Iterator[subprocess.Popen[str]]:
    directory.mkdir(exist_ok=True)
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(directory)],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None and process.stdout.readline()
        yield process
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def holder(directory: Path, **changes: str | int) -> Path:
    """The file of a holder whose process does not exist."""
    fields = {"host": "node7", "pid": 1, "started": "2026-01-02 03:04:05 +0000", "job": ""}
    path = directory / "lock"
    path.write_text(json.dumps({**fields, **changes}))
    return path


@pytest.mark.slow
def test_a_second_run_is_refused_until_the_first_is_killed(tmp_path, capsys):
    """One line names process, host and start, exit code 2, nothing is changed; a kill frees the
    directory at once, though a worker of the first run is left."""
    run = tmp_path / "run"
    with held_by_another(run) as process:
        before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
        with pytest.raises(SystemExit) as refused:
            main([*SETTINGS, f"run.dir={run}"])
        error = capsys.readouterr().err
        assert refused.value.code == 2 and error.count("\n") == 1
        assert f"is in use by process {process.pid} on " in error and ", started " in error
        assert before == {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        Trainer(small_recipe(run, "run.max_steps=1")).run()


@contextmanager
def alive(path: Path) -> Iterator[None]:
    """A holder on another host, whose lock is not seen here, renews its sign of life."""
    ended = threading.Event()

    def renew() -> None:
        while not ended.wait(0.1):
            os.utime(path)

    thread = threading.Thread(target=renew)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def test_another_host_is_refused_where_it_is_alive(tmp_path, monkeypatch, capsys):
    """It is watched until its next sign of life, and a line says so; not for our own job. torchrun
    calls every job without an id `none`: that is not ours."""
    monkeypatch.setattr(run_directory, "LOOK", 0.2)
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    for job in ("", "none"):
        with alive(holder(tmp_path, job=job)):
            with pytest.raises(UserError, match=r"in use by process 1 on node7, started \S+ \S+ "):
                RunLock(tmp_path).require_free()
    assert capsys.readouterr().err.count("waiting up to 60 s for a sign of life\n") == 2
    monkeypatch.setenv("SLURM_JOB_ID", "42")
    with alive(holder(tmp_path, job="41")):
        with pytest.raises(UserError, match="job 41"):
            RunLock(tmp_path).require_free()
    holder(tmp_path, job="42")
    RunLock(tmp_path).require_free()


def test_a_killed_holder_on_another_host_becomes_stale(tmp_path, monkeypatch):
    """The next job of a chain starts at once on another node: that is no mistake."""
    monkeypatch.setattr(run_directory, "STALE", 1.0)
    monkeypatch.setattr(run_directory, "RENEW", 0.01)
    monkeypatch.setattr(run_directory, "LOOK", 0.1)
    holder(tmp_path)
    began = time.monotonic()
    lock = RunLock(tmp_path)
    lock.require_free()
    assert time.monotonic() - began > 0.7
    lock.take()
    assert json.loads((tmp_path / "lock").read_text())["pid"] == os.getpid()
    os.utime(lock.path, (0, 0))
    deadline = time.monotonic() + 20
    while lock.path.stat().st_mtime == 0:  # it renews its sign of life
        assert time.monotonic() < deadline
        time.sleep(0.01)
    lock.release()
    assert lock.path.read_text() == ""


def test_a_file_system_without_locks(tmp_path, monkeypatch):
    """On our own host the holder's process decides; elsewhere its sign of life."""

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr("fcntl.lockf", refuse)
    ended = subprocess.Popen(["true"])
    ended.wait()
    holder(tmp_path, host=socket.gethostname(), pid=os.getppid())
    with pytest.raises(UserError, match=f"in use by process {os.getppid()}"):
        RunLock(tmp_path).require_free()
    holder(tmp_path, host=socket.gethostname(), pid=ended.pid)
    RunLock(tmp_path).require_free()


def test_a_check_waits_for_another_check(tmp_path):
    """The checks of several nodes may meet in one file; none takes the other for a run."""
    (tmp_path / "lock").write_text("")
    hold = "import fcntl, sys, time; f = open(sys.argv[1], 'a'); fcntl.lockf(f, fcntl.LOCK_EX); "
    hold += "print(flush=True); time.sleep(0.5)"
    command = [sys.executable, "-c", hold, tmp_path / "lock"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None and other.stdout.readline()
        RunLock(tmp_path).require_free()


def test_a_read_only_file_system_is_refused_at_once(tmp_path):
    """Before the model is built; nothing is left behind."""
    with mounted(tmp_path, "ro") as done:
        if not done:
            pytest.skip("a file system cannot be mounted here")
        with pytest.raises(UserError, match=r"cannot be written: Read-only file system"):
            Trainer(small_recipe(tmp_path / "a" / "run"))
