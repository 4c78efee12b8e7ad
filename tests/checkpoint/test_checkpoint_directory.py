"""Names, the newest, retention, and what a kill leaves between two renames."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from checkpoint_parts import assert_holds, sample_pieces

from lipnext_scale.checkpoint import CheckpointWriter, latest_checkpoint, read_facts
from lipnext_scale.checkpoint.directory import complete_checkpoints
from lipnext_scale.errors import UserError


def save(directory: Path, *steps: int, keep_last: int = 9, keep_every: int = 0) -> None:
    writer = CheckpointWriter(directory, keep_last, keep_every)
    for step in steps:
        writer.save(step, sample_pieces(step), {})
    writer.wait()


def steps_in(directory: Path) -> list[int]:
    """Of all that is there: nothing else may be."""
    names = {path.name for path in directory.iterdir()} - {"latest"}
    assert all(name.startswith("step-") and len(name) == 14 for name in names), names
    return sorted(int(name[5:]) for name in names)


@pytest.mark.parametrize(
    "keep_last, keep_every, stay",
    [
        (1, 0, [7]),
        (2, 0, [6, 7]),
        (99, 0, [1, 2, 3, 4, 5, 6, 7]),
        (1, 3, [3, 6, 7]),
        (2, 2, [2, 4, 6, 7]),
        (1, 7, [7]),
    ],
)
def test_the_newest_and_the_round_steps_stay(tmp_path, keep_last, keep_every, stay):
    """keep_last newest, and every multiple of keep_every; each of them whole."""
    save(tmp_path, *range(1, 8), keep_last=keep_last, keep_every=keep_every)
    assert steps_in(tmp_path) == stay
    for step in stay:
        assert_holds(tmp_path / f"step-{step:09d}", step)


def test_the_one_just_written_always_stays(tmp_path):
    """Also when newer ones fill keep_last; and the newest is still the one of the highest step."""
    save(tmp_path, 10, 20)
    save(tmp_path, 5, keep_last=2)
    assert steps_in(tmp_path) == [5, 10, 20]
    assert os.readlink(tmp_path / "latest") == "step-000000020"
    save(tmp_path, 30, keep_last=2)
    assert steps_in(tmp_path) == [20, 30]


def test_the_link_shows_the_newest(tmp_path):
    """`latest` is a relative link, so the directory can be moved, and it always leads somewhere."""
    for step in (1, 2, 3):
        save(tmp_path / "one", step, keep_last=1)
        assert os.readlink(tmp_path / "one" / "latest") == f"step-{step:09d}"
    (tmp_path / "one").rename(tmp_path / "other")
    assert read_facts(tmp_path / "other" / "latest")["step"] == 3


def test_a_run_copied_without_its_links_goes_on(tmp_path):
    """Where a copy has made a directory of `latest`, the next save makes a link of it again."""
    save(tmp_path / "one", 1)
    shutil.copytree(tmp_path / "one", tmp_path / "other")  # follows links
    assert not (tmp_path / "other" / "latest").is_symlink()
    save(tmp_path / "other", 2)
    assert os.readlink(tmp_path / "other" / "latest") == "step-000000002"
    assert read_facts(tmp_path / "other" / "latest.copy-1")["step"] == 1  # it may be somebody's


def test_only_complete_checkpoints_are_seen(tmp_path):
    """Not what is half written or half removed, not files, links or names that are not ours."""
    assert latest_checkpoint(tmp_path) is None
    assert latest_checkpoint(tmp_path / "nowhere") is None
    save(tmp_path, 1)
    for name in ("2.partial", "3.deleting", "best", "0000000004", "4", "000000005.pt", "-00000009"):
        (tmp_path / f"step-{name}").mkdir()
    (tmp_path / "step-000000006.partial").mkdir()
    (tmp_path / "step-000000007.deleting").mkdir()
    (tmp_path / "step-000000008").write_text("a file")
    (tmp_path / "step-000000009").symlink_to("step-000000001")
    (tmp_path / "old-step-000000010").mkdir()
    assert latest_checkpoint(tmp_path) == tmp_path / "step-000000001"


def test_a_save_removes_what_a_kill_left_and_nothing_else(tmp_path):
    """Whole `.partial` and `.deleting` directories go; a user's own files stay."""
    for name in ("step-000000001.partial", "step-000000009.deleting"):
        (tmp_path / name / "inner").mkdir(parents=True)
        (tmp_path / name / "__0_0.distcp").write_text("half")
    (tmp_path / "latest.partial").symlink_to("nowhere")
    (tmp_path / "step-best").mkdir()
    (tmp_path / "notes.partial").write_text("mine")
    save(tmp_path, 1)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"step-000000001", "latest", "step-best", "notes.partial"}
    assert_holds(tmp_path / "step-000000001", 1)


def test_a_step_can_be_saved_again(tmp_path):
    """The new one takes the name; of the old one nothing is left."""
    save(tmp_path, 4)
    writer = CheckpointWriter(tmp_path, 3)
    writer.save(4, sample_pieces(44), {"again": True}, asynchronous=False)
    assert steps_in(tmp_path) == [4]
    assert_holds(latest_checkpoint(tmp_path), 44)
    assert read_facts(latest_checkpoint(tmp_path))["again"]


def test_a_kill_while_a_step_is_replaced_loses_nothing(tmp_path, monkeypatch):
    """Between the two renames the old one counts, and the next save gives it its name back."""
    save(tmp_path, 4)
    rename = Path.rename

    def fail_at_the_name(path: Path, target: Path) -> Path:
        if path.name.endswith(".partial"):
            raise OSError(5, "Input/output error")
        return rename(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", fail_at_the_name)
        with pytest.raises(UserError, match="cannot be written: Input/output error"):
            save(tmp_path, 4)
    assert latest_checkpoint(tmp_path) == tmp_path / "step-000000004.replaced"
    assert_holds(latest_checkpoint(tmp_path), 4)
    save(tmp_path, 5)
    assert steps_in(tmp_path) == [4, 5]
    assert_holds(tmp_path / "step-000000004", 4)


def test_the_replaced_one_goes_when_the_new_one_has_its_name(tmp_path):
    """A kill after the second rename: the new one counts, and the next save removes the old."""
    save(tmp_path, 4)
    (tmp_path / "step-000000004").rename(tmp_path / "step-000000004.replaced")
    (tmp_path / "step-000000004").mkdir()
    assert complete_checkpoints(tmp_path) == {4: tmp_path / "step-000000004"}
    save(tmp_path, 4)
    assert steps_in(tmp_path) == [4]
    assert_holds(latest_checkpoint(tmp_path), 4)


def test_all_is_on_the_disk_before_it_gets_its_name(tmp_path, monkeypatch):
    """Every file in full and the list of them are synced before the rename, the name after it."""
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
    sizes[".metadata.tmp"] = sizes.pop(".metadata")  # as it was called then
    named = order.index("step-000000001.partial to step-000000001")
    assert set(sizes.items()) <= set(order[:named])
    assert order[named - 1][0] == "step-000000001.partial"
    assert order[named + 1][0] == tmp_path.name


@pytest.mark.slow
def test_the_interpreter_does_not_end_before_the_checkpoint_is_complete(tmp_path):
    """A program that saves and ends at once has saved, or says why not."""
    program = (
        "import sys, torch\nfrom pathlib import Path\n"
        "from lipnext_scale.checkpoint import CheckpointWriter, StateShard\n"
        "tensor = torch.arange(1 << 20)\n"
        "piece = StateShard(tensor, (1 << 20,), (0,))\n"
        "CheckpointWriter(Path(sys.argv[1]), 1).save(7, {'t': piece}, {})\n"
    )
    command = [sys.executable, "-c", program]
    subprocess.run([*command, str(tmp_path / "here")], check=True)
    assert steps_in(tmp_path / "here") == [7]
    (tmp_path / "file").write_text("")
    failed = subprocess.run([*command, str(tmp_path / "file")], stderr=subprocess.PIPE, text=True)
    assert "step-000000007: the checkpoint cannot be written: " in failed.stderr
