"""A run that is stopped, killed or cut anywhere ends with the same bits as one that is not."""

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

from lipnext_scale import stopping
from lipnext_scale.data.catalog import BUILTIN
from lipnext_scale.errors import UserError
from lipnext_scale.trainer import Trainer


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("undisturbed") / "run"
    Trainer(small_recipe(directory)).run()
    return directory


@pytest.mark.parametrize("stop", range(1, STEPS))
def test_stopped_after_any_step_and_resumed(undisturbed: Path, tmp_path: Path, stop: int) -> None:
    """Weights, moments, buffers, slow weights and the data's place are bit-equal at the end."""
    Trainer(small_recipe(tmp_path / "run", f"run.max_steps={stop}")).run()
    assert final_state(tmp_path / "run")["step"] == stop
    Trainer(small_recipe(tmp_path / "run")).run()
    assert_same(final_state(tmp_path / "run"), final_state(undisturbed))


def test_metrics_of_a_resumed_run_are_those_of_an_undisturbed_one(
    undisturbed: Path, tmp_path: Path
) -> None:
    """Every step once, with the same values, also where a kill left lines beyond the checkpoint."""
    run = tmp_path / "run"
    Trainer(small_recipe(run, "run.max_steps=7")).run()
    shutil.rmtree(run / "checkpoints" / "step-000000007")  # as if killed before this save
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 8, "train/lo')  # as if killed while writing
    Trainer(small_recipe(run)).run()
    assert _values(run) == _values(undisturbed)


def test_a_stop_between_two_log_lines_leaves_no_trace(tmp_path: Path) -> None:
    """With a line every four steps, a stop at five adds none to the metrics."""
    straight, stopped = tmp_path / "straight", tmp_path / "stopped"
    Trainer(small_recipe(straight, "run.log_every=4")).run()
    Trainer(small_recipe(stopped, "run.log_every=4", "run.max_steps=5")).run()
    Trainer(small_recipe(stopped, "run.log_every=4")).run()
    assert _values(stopped) == _values(straight)


def test_other_training_data_is_not_continued_on(tmp_path: Path) -> None:
    """Shards that were exchanged between the two halves of a run are noticed."""
    shards = Path(BUILTIN) / "digits"
    shutil.copy(shards / "train-000000.tar.gz", tmp_path / "train.tar.gz")
    settings = (f"data.train={tmp_path}/train.tar.gz", "run.max_steps=3", "data.batch_size=100")
    Trainer(small_recipe(tmp_path / "run", *settings)).run()
    shutil.copy(shards / "test-000000.tar.gz", tmp_path / "train.tar.gz")
    with pytest.raises(UserError, match=r"data\.train = .*not the samples"):
        Trainer(small_recipe(tmp_path / "run", *settings))


def test_a_users_own_files_among_the_checkpoints_are_left_alone(tmp_path: Path) -> None:
    checkpoints = tmp_path / "run" / "checkpoints"
    Trainer(small_recipe(tmp_path / "run", "run.max_steps=2")).run()
    (checkpoints / "step-best").write_text("mine")
    (checkpoints / "step-000000003.partial").mkdir()  # cut off by a kill
    Trainer(small_recipe(tmp_path / "run")).run()
    names = sorted(path.name for path in checkpoints.iterdir())
    assert names == ["latest", "step-000000008", "step-000000012", "step-best"]


def _values(run: Path) -> list[dict]:
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    timed = ("seconds", "images_per_second", "data/", "memory/")
    told = [record for record in records if "memory/total_mb" not in record]  # once a process
    return [{k: v for k, v in r.items() if not k.startswith(timed)} for r in told]


@pytest.mark.slow
def test_a_killed_process_comes_back_exactly(tmp_path: Path) -> None:
    """SIGKILL in the middle of the loop; the same command again ends as if nothing had been."""
    settings = [*SETTINGS, "optim.epochs=60", "run.eval_every=0", "run.checkpoint_every=10"]
    command = [sys.executable, "-m", "lipnext_scale.train", *settings]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    subprocess.run([*command, f"run.dir={straight}"], check=True, env=environment)
    process = subprocess.Popen([*command, f"run.dir={killed}"], env=environment)
    while not list((killed / "checkpoints").glob("step-*[0-9]")):
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert final_state(killed)["step"] < 180
    subprocess.run([*command, f"run.dir={killed}"], check=True, env=environment)
    assert_same(final_state(killed), final_state(straight))


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_stops_and_loses_nothing(tmp_path: Path, number: signal.Signals) -> None:
    """Ctrl-C or SIGTERM between checkpoints: saved at that step, told in a line, and continued."""
    settings = [*SETTINGS, "optim.epochs=60", "run.eval_every=0", "run.checkpoint_every=0"]
    command = [
        sys.executable,
        "-m",
        "lipnext_scale.train",
        *settings,
        f"run.dir={tmp_path / 'run'}",
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    while not (tmp_path / "run" / "metrics.jsonl").exists() or not _values(tmp_path / "run"):
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(number)
    _, error = process.communicate()
    step = final_state(tmp_path / "run")["step"]
    assert process.returncode == 128 + number and 0 < step < 180
    assert f"{number.name} at step {step}: saved; the same command continues" in error
    subprocess.run(command, check=True, env=environment)
    assert [r["step"] for r in _values(tmp_path / "run")] == list(range(1, 181))


def test_the_same_wish_again_is_one_wish(monkeypatch: pytest.MonkeyPatch) -> None:
    """Signals right after the first do nothing more; after a while one acts as without us."""
    heard = []
    previous = signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    try:
        with stopping.stop_requests() as wish:
            for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT):
                signal.raise_signal(number)
            assert wish.signal is signal.SIGTERM and not heard
            monkeypatch.setattr(stopping, "GRACE", 0.0)
            time.sleep(0.01)
            signal.raise_signal(signal.SIGTERM)
            assert heard == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, previous)


def test_a_finished_run_is_left_alone(
    undisturbed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = final_state(undisturbed)
    Trainer(small_recipe(undisturbed)).run()
    assert "nothing to do" in capsys.readouterr().out
    assert_same(final_state(undisturbed), before)


def test_max_steps_does_not_change_the_schedule(undisturbed: Path, tmp_path: Path) -> None:
    """The learning rates of a short run are the first ones of the long run."""
    Trainer(small_recipe(tmp_path / "run", "run.max_steps=5")).run()
    short = [record for record in _values(tmp_path / "run")]
    assert short == [record for record in _values(undisturbed) if record["step"] <= 5]


def test_only_the_newest_checkpoints_stay(undisturbed: Path) -> None:
    names = sorted(path.name for path in (undisturbed / "checkpoints").iterdir())
    assert names == ["latest", "step-000000008", "step-000000012"]
