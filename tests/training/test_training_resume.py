"""A run that is stopped or killed anywhere ends with the same bits as one that is not."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from small import SETTINGS, STEPS, assert_same, final_state, small_recipe

from lipnext_scale.data.catalog import BUILTIN
from lipnext_scale.training.trainer import Trainer
from lipnext_scale.utils.errors import UserError


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("undisturbed") / "run"
    Trainer(small_recipe(directory)).run()
    return directory


@pytest.mark.parametrize("stop", range(1, STEPS))
def test_stopped_after_any_step_and_resumed(undisturbed, tmp_path, stop):
    """Weights, moments, buffers, slow weights and the data's place are bit-equal at the end."""
    Trainer(small_recipe(tmp_path / "run", f"run.max_steps={stop}")).run()
    assert final_state(tmp_path / "run")["step"] == stop
    Trainer(small_recipe(tmp_path / "run")).run()
    assert_same(final_state(tmp_path / "run"), final_state(undisturbed))


def test_metrics_of_a_resumed_run_are_those_of_an_undisturbed_one(undisturbed, tmp_path):
    """Every step once, with the same values, also where a kill left lines beyond the checkpoint."""
    run = tmp_path / "run"
    Trainer(small_recipe(run, "run.max_steps=7")).run()
    shutil.rmtree(run / "checkpoints" / "step-000000007")  # as if killed before this save
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 8, "train/lo')  # as if killed while writing
    Trainer(small_recipe(run)).run()
    assert _values(run) == _values(undisturbed)


def test_a_stop_between_two_log_lines_leaves_no_trace(tmp_path):
    """With a line every four steps, a stop at five adds none to the metrics."""
    straight, stopped = tmp_path / "straight", tmp_path / "stopped"
    Trainer(small_recipe(straight, "run.log_every=4")).run()
    Trainer(small_recipe(stopped, "run.log_every=4", "run.max_steps=5")).run()
    Trainer(small_recipe(stopped, "run.log_every=4")).run()
    assert _values(stopped) == _values(straight)


def test_other_training_data_is_not_continued_on(tmp_path):
    """Shards that were exchanged between the two halves of a run are noticed."""
    shards = Path(BUILTIN) / "digits"
    shutil.copy(shards / "train-000000.tar.gz", tmp_path / "train.tar.gz")
    settings = (f"data.train={tmp_path}/train.tar.gz", "run.max_steps=3", "data.batch_size=100")
    Trainer(small_recipe(tmp_path / "run", *settings)).run()
    shutil.copy(shards / "test-000000.tar.gz", tmp_path / "train.tar.gz")
    with pytest.raises(UserError, match=r"data\.train = .*not the samples"):
        Trainer(small_recipe(tmp_path / "run", *settings))


def _values(run: Path) -> list[dict]:
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    timed = ("seconds", "images_per_second", "data/", "memory/")
    return [{k: v for k, v in r.items() if not k.startswith(timed)} for r in records]


@pytest.mark.slow
def test_a_killed_process_comes_back_exactly(tmp_path):
    """SIGKILL in the middle of the loop; the same run again ends as if nothing had been."""
    settings = ["optim.epochs=40", "run.eval_every=0", "run.checkpoint_every=10"]
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    command = [sys.executable, "-m", "lipnext_scale.train", *SETTINGS, *settings]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([*command, f"run.dir={killed}"], env=environment)
    while not list((killed / "checkpoints").glob("step-*[0-9]")):
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert final_state(killed)["step"] < 120
    for run in (killed, straight):
        Trainer(small_recipe(run, *settings)).run()
    assert_same(final_state(killed), final_state(straight))


def test_a_finished_run_is_left_alone(undisturbed, capsys):
    before = final_state(undisturbed)
    Trainer(small_recipe(undisturbed)).run()
    assert "nothing to do" in capsys.readouterr().out
    assert_same(final_state(undisturbed), before)
