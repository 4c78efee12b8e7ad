"""Names, the newest, retention, and the checkpoint that a run continues from."""

import errno
import os
import shutil
from pathlib import Path

import pytest
from checkpoint_parts import assert_holds, message_of, sample_shards

from lipnext_scale.checkpoint import (
    SUMS,
    CheckpointWriter,
    latest_checkpoint,
    newest_intact_checkpoint,
    read_facts,
)


def save(directory: Path, *steps: int, keep_last: int = 9, keep_every: int = 0) -> None:
    writer = CheckpointWriter(directory, keep_last, keep_every)
    for step in steps:
        writer.save(step, sample_shards(step), {})
    writer.wait()


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


@pytest.mark.parametrize(
    "keep_last, keep_every, stay",
    [(2, 0, [6, 7]), (99, 0, [1, 2, 3, 4, 5, 6, 7]), (1, 3, [3, 6, 7])],
)
def test_the_newest_and_the_round_steps_stay(tmp_path, keep_last, keep_every, stay):
    save(tmp_path, *range(1, 8), keep_last=keep_last, keep_every=keep_every)
    assert names(tmp_path) == ["latest", *(f"step-{step:09d}" for step in stay)]
    for step in stay:
        assert_holds(tmp_path / f"step-{step:09d}", step)


def test_the_one_just_written_always_stays(tmp_path):
    """Also when newer ones fill keep_last; the newest is still the one of the highest step."""
    save(tmp_path, 10, 20)
    save(tmp_path, 5, keep_last=2)
    assert names(tmp_path) == ["latest", "step-000000005", "step-000000010", "step-000000020"]
    assert os.readlink(tmp_path / "latest") == "step-000000020"


def test_a_run_copied_without_its_links_continues(tmp_path):
    """A copy has made a directory of `latest`: the next save makes a link of it again."""
    save(tmp_path / "one", 1)
    shutil.copytree(tmp_path / "one", tmp_path / "other")  # follows links
    assert not (tmp_path / "other" / "latest").is_symlink()
    save(tmp_path / "other", 2)
    assert os.readlink(tmp_path / "other" / "latest") == "step-000000002"
    assert read_facts(tmp_path / "other" / "latest.copy-1")["step"] == 1  # the user may want it


def test_only_complete_checkpoints_are_seen(tmp_path):
    """Not what is half written or half removed, not files, links or other names."""
    assert latest_checkpoint(tmp_path / "nowhere") is None
    save(tmp_path, 1)
    for name in ("2.partial", "3.deleting", "best", "0000000004", "4", "-00000009"):
        (tmp_path / f"step-{name}").mkdir()
    (tmp_path / "step-000000006.partial").mkdir()
    (tmp_path / "step-000000008").write_text("a file")
    (tmp_path / "step-000000009").symlink_to("step-000000001")
    assert latest_checkpoint(tmp_path) == tmp_path / "step-000000001"


def test_a_save_removes_what_a_kill_left_and_nothing_else(tmp_path):
    for name in ("step-000000001.partial", "step-000000009.deleting"):
        (tmp_path / name / "inner").mkdir(parents=True)
        (tmp_path / name / "__0_0.distcp").write_text("half")
    (tmp_path / "latest.partial").symlink_to("nowhere")
    (tmp_path / "step-best").mkdir()
    (tmp_path / "notes.partial").write_text("mine")
    save(tmp_path, 1)
    assert names(tmp_path) == ["latest", "notes.partial", "step-000000001", "step-best"]
    assert_holds(tmp_path / "step-000000001", 1)


def test_a_step_can_be_saved_again(tmp_path):
    save(tmp_path, 4)
    writer = CheckpointWriter(tmp_path, 3)
    writer.save(4, sample_shards(44), {"again": True}, asynchronous=False)
    assert names(tmp_path) == ["latest", "step-000000004"]
    assert_holds(latest_checkpoint(tmp_path), 44)
    assert read_facts(latest_checkpoint(tmp_path))["again"]


def test_all_is_on_the_disk_before_it_gets_its_name(tmp_path, monkeypatch):
    """Every file and the list of them are synced before the rename, the name after it."""
    sync, rename, order = os.fsync, Path.rename, []

    def noted_sync(descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        order.append((path.name, path.stat().st_size))
        sync(descriptor)

    def noted_rename(path: Path, target: Path) -> Path:
        order.append(f"{path.name} to {target.name}")
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", noted_sync)
    monkeypatch.setattr(Path, "rename", noted_rename)
    save(tmp_path, 1)
    path = tmp_path / "step-000000001"
    sizes = {file.name: file.stat().st_size for file in path.iterdir()}
    sizes[".metadata.tmp"] = sizes.pop(".metadata")  # its name at that time
    named = order.index("step-000000001.partial to step-000000001")
    assert set(sizes.items()) <= set(order[:named])
    assert order[named - 1][0] == "step-000000001.partial"
    assert order[named + 1][0] == tmp_path.name


# --- the newest intact one --------------------------------------------------------------------

BOTH = ["latest", "step-000000001", "step-000000002"]


@pytest.fixture
def checkpoints(tmp_path: Path) -> Path:
    save(tmp_path / "checkpoints", 1, 2)
    return tmp_path / "checkpoints"


@pytest.mark.parametrize("name", [SUMS, "facts.json", ""], ids=["sums", "file", "directory"])
def test_what_cannot_be_read_now_stays(checkpoints, monkeypatch, name):
    """The start ends in a line; when the disk works again nothing has been lost."""
    refused = checkpoints / "step-000000002" / name
    for method in ("read_bytes", "open", "iterdir"):  # permissions would not stop root
        real = getattr(Path, method)

        def attempt(self, *arguments, real=real, **named):
            if self == refused:
                raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(self))
            return real(self, *arguments, **named)

        monkeypatch.setattr(Path, method, attempt)
    assert message_of(newest_intact_checkpoint, checkpoints) == (
        f"{refused}: cannot be read: {os.strerror(errno.ESTALE)}; try again, or rename "
        "step-000000002 to continue without it"
    )
    assert names(checkpoints) == BOTH
    monkeypatch.undo()
    assert newest_intact_checkpoint(checkpoints) == checkpoints / "step-000000002"


@pytest.mark.parametrize("damage", ["cut", "removed", "sums removed", "superfluous"])
def test_what_is_damaged_is_put_aside(checkpoints, capsys, damage):
    newest = checkpoints / "step-000000002"
    file = newest / (SUMS if damage == "sums removed" else "facts.json")
    if damage == "cut":
        os.truncate(file, 3)
    elif damage == "superfluous":
        (newest / "more").touch()
    else:
        file.unlink()
    assert newest_intact_checkpoint(checkpoints) == checkpoints / "step-000000001"
    assert names(checkpoints) == ["latest", "step-000000001", "step-000000002.damaged-1"]
    assert os.readlink(checkpoints / "latest") == "step-000000001"
    error = capsys.readouterr().err
    assert error.startswith(f"warning: {newest}/") and error.count("\n") == 1
    assert error.endswith(
        "it is step-000000002.damaged-1 now, the run continues from step-000000001\n"
    )


def test_where_none_is_intact_all_stay(checkpoints):
    for step in (1, 2):
        (checkpoints / f"step-00000000{step}" / "facts.json").unlink()
    assert message_of(newest_intact_checkpoint, checkpoints) == (
        f"{checkpoints}/step-000000002/facts.json: is missing from the checkpoint; "
        f"no other is intact: remove {checkpoints} to begin anew"
    )
    assert names(checkpoints) == BOTH
