"""Which checkpoint a run goes on from: damaged ones are put aside, unreadable ones are not."""

import errno
import os
from pathlib import Path

import pytest
from checkpoint_parts import message_of, sample_pieces

from lipnext_scale.checkpoint import CheckpointWriter, latest_checkpoint
from lipnext_scale.checkpoint import newest_whole_checkpoint as newest_whole
from lipnext_scale.checkpoint.directory import SUMS


@pytest.fixture
def checkpoints(tmp_path: Path) -> Path:
    """Of steps 1 and 2."""
    writer = CheckpointWriter(tmp_path / "checkpoints", 3)
    for step in (1, 2):
        writer.save(step, sample_pieces(step), {}, asynchronous=False)
    return tmp_path / "checkpoints"


def names(checkpoints: Path) -> list[str]:
    return sorted(path.name for path in checkpoints.iterdir())


BOTH = ["latest", "step-000000001", "step-000000002"]


@pytest.mark.parametrize("error", [errno.EIO, errno.ESTALE, errno.EACCES])
@pytest.mark.parametrize("name", [SUMS, "facts.json", ""], ids=["sums", "file", "directory"])
def test_what_cannot_be_read_now_stays(
    checkpoints: Path, monkeypatch: pytest.MonkeyPatch, name: str, error: int
) -> None:
    """The start ends in a line, and when the disk is back nothing has been lost."""
    newest = checkpoints / "step-000000002"
    refuse_to_read(monkeypatch, newest / name, error)
    assert message_of(newest_whole, checkpoints) == (
        f"{newest / name}: cannot be read: {os.strerror(error)}; try again, or rename "
        "step-000000002 to go on without it"
    )
    assert names(checkpoints) == BOTH
    monkeypatch.undo()
    assert newest_whole(checkpoints) == newest


def refuse_to_read(monkeypatch: pytest.MonkeyPatch, refused: Path, error: int) -> None:
    """Permissions would not keep root from it."""
    for method in ("read_bytes", "open", "iterdir"):
        real = getattr(Path, method)

        def attempt(self: Path, *arguments: object, real: object = real, **named: object) -> object:
            if self == refused:
                raise OSError(error, os.strerror(error), str(self))
            return real(self, *arguments, **named)  # type: ignore[operator]

        monkeypatch.setattr(Path, method, attempt)


@pytest.mark.parametrize("damage", ["cut", "removed", "sums removed", "directory", "superfluous"])
def test_what_is_damaged_is_put_aside(
    checkpoints: Path, capsys: pytest.CaptureFixture[str], damage: str
) -> None:
    """Whatever was done to it, it will not become whole again."""
    newest = checkpoints / "step-000000002"
    file = newest / (SUMS if damage == "sums removed" else "facts.json")
    if damage == "cut":
        os.truncate(file, 3)
    elif damage == "superfluous":
        (newest / "more").touch()
    else:
        file.unlink()
    if damage == "directory":
        file.mkdir()
    assert newest_whole(checkpoints) == checkpoints / "step-000000001"
    assert names(checkpoints) == ["latest", "step-000000001", "step-000000002.damaged-1"]
    assert os.readlink(checkpoints / "latest") == "step-000000001"
    told = capsys.readouterr().err
    assert told.startswith(f"warning: {newest}/") and told.count("\n") == 1
    assert told.endswith(
        "it is step-000000002.damaged-1 now, the run goes on from step-000000001\n"
    )


def test_a_damaged_one_that_cannot_be_put_aside_is_told(
    checkpoints: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(self: Path, target: Path) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(self))

    (checkpoints / "step-000000002" / "facts.json").unlink()
    monkeypatch.setattr(Path, "rename", refuse)
    assert message_of(newest_whole, checkpoints) == (
        f"{checkpoints}: its damaged checkpoints cannot be renamed: Permission denied"
    )
    assert names(checkpoints) == BOTH and capsys.readouterr().err == ""


def test_where_none_is_whole_all_stay(checkpoints: Path) -> None:
    for step in (1, 2):
        (checkpoints / f"step-00000000{step}" / "facts.json").unlink()
    assert message_of(newest_whole, checkpoints) == (
        f"{checkpoints}/step-000000002/facts.json: is missing from the checkpoint; "
        f"no other is whole: remove {checkpoints} to begin anew"
    )
    assert names(checkpoints) == BOTH and latest_checkpoint(checkpoints) is not None
