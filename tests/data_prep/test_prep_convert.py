"""The common part of all converters: order, shards, index, reproducibility, refusals."""

import os
import shutil
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
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

import lipnext_scale
from data_prep import imagenet
from data_prep.writing import convert
from data_prep.writing.convert import SHARD_BYTES, default_shard_samples
from lipnext_scale.data.index import read_index

pytestmark = pytest.mark.slow  # all of them together take half a minute


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    return image_folders(tmp_path_factory.mktemp("source"), train=5)


# --- what is written --------------------------------------------------------------------------


def test_every_sample_once_in_a_global_shuffle(source, tmp_path):
    """All 20 images with their bytes and labels, in an order that no class or shard keeps together,
    the same for the same seed."""
    convert_train(source, tmp_path / "a")
    found = samples_of(tmp_path / "a", "train")
    images = class_images(5)
    assert {key.split("_", 1)[1]: (s.label, s.content) for key, s in found.items()} == {
        name.split("/")[1][: -len(".JPEG")]: (CLASSES.index(name.split("/")[0]), content)
        for name, content in images.items()
    }
    order = [int(key.split("_")[0]) for key in found]
    assert sorted(order) == list(range(20)) and order != sorted(order)
    assert order == np.random.RandomState(0).permutation(20).tolist()
    convert_train(source, tmp_path / "b", *QUICK, "--seed", 1)
    assert [int(k.split("_")[0]) for k in samples_of(tmp_path / "b", "train")] != order


def test_the_index_tells_all(source, tmp_path):
    """Shards of a fixed length, class counts, classes, source, converter with version."""
    convert_train(source, tmp_path)
    index = read_index(tmp_path / "train.index.json")
    assert [shard.file for shard in index.shards] == [f"train-{i:06d}.tar" for i in range(5)]
    assert [shard.samples for shard in index.shards] == [4] * 5
    for label in range(4):
        assert sum(shard.class_counts.get(str(label), 0) for shard in index.shards) == 5
    assert index.classes == CLASSES and index.skipped == []
    assert index.source["samples"] == 20 and len(index.source["fingerprint"]) == 64
    assert index.converter["name"] == "data_prep.imagenet"
    assert index.converter["version"] == lipnext_scale.__version__
    assert index.converter["settings"]["shard_samples"] == 4
    names = {"train.index.json", "train.index.npy", *(shard.file for shard in index.shards)}
    assert {path.name for path in tmp_path.iterdir()} == names


def test_the_last_shard_may_be_shorter(source, tmp_path):
    """20 samples in shards of 7."""
    convert_train(source, tmp_path, *QUICK, "--shard-samples", 7)
    index = read_index(tmp_path / "train.index.json")
    assert [shard.samples for shard in index.shards] == [7, 7, 6]


def test_bytes_follow_from_the_source_alone(source, tmp_path):
    """Another number of processes, another place, other times: the same bytes of every file, and no
    place, user or host in any of them."""
    moved = tmp_path / "elsewhere" / "copy"
    shutil.copytree(source, moved)
    convert_train(source, tmp_path / "a", "--workers", 0)
    convert_train(moved, tmp_path / "b", "--workers", 2)
    convert_train(moved, tmp_path / "c", "--workers", 3)
    one = contents(tmp_path / "a")
    assert one == contents(tmp_path / "b") == contents(tmp_path / "c")
    everything = b"".join(content or b"" for content in one.values())
    for word in (str(tmp_path), str(source), os.uname().nodename):
        assert word.encode() not in everything


@given(st.integers(1, 3_000_000), st.integers(100, 10**9))
def test_default_shards(count, size):
    """Near 100 MB and never above, but for an image that is larger; eight shards at least where
    each then has a hundred samples."""
    sizes = np.full(min(count, 10_000), size)
    samples = default_shard_samples(sizes)
    assert 1 <= samples <= len(sizes)
    assert samples == 1 or samples * size <= SHARD_BYTES
    shards = -(-len(sizes) // samples)
    assert shards >= 8 or samples * size > SHARD_BYTES / 2 or samples <= 100 or len(sizes) < 800
    assert shards <= 8 or samples * size > SHARD_BYTES / 2 or samples in (1, 100)


def test_hostile_names(tmp_path):
    """Dots, letters of other scripts, control characters, bytes that are no text, 250 letters: all
    go in, with keys that are safe and files that are JSON."""
    names = ["a.b.c.JPEG", "犬.png", "\x1b[31mred\n.jpg", "x" * 250, os.fsdecode(b"\xff\xfe.jpg")]
    images = {f"one/{name}": encoded(noise(4, 4, seed=i)) for i, name in enumerate(names)}
    bad = {f"two/{name}": b"no image" for name in names}
    write_files(tmp_path / "source", images | bad)
    argv = ("--source", tmp_path / "source", "--split", "train", "--out", tmp_path / "out")
    said = succeeds(imagenet.main, *argv, *QUICK, "--on-bad", "skip")
    assert "\x1b" not in said
    found = samples_of(tmp_path / "out", "train")
    assert {sample.content for sample in found.values()} == set(images.values())
    assert len(read_index(tmp_path / "out" / "train.index.json").skipped) == len(names)


# --- bad images -------------------------------------------------------------------------------


@pytest.fixture
def bad_source(tmp_path) -> Path:
    source = image_folders(tmp_path / "bad source", train=5)
    for name in ("n01440764/n01440764_1", "n03000684/n03000684_3"):
        path = source / "train" / f"{name}.JPEG"
        path.write_bytes(path.read_bytes()[:-50] + bytes(50))  # of the same size
    return source


@pytest.mark.parametrize("workers", [0, 2])
def test_bad_images_fail_by_name_and_can_then_be_skipped(bad_source, tmp_path, workers):
    """Both are named in one run; with skip the rest is not made again, and they are listed."""
    out = tmp_path / "out"
    argv = ("--source", bad_source, "--out", out, "--split", "train", "--shard-samples", 4)
    error = is_refused(imagenet.main, *argv, "--workers", workers)
    assert "2 bad images: " in error and "--on-bad skip" in error
    for name in ("n01440764/n01440764_1.JPEG", "n03000684/n03000684_3.JPEG"):
        assert f"{name} (its JPEG data is damaged: Premature end" in error
    assert not (out / "train.index.json").exists()
    before = {path.name: path.stat().st_mtime_ns for path in out.glob("*.tar")}
    said = succeeds(imagenet.main, *argv, "--workers", workers, "--on-bad", "skip")
    assert "goes on, 5 of 5 shards are finished" in said and "2 bad images were left out" in said
    assert {path.name: path.stat().st_mtime_ns for path in out.glob("*.tar")} == before
    index = read_index(out / "train.index.json")
    assert index.samples == 18 == len(samples_of(out, "train"))
    assert {entry["name"] for entry in index.skipped} == {
        "n01440764/n01440764_1.JPEG",
        "n03000684/n03000684_3.JPEG",
    }
    error = is_refused(imagenet.main, *argv)
    assert "complete, but for 2 bad images" in error
    assert "2 bad images were left out" in succeeds(imagenet.main, *argv, "--on-bad", "skip")


def test_skip_at_once_is_the_same(bad_source, tmp_path):
    """Skipping in a second run or in the first gives the same bytes."""
    argv = ("--source", bad_source, "--split", "train", "--shard-samples", 4, *QUICK)
    is_refused(imagenet.main, *argv, "--out", tmp_path / "a")
    succeeds(imagenet.main, *argv, "--out", tmp_path / "a", "--on-bad", "skip")
    said = succeeds(imagenet.main, *argv, "--out", tmp_path / "b", "--on-bad", "skip")
    assert "bad: n01440764/n01440764_1.JPEG: its JPEG data is damaged" in said
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


def test_a_mended_image_is_read_again(bad_source, tmp_path):
    """Of the same size as before, so that it is the same source: it is not taken for bad again."""
    argv = ("--source", bad_source, "--split", "train", "--out", tmp_path / "out", *QUICK)
    is_refused(imagenet.main, *argv)
    write_files(bad_source / "train", class_images(5))
    succeeds(imagenet.main, *argv)
    assert len(samples_of(tmp_path / "out", "train")) == 20


def test_many_bad_images_are_counted(tmp_path):
    """Twenty are named, the others counted."""
    write_files(tmp_path / "s", {f"one/{i:02d}.jpg": b"none" for i in range(25)})
    write_files(tmp_path / "s", {"one/good.png": encoded(noise(4, 4))})
    argv = ("--source", tmp_path / "s", "--split", "train", "--out", tmp_path / "out", *QUICK)
    error = is_refused(imagenet.main, *argv)
    assert "25 bad images: " in error and error.count(".jpg (") == 20 and "and 5 more" in error


def test_nothing_but_bad_images(tmp_path):
    """An empty set is no outcome, with skip either."""
    write_files(tmp_path / "s", {"one/a.jpg": b"none"})
    argv = ("--source", tmp_path / "s", "--split", "train", "--out", tmp_path / "out", *QUICK)
    assert "no image is left" in is_refused(imagenet.main, *argv, "--on-bad", "skip")


def test_changes_are_counted_and_said(tmp_path):
    """A CMYK JPEG and a WebP: two lines, and the same in the index; the PNG named JPEG stays."""
    files = {
        "one/cmyk.JPEG": encoded(smooth(9, 9), "JPEG", "CMYK"),
        "one/png.JPEG": encoded(noise(9, 9, 3)),
        "two/web.JPEG": encoded(noise(9, 9, 3), "WEBP", lossless=True),
        "two/grey.JPEG": encoded(smooth(9, 9), "JPEG", "L"),
    }
    write_files(tmp_path / "s", files)
    argv = ("--source", tmp_path / "s", "--split", "val", "--out", tmp_path / "out", *QUICK)
    said = succeeds(imagenet.main, *argv)
    assert "1 × CMYK JPEG to RGB JPEG" in said and "1 × RGB WEBP to RGB PNG" in said
    changed = read_index(tmp_path / "out" / "test.index.json").converter["changed"]
    assert sorted(changed.values()) == [1, 1]
    found = {key.split("_")[1]: s for key, s in samples_of(tmp_path / "out", "test").items()}
    assert found["png"].kind == "png" and found["png"].content == files["one/png.JPEG"]
    assert found["grey"].shape == (9, 9, 1) and found["grey"].content == files["two/grey.JPEG"]


# --- before anything is written ---------------------------------------------------------------


def test_a_dry_run_writes_nothing(source, tmp_path):
    """It tells samples, classes, shards, bytes and free bytes; not even the directory is made."""
    argv = ("--source", source, "--out", tmp_path / "out", "--shard-samples", 4, "--dry-run")
    said = succeeds(imagenet.main, *argv)
    assert "train: 20 samples of 4 classes in 5 shards of 4" in said
    assert "test: 8 samples of 4 classes in 2 shards of 4" in said
    assert "free; nothing was written" in said
    assert not (tmp_path / "out").exists()


def test_the_plan_is_near_the_truth(source, tmp_path):
    """What the disk check takes is at least what is written, and not much more."""
    said = convert_train(source, tmp_path, "--dry-run")
    needed = int(said.split("about ")[-1].split(" bytes to write")[0].replace(",", ""))
    convert_train(source, tmp_path)
    written = sum(path.stat().st_size for path in tmp_path.glob("*.tar"))
    assert written <= needed <= written * 1.2 + 5 * 20_000


def test_the_plan_knows_of_scaling(tmp_path):
    """Images a quarter as wide need a small part of their bytes, and not the whole on the disk."""
    images = {f"one/{i}.png": encoded(noise(64, 64, 3, seed=i)) for i in range(9)}
    source = write_files(tmp_path / "s", images | {"one/bad.png": b"x" * 5000})
    argv = ("--source", source, "--split", "train", "--short-side", 16, "--on-bad", "skip")
    said = succeeds(imagenet.main, *argv, "--out", tmp_path / "out", "--dry-run")
    needed = int(said.split("about ")[-1].split(" bytes to write")[0].replace(",", ""))
    succeeds(imagenet.main, *argv, "--out", tmp_path / "out", *QUICK)
    written = sum(path.stat().st_size for path in (tmp_path / "out").glob("*.tar"))
    assert abs(needed - written) < 0.5 * written < sum(map(len, images.values()))


def test_a_disk_too_small(source, tmp_path, monkeypatch):
    """Both numbers are named before a byte is written."""
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**6, 10**6 - 1234, 1234))
    argv = ("--source", source, "--out", tmp_path / "out", *QUICK)
    error = is_refused(imagenet.main, *argv)
    assert "bytes are needed, 1,234 are free" in error and not (tmp_path / "out").exists()


@pytest.mark.skipif(os.geteuid() != 0 or sys.platform != "linux", reason="mounts a small disk")
@pytest.mark.parametrize("workers", [0, 2])
def test_a_disk_that_fills_up(tmp_path, monkeypatch, workers):
    """One line names it; what was finished is kept, and goes on when there is room."""
    (tmp_path / "small").mkdir()
    mount = ("mount", "-t", "tmpfs", "-o", "size=700k", "none", str(tmp_path / "small"))
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("cannot mount here")
    try:
        images = {f"one/{i:02d}.png": encoded(noise(100, 100, 3, seed=i)) for i in range(40)}
        write_files(tmp_path / "s", images)
        out = tmp_path / "small" / "out"
        argv = ("--source", tmp_path / "s", "--split", "train", "--shard-samples", 4)
        argv = (*argv, "--out", out, "--workers", workers)
        assert "are free" in is_refused(imagenet.main, *argv)
        monkeypatch.setattr(convert, "_free_bytes", lambda out: 10**12)
        assert "cannot be written: No space left on device" in is_refused(imagenet.main, *argv)
        assert list(out.glob("train-*.tar")) and not list(out.glob("*.partial"))
        grow = ("mount", "-o", "remount,size=9m", str(tmp_path / "small"))
        subprocess.run(grow, check=True)
        assert "goes on, " in succeeds(imagenet.main, *argv)
        assert len(samples_of(out, "train")) == 40
    finally:
        subprocess.run(("umount", str(tmp_path / "small")), check=True)


@pytest.mark.parametrize(
    "options, said",
    [
        (("--seed", -1), "--seed -1: must be 0 to 4294967295"),
        (("--quality", 101), "--quality 101: must be 1 to 100"),
        (("--workers", -1), "--workers -1: must be at least 0"),
        (("--shard-samples", -4), "--shard-samples -4"),
        (("--short-side", -1), "--short-side -1"),
        (("--max-pixels", 0), "--max-pixels 0"),
        (("--on-bad", "ignore"), "--on-bad"),
        (("--sed", 1), "--sed"),
    ],
)
def test_wrong_options(source, tmp_path, options, said):
    """Named with their value and what is right."""
    argv = ("--source", source, "--out", tmp_path / "out", *options)
    assert said in is_refused(imagenet.main, *argv)
    assert not (tmp_path / "out").exists()


def test_an_output_that_is_a_file(source, tmp_path):
    """A line that names it."""
    (tmp_path / "out").write_text("")
    argv = ("--source", source, "--out", tmp_path / "out", *QUICK)
    assert str(tmp_path / "out") in is_refused(imagenet.main, *argv)


def test_an_image_that_vanishes(source, tmp_path, monkeypatch):
    """A file that cannot be read is no bad image: with skip too the command stops and names it."""
    other = tmp_path / "other"
    shutil.copytree(source, other)
    plan = convert.run_conversions

    def remove_first(*arguments):
        (other / "train" / CLASSES[1] / f"{CLASSES[1]}_2.JPEG").unlink()
        plan(*arguments)

    monkeypatch.setattr(imagenet, "run_conversions", remove_first)
    argv = ("--source", other, "--out", tmp_path / "out", "--split", "train", "--on-bad", "skip")
    outcome = run_command(imagenet.main, *argv, *QUICK)
    assert outcome.code == 2
    assert f"{CLASSES[1]}_2.JPEG: cannot be read: No such file" in outcome.err
