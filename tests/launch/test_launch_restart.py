"""Two machines without Slurm: to the end, also where torchrun has to start all of them again."""

import os
import signal
import time
from pathlib import Path

import pytest
from launched_runs import steps_told, two_machines
from parallel.launch_commands import workers
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


def test_two_machines_train_to_the_end(undisturbed: Path) -> None:
    """The same command on each, with a number of its own."""
    assert steps_told(undisturbed) == list(range(1, STEPS + 1))
    assert final_state(undisturbed)["step"] == STEPS


@pytest.mark.parametrize("node", [0, 1], ids=["head", "other"])
def test_a_killed_process_is_replaced(tmp_path: Path, undisturbed: Path, node: int) -> None:
    """Whichever machine had it: each of them counts its own restarts only, and yet all processes
    find each other at once, and the run ends as if nothing had been."""
    run = tmp_path / "run"
    with two_machines(run, *SETTINGS, LIPNEXT_MAX_RESTARTS="1") as machines:
        deadline = time.monotonic() + PATIENCE
        while max(complete_checkpoints(run / "checkpoints"), default=0) < 20:
            assert all(m.poll() is None for m in machines) and time.monotonic() < deadline
            time.sleep(0.01)
        (victim,) = workers(machines[node].pid).values()
        os.kill(victim, signal.SIGKILL)
        said = [machine.communicate(timeout=PATIENCE) for machine in machines]
        assert [machine.returncode for machine in machines] == [0, 0], said
    out, error = ("".join(part) for part in zip(*said, strict=True))
    assert out.count(f"continuing {run} from step ") == 1
    # Processes that did not meet would end with one, and be started once more.
    assert error.count("failed (exitcode: -9)") == 1 and "Traceback" not in error, error
    assert_same(final_state(run), final_state(undisturbed))
