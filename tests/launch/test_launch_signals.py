"""What a node's task does with Slurm's signals where they reach it alone: launch/shared/node.sh."""

import os
import signal
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest
from launched_runs import ROOT, SETTINGS, environment, steps_told
from process_status import catches, children, descendants, ignores
from slurm_cluster import wait_until
from training.small import final_state

pytestmark = pytest.mark.slow
NODE = str(ROOT / "launch" / "shared" / "node.sh")
ENDLESS = ["data.train=builtin:digits/test-*.tar.gz", "optim.epochs=100000"]
VARIABLES = {
    "LIPNEXT_ROOT": str(ROOT),
    "LIPNEXT_NODES": "1",
    "LIPNEXT_ADDRESSES": "127.0.0.1",
    "LIPNEXT_HEAD_PORT": "0",
    "LIPNEXT_RUN_ID": "signals",
    "LIPNEXT_MAX_RESTARTS": "1",  # whoever looks like a failure would be started again
    "SLURM_JOB_ID": "1",
    "SLURM_NODEID": "0",
}


class Task:
    """node.sh as srun starts it, in a session of its own."""

    def __init__(self, step: str, run: Path, *settings: str, **variables: str) -> None:
        self.run, self.error = run, run.with_suffix(".stderr")
        with self.error.open("w") as error:
            self.process = subprocess.Popen(
                [NODE, step, *SETTINGS, *settings, f"run.dir={run}"],
                env=environment(**VARIABLES | variables, LIPNEXT_RUN_DIR=str(run)),
                stdout=subprocess.PIPE,
                stderr=error,
                text=True,
                start_new_session=True,
            )
        self.pid = self.process.pid

    def end(self) -> tuple[int, str, str]:
        """(exit code, what it told its launcher, what it said)."""
        out, _ = self.process.communicate(timeout=120)
        return self.process.returncode, out, self.error.read_text()

    def __enter__(self) -> "Task":
        return self

    def __exit__(self, *_error: object) -> None:
        """Nothing of it stays."""
        for process in [*descendants(self.pid), self.pid] if self.process.poll() is None else []:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        self.process.communicate()


def test_a_warning_of_the_task_alone_reaches_the_ranks(tmp_path: Path) -> None:
    """Slurm with proctrack/cgroup signals no children: the ranks save, and ask for a requeue."""
    with Task("train", tmp_path / "run", *ENDLESS) as task:
        wait_until(lambda: len(steps_told(task.run)) > 2, "the third step")
        os.kill(task.pid, signal.SIGUSR1)
        code, _, said = task.end()
    step = final_state(task.run)["step"]
    assert code == 0 and f"SIGUSR1 at step {step}: saved; " in said, said
    assert (task.run / "requeue").read_text() == f"SIGUSR1 at step {step}: saved\n"


def test_a_warning_that_comes_before_the_ranks_is_kept(tmp_path: Path) -> None:
    """torchrun needs seconds to start them, and they some more to listen."""
    with Task("train", tmp_path / "run", *ENDLESS) as task:
        wait_until(lambda: catches(task.pid, signal.SIGUSR1), "the task's handler")
        os.kill(task.pid, signal.SIGUSR1)
        code, _, said = task.end()
    assert code == 0 and "SIGUSR1 at step 1: saved; " in said, said
    assert (task.run / "requeue").exists()


def test_the_end_of_the_task_is_that_of_the_ranks(tmp_path: Path) -> None:
    """SIGTERM goes by way of torchrun, which would otherwise start the ranks again."""
    with Task("train", tmp_path / "run", *ENDLESS) as task:
        wait_until(lambda: len(steps_told(task.run)) > 2, "the third step")
        os.kill(task.pid, signal.SIGTERM)
        code, _, said = task.end()
    assert code == 0 and f"SIGTERM at step {final_state(task.run)['step']}: saved; " in said, said
    assert (task.run / "stopped").exists() and not (task.run / "requeue").exists()


def test_a_warning_while_a_node_prepares_is_kept(tmp_path: Path) -> None:
    """USR1 to all of its processes: the preparation ends as it should, and tells of it."""
    with Task("prepare", tmp_path / "run", *ENDLESS) as task:
        wait_until(lambda: bool(children(task.pid)), "the process that prepares")
        (process,) = children(task.pid)
        wait_until(lambda: ignores(process, signal.SIGUSR1), "a process that ignores USR1")
        assert catches(task.pid, signal.SIGUSR1)
        os.killpg(task.pid, signal.SIGUSR1)
        assert task.end()[:2] == (0, f"run.dir: {task.run}\nwarned\n")
