"""Slurm's signals to a node's task alone: launch/shared/node.sh."""

import os
import re
import signal
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest
from distributed.launch_commands import steps_logged
from launched_runs import ROOT, SETTINGS, environment
from slurm_cluster import wait_until
from training.small import final_state

pytestmark = pytest.mark.slow
NODE = str(ROOT / "launch" / "shared" / "node.sh")
ENDLESS = ["optim.epochs=100000"]
VARIABLES = {
    "LIPNEXT_ROOT": str(ROOT),
    "LIPNEXT_NODES": "1",
    "LIPNEXT_ADDRESSES": "127.0.0.1",
    "LIPNEXT_HEAD_PORT": "0",
    "LIPNEXT_RUN_ID": "signals",
    "LIPNEXT_MAX_RESTARTS": "1",  # what looks like a failure would be started again
    "SLURM_JOB_ID": "1",
    "SLURM_NODEID": "0",
}


def descendants(pid: int) -> list[int]:
    found: list[int] = []
    with suppress(OSError):  # it has just ended
        for path in Path(f"/proc/{pid}/task").glob("*/children"):
            found += map(int, path.read_text().split())
    return [*found, *(deeper for child in found for deeper in descendants(child))]


def catches_usr1(pid: int) -> bool:
    (signals,) = re.findall(r"SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text())
    return bool(int(signals, 16) >> (signal.SIGUSR1 - 1) & 1)


class Task:
    """node.sh as srun starts it, in a session of its own."""

    def __init__(self, run: Path) -> None:
        self.run, self.error = run, run.with_suffix(".stderr")
        with self.error.open("w") as error:
            self.process = subprocess.Popen(
                [NODE, "train", *SETTINGS, *ENDLESS, f"run.dir={run}"],
                env=environment(**VARIABLES, LIPNEXT_RUN_DIR=str(run)),
                stdout=subprocess.PIPE,
                stderr=error,
                text=True,
                start_new_session=True,
            )
        self.pid = self.process.pid

    def end(self) -> tuple[int, str]:
        """(exit code, stderr)."""
        self.process.communicate(timeout=120)
        return self.process.returncode, self.error.read_text()

    def __enter__(self) -> "Task":
        return self

    def __exit__(self, *_error: object) -> None:
        """Nothing of it stays."""
        for process in [*descendants(self.pid), self.pid] if self.process.poll() is None else []:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        self.process.communicate()


def test_a_warning_that_comes_before_the_ranks_is_kept(tmp_path: Path) -> None:
    """torchrun needs seconds to start them, and they some more to listen. With proctrack/cgroup
    Slurm signals the task alone, none of its children."""
    with Task(tmp_path / "run") as task:
        wait_until(lambda: catches_usr1(task.pid), "the task's handler")
        os.kill(task.pid, signal.SIGUSR1)
        code, said = task.end()
    assert code == 0 and re.search(r"SIGUSR1 at step \d+: saved; ", said), said  # of 100,000 epochs
    assert (task.run / "requeue").exists()


def test_the_end_of_the_task_is_that_of_the_ranks(tmp_path: Path) -> None:
    """SIGTERM goes by way of torchrun, which would otherwise start the ranks again."""
    with Task(tmp_path / "run") as task:
        wait_until(lambda: len(steps_logged(task.run)) > 2, "the third step")
        os.kill(task.pid, signal.SIGTERM)
        code, said = task.end()
    assert code == 0 and f"SIGTERM at step {final_state(task.run)['step']}: saved; " in said, said
    assert (task.run / "stopped").exists() and not (task.run / "requeue").exists()
