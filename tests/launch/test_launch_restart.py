"""Two machines without Slurm, also if torchrun has to start all processes again."""

import os
import signal
import time
from pathlib import Path

import pytest
from distributed.launch_commands import steps_logged, workers
from launched_runs import two_machines
from training.small import assert_same, final_state

from lipnext_scale.checkpoint.directory import complete_checkpoints

pytestmark = pytest.mark.slow
STEPS, PATIENCE = 150, 240
SETTINGS = [f"optim.epochs={STEPS // 5}", "run.checkpoint_every=10", "run.watch_every=0"]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("undisturbed") / "run"
    with two_machines(run, *SETTINGS) as machines:
        said = [machine.communicate(timeout=PATIENCE) for machine in machines]
        assert [machine.returncode for machine in machines] == [0, 0], said
    return run


def test_a_killed_process_is_replaced(tmp_path: Path, undisturbed: Path) -> None:
    """Each machine counts its own restarts only, and yet all processes find each other at once, and
    the run ends as if nothing had been."""
    assert steps_logged(undisturbed) == list(range(1, STEPS + 1))
    run = tmp_path / "run"
    with two_machines(run, *SETTINGS, LIPNEXT_MAX_RESTARTS="1") as machines:
        deadline = time.monotonic() + PATIENCE
        while max(complete_checkpoints(run / "checkpoints"), default=0) < 20:
            assert all(m.poll() is None for m in machines) and time.monotonic() < deadline
            time.sleep(0.01)
        (victim,) = workers(machines[1].pid).values()
        os.kill(victim, signal.SIGKILL)
        said = [machine.communicate(timeout=PATIENCE) for machine in machines]
        assert [machine.returncode for machine in machines] == [0, 0], said
    out, error = ("".join(part) for part in zip(*said, strict=True))
    assert out.count(f"continuing {run} from step ") == 1
    # Processes that did not meet would end with one, and be started once more.
    assert error.count("failed (exitcode: -9)") == 1 and "Traceback" not in error, error
    assert_same(final_state(run), final_state(undisturbed))
