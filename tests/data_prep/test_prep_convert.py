"""The common part of all converters: order, shards, index, resume, refusals."""

import errno
import fcntl
import json
import os
import re
import shutil
from collections import namedtuple
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from prep_sources import (
    CLASSES,
    QUICK,
    class_images,
    contents,
    convert_train,
    encoded,
    image_folders,
    is_refused,
    noise,
    run_command,
    samples_of,
    smooth,
    succeeds,
    write_files,
)
from webdataset.tariterators import base_plus_ext

import lipnext_scale
from data_prep import convert, imagenet
from data_prep.convert import Journal, SetPlan, sample_key
from lipnext_scale.data.index import read_index

pytestmark = pytest.mark.slow  # all of them together take half a minute


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    return image_folders(tmp_path_factory.mktemp("source"), train=5)


# --- what is written --------------------------------------------------------------------------

names = st.text(max_size=400) | st.text(st.sampled_from("./\\ab\x00_~"), max_size=20)


@given(names, st.integers(1, 10**8), st.data())
@example("../../x", 10, None)
@example("/etc/passwd", 10, None)
@example("a.b.c.JPEG", 10, None)
@example("x" * 300 + ".png", 10, None)
@example("\udcff\n\x1b[31m.png", 10, None)
def test_keys_are_safe_and_different(name, count, data):
    """Letters, digits, _ and - alone; short; and of another number always another."""
    number = data.draw(st.integers(0, count - 1)) if data else count - 1
    key = sample_key(number, count, name)
    assert re.fullmatch(r"[A-Za-z0-9_-]{1,95}", key)
    assert base_plus_ext(f"{key}.jpg") == (key, "jpg")
    assert key.split("_")[0] == f"{number:0{max(6, len(str(count - 1)))}d}"
    assert sample_key(7, 10, "n01/n01_12.JPEG") == "000007_n01_12"


def test_every_sample_once_in_a_global_shuffle(source, tmp_path):
    """All 20 images with their bytes and labels, in an order that no class or shard keeps together,
    the same for the same seed; the index describes it."""
    convert_train(source, tmp_path / "a", *QUICK, "--shard-samples", 7)
    found = samples_of(tmp_path / "a", "train")
    assert {key.split("_", 1)[1]: (s.label, s.content) for key, s in found.items()} == {
        name.split("/")[1][: -len(".JPEG")]: (CLASSES.index(name.split("/")[0]), content)
        for name, content in class_images(5).items()
    }
    order = [int(key.split("_")[0]) for key in found]
    assert order == np.random.RandomState(0).permutation(20).tolist()
    index = read_index(tmp_path / "a" / "train.index.json")
    assert [shard.file for shard in index.shards] == [f"train-{i:06d}.tar" for i in range(3)]
    assert [shard.samples for shard in index.shards] == [7, 7, 6]
    for label in range(4):
        assert sum(shard.class_counts.get(str(label), 0) for shard in index.shards) == 5
    assert index.classes == CLASSES and index.skipped == []
    assert index.source["samples"] == 20 and len(index.source["fingerprint"]) == 64
    assert index.converter["name"] == "data_prep.imagenet"
    assert index.converter["version"] == lipnext_scale.__version__
    assert index.converter["settings"]["shard_samples"] == 7
    files = {"train.index.json", "train.index.npy", *(shard.file for shard in index.shards)}
    assert {path.name for path in (tmp_path / "a").iterdir()} == files
    convert_train(source, tmp_path / "b", *QUICK, "--seed", 1)
    assert [int(k.split("_")[0]) for k in samples_of(tmp_path / "b", "train")] != order


def test_bytes_follow_from_the_source_alone(source, tmp_path):
    """Another number of processes, another place, other times: the same bytes of every file, and no
    place, user or host in any of them."""
    moved = tmp_path / "elsewhere" / "copy"
    shutil.copytree(source, moved)
    convert_train(source, tmp_path / "a", "--workers", 0)
    convert_train(moved, tmp_path / "b", "--workers", 3)
    one = contents(tmp_path / "a")
    assert one == contents(tmp_path / "b")
    everything = b"".join(content or b"" for content in one.values())
    for word in (str(tmp_path), str(source), os.uname().nodename):
        assert word.encode() not in everything


def test_hostile_names(tmp_path):
    """Dots, letters of other scripts, control characters, bytes that are no text, 250 letters: all
    go in, with keys that are safe and files that are JSON."""
    names = ["a.b.c.JPEG", "犬.png", "\x1b[31mred\n.jpg", "x" * 250, os.fsdecode(b"\xff\xfe.jpg")]
    images = {f"one/{name}": encoded(noise(4, 4, seed=i)) for i, name in enumerate(names)}
    bad = {f"two/{name}": b"no image" for name in names}
    write_files(tmp_path / "source", images | bad)
    argv = ("--source", tmp_path / "source", "--split", "train", "--out", tmp_path / "out")
    assert "\x1b" not in succeeds(imagenet.main, *argv, *QUICK, "--on-bad", "skip")
    found = samples_of(tmp_path / "out", "train")
    assert {sample.content for sample in found.values()} == set(images.values())
    assert len(read_index(tmp_path / "out" / "train.index.json").skipped) == len(names)


def test_changes_are_counted(tmp_path):
    """A CMYK JPEG and a WebP: two lines, and the same in the index; the PNG named JPEG stays."""
    files = {
        "one/cmyk.JPEG": encoded(smooth(9, 9), "JPEG", "CMYK"),
        "one/png.JPEG": encoded(noise(9, 9, 3)),
        "two/web.JPEG": encoded(noise(9, 9, 3), "WEBP", lossless=True),
    }
    write_files(tmp_path / "s", files)
    argv = ("--source", tmp_path / "s", "--split", "val", "--out", tmp_path / "out", *QUICK)
    printed = succeeds(imagenet.main, *argv)
    assert "1 × CMYK JPEG to RGB JPEG" in printed and "1 × RGB WEBP to RGB PNG" in printed
    changed = read_index(tmp_path / "out" / "test.index.json").converter["changed"]
    assert sorted(changed.values()) == [1, 1]
    found = {key.split("_")[1]: s for key, s in samples_of(tmp_path / "out", "test").items()}
    assert found["png"].kind == "png" and found["png"].content == files["one/png.JPEG"]


# --- bad images -------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
def test_bad_images_fail_by_name_and_can_then_be_skipped(tmp_path, workers):
    """Both are named in one run; with skip the rest is not made again, and they are listed.
    Skipping in a second run or in the first gives the same bytes; a fixed image is read again."""
    source, out = image_folders(tmp_path / "source", train=5), tmp_path / "out"
    bad = {f"{name}/{name}_{i}.JPEG" for name, i in ((CLASSES[0], 1), (CLASSES[3], 3))}
    for name in bad:
        path = source / "train" / name
        path.write_bytes(path.read_bytes()[:-50] + bytes(50))  # of the same size
    argv = ("--source", source, "--split", "train", "--shard-samples", 4, "--workers", workers)
    for directory in (out, tmp_path / "fixed"):
        outcome = run_command(imagenet.main, *argv, "--out", directory)
        assert outcome.code == 2 and outcome.err.count("\n") == 1
        assert "bad images: 2, the first is " in outcome.err and "--on-bad skip" in outcome.err
        assert all(
            f"{name}: its JPEG data is damaged: Premature end" in outcome.out for name in bad
        )
        assert not (directory / "train.index.json").exists()
    before = {path.name: path.stat().st_mtime_ns for path in out.glob("*.tar")}
    skip = ("--on-bad", "skip")
    printed = succeeds(imagenet.main, *argv, *skip, "--out", out)
    assert "continues, 5 of 5 shards are finished" in printed
    assert "2 bad images were left out" in printed
    assert {path.name: path.stat().st_mtime_ns for path in out.glob("*.tar")} == before
    index = read_index(out / "train.index.json")
    assert index.samples == 18 == len(samples_of(out, "train"))
    assert {entry["name"] for entry in index.skipped} == bad
    assert "complete, but without 2 bad images" in is_refused(imagenet.main, *argv, "--out", out)
    assert "2 bad images were left out" in succeeds(imagenet.main, *argv, *skip, "--out", out)
    succeeds(imagenet.main, *argv, *skip, "--out", tmp_path / "at once")
    assert contents(out) == contents(tmp_path / "at once")
    write_files(source / "train", class_images(5))
    succeeds(imagenet.main, *argv, "--out", tmp_path / "fixed")
    assert len(samples_of(tmp_path / "fixed", "train")) == 20


def test_nothing_but_bad_images(tmp_path):
    """An empty set is no outcome, with skip either."""
    write_files(tmp_path / "s", {f"one/{i:02d}.jpg": b"none" for i in range(5)})
    argv = ("--source", tmp_path / "s", "--split", "train", "--out", tmp_path / "out", *QUICK)
    for on_bad in ("fail", "skip"):
        assert "all 5 images are bad" in is_refused(imagenet.main, *argv, "--on-bad", on_bad)


# --- before anything is written ---------------------------------------------------------------


def test_a_dry_run_writes_nothing(source, tmp_path):
    """It prints samples, classes, shards and free bytes; not even the directory is made. What the
    disk check takes is at least what is written, and not much more."""
    argv = ("--source", source, "--out", tmp_path / "out", "--shard-samples", 4)
    printed = succeeds(imagenet.main, *argv, "--dry-run")
    assert "train: 20 samples of 4 classes in 5 shards of 4" in printed
    assert "test: 8 samples of 4 classes in 2 shards of 4" in printed
    assert "free; nothing was written" in printed and not (tmp_path / "out").exists()
    succeeds(imagenet.main, *argv)
    written = sum(path.stat().st_size for path in (tmp_path / "out").glob("*.tar"))
    needed = int(printed.split("about ")[-1].split(" bytes to write")[0].replace(",", ""))
    assert written <= needed <= written * 1.2 + 7 * 20_000


def test_a_disk_too_small(source, tmp_path, monkeypatch):
    """Both numbers are named before a byte is written."""
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**6, 10**6 - 1234, 1234))
    error = is_refused(imagenet.main, "--source", source, "--out", tmp_path / "out", *QUICK)
    assert "bytes are needed, 1,234 are free" in error and not (tmp_path / "out").exists()


@pytest.mark.parametrize("workers", [0, 2])
def test_a_disk_that_fills_up(source, tmp_path, monkeypatch, workers):
    """One line names it; what was finished is kept, and continues when there is room."""
    left, sync = iter(range(4)), os.fsync

    def full(descriptor: int) -> None:
        if next(left, None) is None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        sync(descriptor)

    argv = ("--source", source, "--split", "train", "--shard-samples", 4, "--out", tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        error = is_refused(imagenet.main, *argv, "--workers", workers)
    assert "cannot be written: No space left on device; finished shards are kept" in error
    assert list(tmp_path.glob("train-*.tar")) and not list(tmp_path.glob("*.partial"))
    assert "continues, " in convert_train(source, tmp_path)
    assert len(samples_of(tmp_path, "train")) == 20


def test_what_cannot_be_read_or_written(source, tmp_path, monkeypatch):
    """An output that is a file. An image that vanishes is no bad image: with skip too the command
    stops and names it."""
    (tmp_path / "out").write_text("")
    argv = ("--source", source, "--out", tmp_path / "out", *QUICK)
    assert str(tmp_path / "out") in is_refused(imagenet.main, *argv)
    other = tmp_path / "other"
    shutil.copytree(source, other)

    def remove_first(*arguments):
        (other / "train" / CLASSES[1] / f"{CLASSES[1]}_2.JPEG").unlink()
        convert.run_conversions(*arguments)

    monkeypatch.setattr(imagenet, "run_conversions", remove_first)
    argv = ("--source", other, "--out", tmp_path / "new", "--split", "train", "--on-bad", "skip")
    outcome = run_command(imagenet.main, *argv, *QUICK)
    assert outcome.code == 2
    assert f"{CLASSES[1]}_2.JPEG: cannot be read: No such file" in outcome.err


# --- what lies in the way: a part of the set continues, all of it stays, else a refusal ---------


@pytest.fixture
def half(source, tmp_path) -> Path:
    """A set as a kill after two of its five shards leaves it, with a third half-written; beside it
    the same set complete."""
    convert_train(source, tmp_path / "complete")
    directory = tmp_path / "half"
    argv = ("--source", source, "--split", "train", "--shard-samples", "4", "--out", directory)
    arguments = imagenet.parse([str(argument) for argument in argv])
    plan = SetPlan(imagenet.set_sources(arguments)[0], arguments)
    directory.mkdir()
    Journal(directory, "train").begin(plan.identity)
    for shard in (0, 3):
        plan.make(shard, lambda: None)
    for name in ("train-000001.tar", "train.journal/000001.json", "train.index.npy"):
        (directory / f"{name}.partial").write_bytes(b"half")
    return directory


def test_a_complete_set_is_left_alone(source, tmp_path):
    """The same command again touches nothing. A set that lost a shard is not called complete."""
    convert_train(source, tmp_path)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    assert "train: already complete, 20 samples" in convert_train(source, tmp_path)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == before
    (tmp_path / "train-000002.tar").unlink()
    argv = ("--source", source, "--split", "train", "--out", tmp_path, "--shard-samples", 4)
    assert "train-000002.tar: is missing" in is_refused(imagenet.main, *argv)


@pytest.mark.parametrize("lost", [False, True])
def test_continuing_ends_with_the_same_bytes(source, half, lost):
    """Finished shards are not made again, halves are removed, and all is as in one run. A note
    counts only while its shard is there in its full size."""
    kept = half / "train-000003.tar"
    written = kept.stat().st_mtime_ns
    if lost:
        kept.unlink()
        os.truncate(half / "train-000000.tar", 512)
    assert f"continues, {0 if lost else 2} of 5 shards are finished" in convert_train(source, half)
    assert (kept.stat().st_mtime_ns == written) is not lost
    assert contents(half) == contents(half.parent / "complete")


@pytest.mark.parametrize("state", ["half", "complete"])
def test_other_settings_and_sources_are_refused(source, half, tmp_path, state):
    """Complete or not, a set of other settings stays as it is, and the difference is named."""
    before = contents(tmp_path / state)
    argv = ("--split", "train", "--shard-samples", 4, "--out", tmp_path / state, *QUICK)
    for options, message in (
        (("--seed", 1), "its seed differs: 0, asked for 1"),
        (("--shard-samples", 5), "its shard_samples differs: 4, asked for 5"),
        (("--short-side", 8), "its short_side differs: 0, asked for 8"),
        (("--classes", 4, "--class-seed", 3), "its source.class_seed differs: None, asked for 3"),
        (("--classes", 3), "its classes differ"),
    ):
        error = is_refused(imagenet.main, "--source", source, *argv, *options)
        assert message in error, error
    other = tmp_path / "other"
    shutil.copytree(source, other)
    (other / "train" / CLASSES[0] / "n01440764_0.JPEG").rename(other / "train" / CLASSES[0] / "x")
    error = is_refused(imagenet.main, "--source", other, *argv)
    assert "the names, labels or sizes in its source differ" in error
    assert contents(tmp_path / state) == before


def test_another_version_accepts_only_what_is_complete(source, half, monkeypatch):
    """No set is made of two versions' shards."""
    monkeypatch.setattr(convert, "__version__", "9.9")
    argv = ("--source", source, "--split", "train", "--shard-samples", 4, *QUICK)
    error = is_refused(imagenet.main, *argv, "--out", half)
    assert f"its version differs: {lipnext_scale.__version__}, asked for 9.9" in error
    assert json.loads((half / "train.journal" / "plan.json").read_bytes())["classes"] == CLASSES
    complete = half.parent / "complete"
    assert "already complete" in succeeds(imagenet.main, *argv, "--out", complete)


def test_unknown_files_are_not_overwritten(source, tmp_path):
    """A shard without an index or journal may be anything of the user's."""
    write_files(tmp_path, {"train-000001.tar": b"precious"})
    argv = ("--source", source, "--split", "train", "--out", tmp_path, *QUICK)
    assert "train-000001.tar: belongs to no known set" in is_refused(imagenet.main, *argv)
    assert contents(tmp_path) == {"train-000001.tar": b"precious"}


def test_two_conversions_at_a_time(source, tmp_path, monkeypatch):
    """The second waits a while and is refused; when the lock is free again it starts."""
    monkeypatch.setattr(convert, "PATIENCE", 0.2)
    with (tmp_path / convert.LOCK).open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        argv = ("--source", source, "--split", "train", "--out", tmp_path, *QUICK)
        assert "another conversion is writing there" in is_refused(imagenet.main, *argv)
        assert [path.name for path in tmp_path.iterdir()] == [convert.LOCK]
    convert_train(source, tmp_path)
    assert not (tmp_path / convert.LOCK).exists()
