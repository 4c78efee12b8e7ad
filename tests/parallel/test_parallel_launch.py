"""One command for every number of processes: started, stopped, killed and continued for real."""

import json
import os
import signal
from pathlib import Path

import pytest
import torch
from launch_commands import (
    STEPS,
    python,
    started,
    torchrun,
    train,
    wait_until,
    workers,
)
from training.small import assert_same, final_state

pytestmark = pytest.mark.slow
needs_proc = pytest.mark.skipif(
    not Path("/proc/self/environ").exists(), reason="finds a launcher's workers in /proc"
)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The run directory of two processes under torchrun, and what they said."""
    directory = tmp_path_factory.mktemp("launch") / "run"
    done = train(torchrun(), f"run.dir={directory}")
    assert done.returncode == 0, done.stderr
    return directory, done.stdout


def steps_told(directory: Path) -> list[int]:
    metrics = directory / "metrics.jsonl"
    if not metrics.exists():
        return []
    lines = metrics.read_text().splitlines(keepends=True)
    records = [json.loads(line) for line in lines if line.endswith("\n")]  # one may be half written
    return [record["step"] for record in records if "train/loss" in record]


def introduction(out: str) -> str:
    (line,) = [line for line in out.splitlines() if line.startswith("LipNeXt L2W16")]
    return line


def test_torchrun_is_introduced_once(undisturbed: tuple[Path, str]) -> None:
    """One line for two processes, with their number and the engine; every step is told once."""
    directory, out = undisturbed
    assert " on 2 × cpu (fsdp 1 × 2, bank layout, fp32), 120 steps" in introduction(out)
    assert out.count(f"step {STEPS}/{STEPS} ") == 1
    assert steps_told(directory) == list(range(1, STEPS + 1))


def test_one_process_ends_where_two_do(undisturbed: tuple[Path, str], tmp_path: Path) -> None:
    """Weights and optimizer state up to rounding, all else exactly."""
    done = train(python(), f"run.dir={tmp_path / 'run'}")
    assert done.returncode == 0, done.stderr
    assert " on cpu (single, fp32), 120 steps" in introduction(done.stdout)
    alone, two = final_state(tmp_path / "run"), final_state(undisturbed[0])
    assert alone.keys() == two.keys() and alone["step"] == STEPS
    for name, value in alone.items():
        if isinstance(value, torch.Tensor):
            torch.testing.assert_close(value, two[name], rtol=0, atol=1e-5, msg=name)
        else:
            assert value == two[name], name


@pytest.mark.parametrize(
    "override, message",
    [
        ("data.batch_size=71", "data.batch_size = 71: must be a multiple of 2 process"),
        ("model.widht=8", "model.widht = 8: unknown key; did you mean model.width?"),
        ("parallel.engine=single", "parallel.engine = 'single': 2 processes were started; use"),
    ],
)
def test_a_mistake_is_told_once(override: str, message: str, tmp_path: Path) -> None:
    """Not by every rank; no traceback of ours, and no run directory."""
    done = train(torchrun(), f"run.dir={tmp_path / 'run'}", override)
    assert done.returncode != 0 and "exitcode  : 2" in done.stderr
    assert done.stderr.count(message) == 1
    assert f"error: {message}" in done.stderr.splitlines()[0]
    assert "lipnext_scale/trainer.py" not in done.stderr
    assert not (tmp_path / "run").exists()


@needs_proc
def test_a_wish_of_one_rank_stops_all(undisturbed: tuple[Path, str], tmp_path: Path) -> None:
    """SIGTERM to the second: all save at one step, told once; the same command goes on exactly."""
    run = tmp_path / "run"
    with started(torchrun(), f"run.dir={run}") as process:
        wait_until(lambda: len(steps_told(run)) > 1, process)
        os.kill(workers(process.pid)[1], signal.SIGTERM)
        _, error = process.communicate(timeout=60)
    step = final_state(run)["step"]
    assert 0 < step < STEPS
    assert error.count(f"SIGTERM at step {step}: saved; the same command continues {run}") == 1
    assert "lipnext_scale/trainer.py" not in error
    done = train(torchrun(), f"run.dir={run}")
    assert done.returncode == 0, done.stderr
    assert f"continuing {run} from step {step}\n" in done.stdout
    assert_same(final_state(run), final_state(undisturbed[0]))
    assert steps_told(run) == steps_told(undisturbed[0])


@needs_proc
def test_a_rank_that_is_killed_costs_no_more_than_the_steps_since(
    undisturbed: tuple[Path, str], tmp_path: Path
) -> None:
    """kill -9 between checkpoints ends the others too; the same command ends with the same bits."""
    run, overrides = tmp_path / "run", [f"run.dir={tmp_path / 'run'}", "run.checkpoint_every=10"]

    def between_checkpoints() -> bool:
        saved = (run / "checkpoints" / "step-000000010").exists()
        return saved and steps_told(run)[-1] % 10 in range(2, 7)

    with started(torchrun(), *overrides) as process:
        wait_until(between_checkpoints, process)
        os.kill(workers(process.pid)[1], signal.SIGKILL)
        process.communicate(timeout=60)
    assert process.returncode == 1
    step = final_state(run)["step"]
    assert step % 10 == 0 and 10 <= step < STEPS
    done = train(torchrun(), *overrides)
    assert done.returncode == 0, done.stderr
    assert f"continuing {run} from step {step}\n" in done.stdout
    assert_same(final_state(run), final_state(undisturbed[0]))
