"""Signals: the run saves and stops. After SIGUSR1, Slurm's warning before a job ends, it asks for a
requeue and exits with 0."""

import os
import signal
import subprocess
import sys
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


WAITING = """
import os, signal, sys, time
from datetime import timedelta
import torch, torch.distributed as dist
from lipnext_scale.training import signals
signals.BLOCKED = 0.5
rank, store = int(sys.argv[1]), dist.FileStore(sys.argv[2], 2)
dist.init_process_group(
    "gloo", store=store, rank=rank, world_size=2, timeout=timedelta(hours=1)
)
dist.all_reduce(torch.ones(1))
with signals.stop_requests() as request:
    print("ready", flush=True)
    if rank == 1:
        time.sleep(600)
    dist.all_reduce(torch.ones(1))
"""


@pytest.mark.slow
def test_a_rank_that_waits_for_another_in_vain_ends(tmp_path):
    """Over gloo a stopped process stands for one that died, of which NCCL need not hear: the main
    thread of the other never runs its handler."""
    command = [sys.executable, "-c", WAITING]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(tmp_path / "store")],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        for process in ranks:
            assert process.stdout is not None and process.stdout.readline() == "ready\n"
        ranks[1].send_signal(signal.SIGSTOP)
        ranks[0].send_signal(signal.SIGUSR1)  # a warning ends nothing
        time.sleep(1.5)
        assert ranks[0].poll() is None
        ranks[0].send_signal(signal.SIGTERM)
        _, said = ranks[0].communicate(timeout=10)
        assert ranks[0].returncode == 128 + signal.SIGTERM
        assert said.startswith("SIGTERM, and nothing else happened for")
    finally:
        for process in ranks:
            process.kill()
            process.communicate()


def test_who_hears_a_signal_is_left_alone(monkeypatch):
    """A main thread that notes it, and one whose child got one: that is the child's own."""
    ended = []
    monkeypatch.setattr(signals.os, "_exit", ended.append)
    monkeypatch.setattr(signals, "BLOCKED", 0.05)
    with signals.stop_requests() as request:
        child = os.fork()
        if child == 0:
            signal.raise_signal(signal.SIGTERM)
            time.sleep(0.1)
            os.kill(os.getpid(), signal.SIGKILL)
        os.waitpid(child, 0)
        time.sleep(0.2)
        assert request.signal is None and not ended
        signal.raise_signal(signal.SIGTERM)
        time.sleep(0.2)
        assert request.signal is signal.SIGTERM and not ended
    assert signal.set_wakeup_fd(-1) == -1
