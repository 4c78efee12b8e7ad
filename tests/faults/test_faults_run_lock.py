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

from lipnext_scale.errors import UserError
from lipnext_scale.faults import run_lock
from lipnext_scale.faults.run_lock import RunLock
from lipnext_scale.trainer import Trainer

HOLDER = """
import os, sys, time
from pathlib import Path
from lipnext_scale.faults.run_lock import RunLock
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
    """The file of a holder whose process is not there."""
    told = {"host": "node7", "pid": 1, "started": "2026-01-02 03:04:05 +0000", "job": ""}
    directory.mkdir(exist_ok=True)
    path = directory / "lock"
    path.write_text(json.dumps({**told, **changes}))
    return path


@pytest.mark.slow
def test_a_second_run_is_refused_until_the_first_is_killed(tmp_path: Path) -> None:
    """The line names process, host and start; a kill frees it at once, whatever workers it left."""
    run = tmp_path / "run"
    with held_by_another(run) as process:
        with pytest.raises(UserError, match=rf"is in use by process {process.pid} on \S+, started"):
            Trainer(small_recipe(run))
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        Trainer(small_recipe(run, "run.max_steps=1")).run()


@pytest.mark.slow
def test_as_a_command(tmp_path: Path) -> None:
    """Exit code 2, one line, and the run directory as it was."""
    run = tmp_path / "run"
    with held_by_another(run):
        before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
        done = subprocess.run(
            [sys.executable, "-m", "lipnext_scale.train", *SETTINGS, f"run.dir={run}"],
            capture_output=True,
            text=True,
        )
        assert done.returncode == 2 and done.stderr.count("\n") == 1 and "in use by" in done.stderr
        assert before == {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}


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


def test_another_host_is_refused_where_it_is_alive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its next sign of life is waited for, and that is said; not for our own job."""
    monkeypatch.setattr(run_lock, "LOOK", 0.2)
    with alive(holder(tmp_path)):
        with pytest.raises(UserError, match=r"in use by process 1 on node7, started \S+ \S+ \S+$"):
            RunLock(tmp_path).require_free()
    assert capsys.readouterr().err.count("waiting up to 60 s for a sign of life\n") == 1
    monkeypatch.setenv("SLURM_JOB_ID", "42")
    with alive(holder(tmp_path, job="41")):
        with pytest.raises(UserError, match="job 41"):
            RunLock(tmp_path).require_free()
    holder(tmp_path, job="42")
    RunLock(tmp_path).require_free()
    assert capsys.readouterr().err.count("waiting") == 1


def test_another_host_that_was_killed_is_outwaited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next job of a chain starts at once on another node: it must not end as a mistake."""
    monkeypatch.setattr(run_lock, "STALE", 1.5)
    monkeypatch.setattr(run_lock, "LOOK", 0.1)
    holder(tmp_path)
    began = time.monotonic()
    lock = RunLock(tmp_path)
    lock.require_free()
    assert time.monotonic() - began > 1.0
    lock.take()
    assert json.loads((tmp_path / "lock").read_text())["pid"] == os.getpid()


def test_a_job_without_an_id_is_nobodys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun calls every such job `none`: on another host it may be any."""
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    RunLock(tmp_path).take()
    told = json.loads((tmp_path / "lock").read_text())
    assert told["job"] == ""
    monkeypatch.setattr(run_lock, "LOOK", 0.2)
    for job in ("", "none"):
        with alive(holder(tmp_path, job=job)):
            with pytest.raises(UserError, match="is in use by process 1 on node7"):
                RunLock(tmp_path).require_free()
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "node7-12-345")
    holder(tmp_path, job="node7-12-345")
    RunLock(tmp_path).require_free()


def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On our own host the holder's process is looked for; elsewhere its sign of life decides."""

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


def test_a_look_waits_for_another_look(tmp_path: Path) -> None:
    """The checks of several nodes may meet in one file; none takes the other for a run."""
    path = holder(tmp_path)
    path.write_text("")
    hold = "import fcntl, sys, time; f = open(sys.argv[1], 'a'); fcntl.lockf(f, fcntl.LOCK_EX); "
    hold += "print(flush=True); time.sleep(0.5)"
    with subprocess.Popen([sys.executable, "-c", hold, path], stdout=subprocess.PIPE) as looking:
        assert looking.stdout is not None and looking.stdout.readline()
        RunLock(tmp_path).require_free()


def test_a_holder_renews_its_sign_and_leaves_none_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_lock, "RENEW", 0.01)
    lock = RunLock(tmp_path)
    lock.take()
    os.utime(lock.path, (0, 0))
    deadline = time.monotonic() + 20
    while lock.path.stat().st_mtime == 0:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert json.loads(lock.path.read_text())["pid"] == os.getpid()
    lock.release()
    assert lock.path.read_text() == ""


def test_a_read_only_file_system_is_refused_at_once(tmp_path: Path) -> None:
    """Before the model is built; nothing is left behind."""
    with mounted(tmp_path, "ro") as done:
        if not done:
            pytest.skip("a file system cannot be mounted here")
        with pytest.raises(UserError, match=r"cannot be written: Read-only file system"):
            Trainer(small_recipe(tmp_path / "a" / "run"))
