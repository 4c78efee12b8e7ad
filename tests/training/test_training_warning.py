"""SIGUSR1, Slurm's warning before a job ends: the run saves, asks for a requeue, leaves with 0."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from small import SETTINGS, assert_same, final_state, small_recipe

from lipnext_scale import stopping
from lipnext_scale.errors import Stopped
from lipnext_scale.stopping import StopRequest
from lipnext_scale.trainer import Trainer


def test_a_warning_before_the_first_step_counts(tmp_path: Path) -> None:
    """It is heeded after that step; the requeue is asked for until the run goes on."""
    run = tmp_path / "run"
    with stopping.stop_requests(signals=(signal.SIGUSR1,)) as wish:
        signal.raise_signal(signal.SIGUSR1)
        trainer = Trainer(small_recipe(run), wish)
        with pytest.raises(Stopped, match="SIGUSR1 at step 1: saved") as stopped:
            trainer.run()
    assert stopped.value.exit_code == 0
    assert (run / "requeue").read_text() == "SIGUSR1 at step 1: saved\n"
    Trainer(small_recipe(run)).run()
    assert not (run / "requeue").exists()
    Trainer(small_recipe(tmp_path / "straight")).run()
    assert_same(final_state(run), final_state(tmp_path / "straight"))


def test_a_warning_at_the_last_step_asks_for_nothing(tmp_path: Path) -> None:
    """A run that is finished anyway must not be queued again."""
    trainer = Trainer(
        small_recipe(tmp_path / "run", "run.max_steps=1"), StopRequest(signal.SIGUSR1)
    )
    trainer.run()
    assert final_state(tmp_path / "run")["step"] == 1
    assert not (tmp_path / "run" / "requeue").exists()


def test_other_signals_ask_for_no_requeue(tmp_path: Path) -> None:
    """Who sends SIGTERM by scancel or Ctrl-C wants an end."""
    trainer = Trainer(small_recipe(tmp_path / "run"), StopRequest(signal.SIGTERM))
    with pytest.raises(Stopped) as stopped:
        trainer.run()
    assert stopped.value.exit_code == 128 + signal.SIGTERM
    assert not (tmp_path / "run" / "requeue").exists()


def test_warnings_never_kill_and_another_signal_is_a_first_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """SIGUSR1 as often as it likes; a SIGTERM after it is noted and not yet deadly."""
    monkeypatch.setattr(stopping, "GRACE", 0.0)
    with stopping.stop_requests() as wish:
        for number in (signal.SIGUSR1, signal.SIGUSR1, signal.SIGTERM, signal.SIGUSR1):
            time.sleep(0.01)
            signal.raise_signal(number)
        assert wish.signal is signal.SIGTERM


@pytest.mark.slow
def test_a_warning_to_the_whole_session_hits_no_worker(tmp_path: Path) -> None:
    """As Slurm sends it: to the run and to the processes that make its batches."""
    run = tmp_path / "run"
    settings = ["optim.epochs=200", "run.eval_every=0", "run.checkpoint_every=0", "data.workers=2"]
    process = subprocess.Popen(
        [sys.executable, "-m", "lipnext_scale.train", *SETTINGS, *settings, f"run.dir={run}"],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    while not (run / "metrics.jsonl").exists() or not (run / "metrics.jsonl").read_text():
        assert process.poll() is None
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGUSR1)
    _, error = process.communicate()
    step = final_state(run)["step"]
    assert process.returncode == 0 and 0 < step < 600
    assert error == f"SIGUSR1 at step {step}: saved; the same command continues {run}\n"
    assert (run / "requeue").exists()
