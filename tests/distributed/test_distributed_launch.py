"""One command for every number of processes: started, stopped and continued for real."""

import os
import signal
from pathlib import Path

import pytest
from launch_commands import (
    STEPS,
    started,
    steps_logged,
    torchrun,
    train,
    wait_until,
    workers,
)
from training.small import assert_same, final_state

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The run directory of two processes under torchrun, and their output."""
    directory = tmp_path_factory.mktemp("launch") / "run"
    done = train(torchrun(), f"run.dir={directory}")
    assert done.returncode == 0, done.stderr
    return directory, done.stdout


def test_torchrun_is_introduced_once(undisturbed: tuple[Path, str]) -> None:
    """One line for two processes, with their number and the engine; every step is logged once."""
    directory, out = undisturbed
    assert out.count("LipNeXt L2W16") == 1
    assert " on 2 × cpu (fsdp 1 × 2, bank layout, fp32), 120 steps" in out
    assert out.count(f"step {STEPS}/{STEPS} ") == 1
    assert steps_logged(directory) == list(range(1, STEPS + 1))


def test_a_mistake_is_printed_once(tmp_path: Path) -> None:
    """Not by every rank; no traceback of ours, and no run directory."""
    done = train(torchrun(), f"run.dir={tmp_path / 'run'}", "data.batch_size=71")
    assert done.returncode != 0 and "exitcode  : 2" in done.stderr
    message = "error: data.batch_size = 71: must be a multiple of 2 process"
    assert message in done.stderr.splitlines()[0] and done.stderr.count(message) == 1
    assert "lipnext_scale/training/trainer.py" not in done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds workers in /proc")
def test_a_signal_to_one_rank_stops_all(undisturbed: tuple[Path, str], tmp_path: Path) -> None:
    """SIGTERM to the second: all save at one step; the same command goes on exactly."""
    run = tmp_path / "run"
    with started(torchrun(), f"run.dir={run}") as process:
        wait_until(lambda: len(steps_logged(run)) > 1, process)
        os.kill(workers(process.pid)[1], signal.SIGTERM)
        _, error = process.communicate(timeout=60)
    step = final_state(run)["step"]
    assert 0 < step < STEPS
    assert error.count(f"SIGTERM at step {step}: saved; the same command continues {run}") == 1
    assert "lipnext_scale/training/trainer.py" not in error
    done = train(torchrun(), f"run.dir={run}")
    assert done.returncode == 0, done.stderr
    assert f"continuing {run} from step {step}\n" in done.stdout
    assert_same(final_state(run), final_state(undisturbed[0]))
    assert steps_logged(run) == steps_logged(undisturbed[0])
