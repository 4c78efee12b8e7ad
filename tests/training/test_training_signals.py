"""Signals: the run saves and stops. After SIGUSR1, Slurm's warning before a job ends, it asks for a
requeue and exits with 0."""

import signal
import time

import pytest
from small import assert_same, final_state, small_recipe

from lipnext_scale.training import signals
from lipnext_scale.training.signals import StopRequest
from lipnext_scale.training.trainer import Trainer
from lipnext_scale.utils.errors import Stopped


def test_a_warning_before_the_first_step_counts(tmp_path):
    """The run stops after that step; the request for a requeue stays until the run continues."""
    run = tmp_path / "run"
    with signals.stop_requests(signals=(signal.SIGUSR1,)) as request:
        signal.raise_signal(signal.SIGUSR1)
        trainer = Trainer(small_recipe(run), request)
        with pytest.raises(Stopped, match="SIGUSR1 at step 1: saved") as stopped:
            trainer.run()
    assert stopped.value.exit_code == 0
    assert (run / "requeue").read_text() == "SIGUSR1 at step 1: saved\n"
    Trainer(small_recipe(run)).run()
    assert not (run / "requeue").exists()
    Trainer(small_recipe(tmp_path / "straight")).run()
    assert_same(final_state(run), final_state(tmp_path / "straight"))


def test_a_warning_at_the_last_step_asks_for_nothing(tmp_path):
    """A run that is finished anyway must not be queued again."""
    trainer = Trainer(
        small_recipe(tmp_path / "run", "run.max_steps=1"), StopRequest(signal.SIGUSR1)
    )
    trainer.run()
    assert final_state(tmp_path / "run")["step"] == 1
    assert not (tmp_path / "run" / "requeue").exists()


def test_other_signals_ask_for_no_requeue(tmp_path):
    """SIGTERM of scancel is meant to end the run."""
    trainer = Trainer(small_recipe(tmp_path / "run"), StopRequest(signal.SIGTERM))
    with pytest.raises(Stopped) as stopped:
        trainer.run()
    assert stopped.value.exit_code == 128 + signal.SIGTERM
    assert not (tmp_path / "run" / "requeue").exists()


def test_the_same_request_again_is_one_request(monkeypatch):
    """Signals right after the first do nothing more; after a while one acts as without us."""
    heard = []
    previous = signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    try:
        with signals.stop_requests() as request:
            for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT):
                signal.raise_signal(number)
            assert request.signal is signal.SIGTERM and not heard
            monkeypatch.setattr(signals, "GRACE", 0.0)
            time.sleep(0.01)
            signal.raise_signal(signal.SIGTERM)
            assert heard == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, previous)


def test_warnings_never_kill_and_another_signal_is_a_first_one(monkeypatch):
    """SIGUSR1 as often as it likes; a SIGTERM after it is noted and not yet deadly."""
    monkeypatch.setattr(signals, "GRACE", 0.0)
    with signals.stop_requests() as request:
        for number in (signal.SIGUSR1, signal.SIGUSR1, signal.SIGTERM, signal.SIGUSR1):
            time.sleep(0.01)
            signal.raise_signal(number)
        assert request.signal is signal.SIGTERM
