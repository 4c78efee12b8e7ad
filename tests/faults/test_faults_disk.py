"""A full disk: the free space is printed, nothing half-written stays, the run can continue."""

from collections.abc import Iterator
from concurrent.futures import wait
from pathlib import Path

import pytest
from small_disk import fill, mounted, room_again
from training.small import assert_same, final_state, small_recipe

from lipnext_scale.observe.metrics import read_records
from lipnext_scale.training.trainer import Trainer
from lipnext_scale.utils.errors import UserError

# 24 steps, of which only the last is recorded: checkpoints meet the full disk.
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
            wait(filter(None, [trainer.checkpointer.writer._saving]))
            (fill if trainer.step == full_after else room_again)(filler)
        return values

    trainer.train_step = disturbed  # type: ignore[method-assign,assignment]
    trainer.run()


def test_one_checkpoint_that_fails_is_a_warning(disk, undisturbed, capsys):
    """Of steps 4, 8, … the second; the end is as if nothing had been."""
    train(disk, 7, 9, *QUIET)
    error = capsys.readouterr().err
    checkpoints = disk / "run" / "checkpoints"
    assert error.count("\n") == 1 and error.startswith(
        f"warning: {checkpoints / 'step-000000008'}: the checkpoint cannot be written: "
        "No space left on device, "
    )
    assert " MB are free there; the run continues and tries again at the next checkpoint" in error
    names = sorted(path.name for path in checkpoints.iterdir())
    assert names == ["latest", "step-000000020", "step-000000024"]
    assert_same(final_state(disk / "run"), final_state(undisturbed))


def test_a_second_one_ends_the_run_and_the_same_command_continues(disk, undisturbed):
    """The older checkpoint is intact, the part is gone, and with room the end is the same."""
    complaint = "step-000000012: the checkpoint cannot be written: No space left on device, "
    with pytest.raises(UserError, match=complaint):
        train(disk, 7, 999, *QUIET)
    checkpoints = disk / "run" / "checkpoints"
    assert sorted(path.name for path in checkpoints.iterdir()) == ["latest", "step-000000004"]
    room_again(disk / "filler")
    Trainer(small_recipe(disk / "run", *QUIET)).run()
    assert_same(final_state(disk / "run"), final_state(undisturbed))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # TensorBoard's
def test_metrics_that_cannot_be_written_do_not_end_the_run(disk, capsys):
    """A line with the path and the free space; with room again records are written again."""
    settings = ["run.eval_every=0", "run.checkpoint_every=0", "optim.epochs=100"]
    # A tmpfs keeps pages of a file, so it takes some lines until one is needed.
    train(disk, 6, 90, *settings, "run.max_steps=100", "run.async_checkpoint=false")
    out = capsys.readouterr().out
    assert "warning: the metrics of step " in out
    assert f"No space left on device (0.0 MB are free on {disk}/run)" in out
    steps = [record["step"] for record in read_records(disk / "run" / "metrics.jsonl")]
    assert steps == sorted(set(steps)) and steps[:5] == [1, 2, 3, 4, 5]
    assert steps[-10:] == list(range(91, 101)) and len(steps) < 100
