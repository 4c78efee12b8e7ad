"""What lies in the way of a conversion: a part of it goes on, all of it is left, else a refusal."""

import fcntl
import json
import os
import shutil
from pathlib import Path

import pytest
from prep_sources import (
    CLASSES,
    QUICK,
    contents,
    convert_train,
    image_folders,
    is_refused,
    succeeds,
    write_files,
)

import lipnext_scale
from data_prep import imagenet
from data_prep.writing import shard_jobs
from data_prep.writing.convert import SetPlan
from data_prep.writing.shard_jobs import Journal

pytestmark = pytest.mark.slow  # all of them together take half a minute


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    return image_folders(tmp_path_factory.mktemp("source"), train=5)


def test_a_complete_set_is_left_alone(source, tmp_path):
    """The same command again says so and touches nothing."""
    convert_train(source, tmp_path)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    assert "train: already complete, 20 samples" in convert_train(source, tmp_path)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == before


def half_done(source: Path, out: Path) -> None:
    """A set as a kill after two of its five shards leaves it, with a third half-written."""
    convert_train(source, out / "whole")
    directory = out / "half"
    plan = json.loads((out / "whole" / "train.index.json").read_bytes())
    identity = {key: plan[key] for key in ("converter", "source", "classes")}
    del identity["converter"]["changed"]
    directory.mkdir()
    Journal(directory, "train").begin(identity)
    argv = ("--source", source, "--split", "train", "--shard-samples", "4", "--out", directory)
    arguments = imagenet.parse([str(argument) for argument in argv])
    options = imagenet.conversion_options(arguments, "data_prep.imagenet")
    made = SetPlan(imagenet.set_sources(arguments)[0], options)
    for shard in (0, 3):
        made.maker().make(shard, made.numbers(shard), lambda done: None)
    (directory / "train-000001.tar.partial").write_bytes(b"half")
    (directory / "train.journal" / "000001.json.partial").write_bytes(b"half")
    (directory / "train.index.npy.partial").write_bytes(b"half")
    (directory / "train.journal.partial").mkdir()


def test_going_on_ends_with_the_same_bytes(source, tmp_path):
    """Finished shards are not made again, halves are removed, and all is as in one run."""
    half_done(source, tmp_path)
    kept = (tmp_path / "half" / "train-000003.tar").stat().st_mtime_ns
    assert "goes on, 2 of 5 shards are finished" in convert_train(source, tmp_path / "half")
    assert (tmp_path / "half" / "train-000003.tar").stat().st_mtime_ns == kept
    assert contents(tmp_path / "half") == contents(tmp_path / "whole")


def test_a_noted_shard_that_is_gone_is_made_again(source, tmp_path):
    """A note is believed only while its shard is there in its full size."""
    half_done(source, tmp_path)
    (tmp_path / "half" / "train-000003.tar").unlink()
    os.truncate(tmp_path / "half" / "train-000000.tar", 512)
    assert "goes on, 0 of 5" in convert_train(source, tmp_path / "half")
    assert contents(tmp_path / "half") == contents(tmp_path / "whole")


@pytest.mark.parametrize(
    "options, said",
    [
        (("--seed", 1), "its seed is 0, asked for 1"),
        (("--shard-samples", 5), "its shard_samples is 4, asked for 5"),
        (("--short-side", 8), "its short_side is 0, asked for 8"),
        (("--max-pixels", 1000), "its max_pixels is 178956970, asked for 1000"),
        (("--classes", 4, "--class-seed", 3), "its source.class_seed is None, asked for 3"),
        (("--classes", 3), "its source.samples is 20, asked for 15"),
    ],
)
@pytest.mark.parametrize("state", ["half", "whole"])
def test_other_settings_are_refused(source, tmp_path, state, options, said):
    """Complete or not, a set of other settings stays as it is, and the difference is named."""
    half_done(source, tmp_path)
    before = contents(tmp_path / state)
    argv = ("--source", source, "--split", "train", "--shard-samples", 4, *QUICK)
    error = is_refused(imagenet.main, *argv, "--out", tmp_path / state, *options)
    assert said in error
    assert contents(tmp_path / state) == before


@pytest.mark.parametrize("state", ["half", "whole"])
def test_another_source_is_refused(source, tmp_path, state):
    """An image more, another name or another size make it another source."""
    half_done(source, tmp_path)
    other = tmp_path / "other"
    shutil.copytree(source, other)
    (other / "train" / CLASSES[0] / "n01440764_0.JPEG").rename(other / "train" / CLASSES[0] / "x")
    argv = ("--source", other, "--split", "train", "--shard-samples", 4, *QUICK)
    error = is_refused(imagenet.main, *argv, "--out", tmp_path / state)
    assert "the names, labels or sizes in its source differ" in error


def test_another_version_does_not_go_on_but_takes_what_is_complete(source, tmp_path, monkeypatch):
    """No set is made of two versions' shards; a finished one is nobody's concern."""
    half_done(source, tmp_path)
    monkeypatch.setattr("data_prep.writing.convert.__version__", "9.9")
    argv = ("--source", source, "--split", "train", "--shard-samples", 4, *QUICK)
    error = is_refused(imagenet.main, *argv, "--out", tmp_path / "half")
    assert f"its version is {lipnext_scale.__version__}, asked for 9.9" in error
    assert "already complete" in succeeds(imagenet.main, *argv, "--out", tmp_path / "whole")


def test_files_of_nobody_are_not_overwritten(source, tmp_path):
    """A shard without an index or journal may be anything of the user's."""
    write_files(tmp_path, {"train-000001.tar": b"precious"})
    argv = ("--source", source, "--split", "train", "--out", tmp_path, *QUICK)
    assert "train-000001.tar: is in the way" in is_refused(imagenet.main, *argv)
    assert contents(tmp_path) == {"train-000001.tar": b"precious"}


def test_a_complete_set_that_lost_a_shard(source, tmp_path):
    """Is not called complete."""
    convert_train(source, tmp_path)
    (tmp_path / "train-000002.tar").unlink()
    argv = ("--source", source, "--split", "train", "--out", tmp_path, "--shard-samples", 4)
    assert "train-000002.tar: is missing" in is_refused(imagenet.main, *argv)


def test_two_conversions_at_a_time(source, tmp_path, monkeypatch):
    """The second waits a while and is refused; when the lock is free again it goes."""
    monkeypatch.setattr(shard_jobs, "PATIENCE", 0.2)
    with (tmp_path / shard_jobs.LOCK).open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        argv = ("--source", source, "--split", "train", "--out", tmp_path, *QUICK)
        error = is_refused(imagenet.main, *argv)
        assert "another conversion is writing there" in error
        assert [path.name for path in tmp_path.iterdir()] == [shard_jobs.LOCK]
    convert_train(source, tmp_path)
    assert not (tmp_path / shard_jobs.LOCK).exists()
