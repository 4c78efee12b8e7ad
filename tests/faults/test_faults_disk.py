"""A full disk: told with what is free, nothing half-written stays, and the run can go on."""

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from signal import Signals

import pytest
from small_disk import fill, mounted, room_again
from training.small import assert_same, final_state, small_recipe

from lipnext_scale.checkpoint import latest_checkpoint
from lipnext_scale.errors import RunFailed, Stopped, UserError
from lipnext_scale.stopping import StopRequest
from lipnext_scale.trainer import Trainer

# 24 steps, of which only the last is told: the disk is met by checkpoints.
QUIET = ["run.eval_every=0", "run.log_every=100", "optim.epochs=8"]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "disk"
    place.mkdir()
    with mounted(place, "size=4m") as done:
        if not done:
            pytest.skip("a tmpfs cannot be mounted here")
        yield place


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("undisturbed") / "run"
    Trainer(small_recipe(directory, *QUIET)).run()
    return directory


def train(disk: Path, full_after: int, room_after: int, *overrides: str) -> None:
    """Full from the end of one step to that of another."""
    trainer, filler = Trainer(small_recipe(disk / "run", *overrides)), disk / "filler"
    step = trainer.train_step

    def disturbed(batch: object) -> object:
        values = step(batch)  # type: ignore[arg-type]
        if trainer.step in (full_after, room_after):
            trainer.state._writer.join()  # what is being written ends as it was to
            (fill if trainer.step == full_after else room_again)(filler)
        return values

    trainer.train_step = disturbed  # type: ignore[method-assign,assignment]
    trainer.run()


def test_one_checkpoint_that_fails_is_told_and_let_pass(
    disk: Path, undisturbed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of steps 4, 8, … the second; the end is as if nothing had been."""
    train(disk, 7, 9, *QUIET)
    error = capsys.readouterr().err
    checkpoints = disk / "run" / "checkpoints"
    assert error.count("\n") == 1 and error.startswith(
        f"warning: {checkpoints / 'step-000000008'}: the checkpoint cannot be written: "
        "No space left on device, "
    )
    assert " MB are free there; the run goes on and tries again at the next checkpoint" in error
    names = sorted(path.name for path in checkpoints.iterdir())
    assert names == ["latest", "step-000000020", "step-000000024"]
    assert_same(final_state(disk / "run"), final_state(undisturbed))


def test_a_second_one_ends_the_run_and_the_same_command_continues(
    disk: Path, undisturbed: Path
) -> None:
    """The older checkpoint is whole, the part is gone, and with room the end is the same."""
    complaint = "step-000000012: the checkpoint cannot be written: No space left on device, "
    with pytest.raises(UserError, match=complaint):
        train(disk, 7, 999, *QUIET)
    checkpoints = disk / "run" / "checkpoints"
    assert sorted(path.name for path in checkpoints.iterdir()) == ["latest", "step-000000004"]
    room_again(disk / "filler")
    Trainer(small_recipe(disk / "run", *QUIET)).run()
    assert_same(final_state(disk / "run"), final_state(undisturbed))


def test_a_requeue_is_asked_for_on_a_full_disk(disk: Path, undisturbed: Path) -> None:
    """After Slurm's warning, when the checkpoint has just taken the last room: the name alone."""
    trainer = Trainer(small_recipe(disk / "run", *QUIET), StopRequest(Signals.SIGUSR1))
    ask = trainer.directory.ask_for_requeue

    def fill_and_ask(reason: str) -> None:
        fill(disk / "filler")
        ask(reason)

    trainer.directory.ask_for_requeue = fill_and_ask  # type: ignore[method-assign]
    with pytest.raises(Stopped, match="SIGUSR1 at step 1: saved; the same command continues"):
        trainer.run()
    assert (disk / "run" / "requeue").read_text() == ""
    assert final_state(disk / "run")["step"] == 1
    room_again(disk / "filler")
    Trainer(small_recipe(disk / "run", *QUIET)).run()
    assert not (disk / "run" / "requeue").exists()
    assert_same(final_state(disk / "run"), final_state(undisturbed))


def test_a_requeue_that_cannot_be_asked_for_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a line, with what was saved."""

    def refuse(path: Path, *_: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    trainer = Trainer(small_recipe(tmp_path / "run", *QUIET), StopRequest(Signals.SIGUSR1))
    monkeypatch.setattr("lipnext_scale.run_directory.write_atomically", refuse)
    monkeypatch.setattr(Path, "touch", refuse)
    with pytest.raises(UserError) as told:
        trainer.run()
    assert str(told.value) == (
        "SIGUSR1 at step 1: saved, but no requeue can be asked for: "
        f"{tmp_path}/run/requeue: Read-only file system"
    )


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # TensorBoard's
def test_metrics_that_cannot_be_written_end_the_run_in_a_line(disk: Path) -> None:
    """With the path and what is free; afterwards the same command goes on."""
    settings = ["run.eval_every=0", "run.log_every=1"]
    expected = rf"step \d+: .*No space left on device \(0.0 MB are free on {disk}/run\)"
    with pytest.raises(RunFailed, match=expected):
        # Pages of a file are kept by the tmpfs, so it takes some lines until one is needed.
        train(disk, 6, 999, *settings, "optim.epochs=100", "run.checkpoint_every=5")
    found = latest_checkpoint(disk / "run" / "checkpoints")
    assert found is not None and found.name == "step-000000005"
    room_again(disk / "filler")
    Trainer(small_recipe(disk / "run", *settings, "optim.epochs=100", "run.max_steps=7")).run()


def test_a_damaged_checkpoint_is_put_aside(
    tmp_path: Path, undisturbed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The one before it is taken, a line says so, and the end is the same."""
    Trainer(small_recipe(tmp_path / "run", *QUIET, "run.max_steps=8")).run()
    checkpoints = tmp_path / "run" / "checkpoints"
    file = checkpoints / "step-000000008" / "facts.json"
    file.write_bytes(file.read_bytes()[:-1])
    Trainer(small_recipe(tmp_path / "run", *QUIET)).run()
    out, error = capsys.readouterr()
    assert "from step 4\n" in out
    assert error == (
        f"warning: {file}: is damaged: its checksum is not the one in SHA256SUMS; "
        "it is step-000000008.damaged-1 now, the run goes on from step-000000004\n"
    )
    assert (checkpoints / "step-000000008.damaged-1").is_dir()
    assert_same(final_state(tmp_path / "run"), final_state(undisturbed))
