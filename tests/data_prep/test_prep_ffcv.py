"""Writing FFCV files: pixels, order, bytes; and what becomes of a writer that fails."""

import io
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from beton_making import (
    SAMPLES,
    SIDE,
    WITHOUT_FFCV,
    encode,
    expected,
    failure,
    ffcv_pixels,
    indexed,
    own_pixels,
    picture,
    with_ffcv,
    write_shards,
    write_tar,
)
from PIL import Image

from data_prep import ffcv as command
from lipnext_scale.data.catalog import open_catalog
from lipnext_scale.data.decode import decode
from lipnext_scale.data.index import KINDS, beton_records, index_paths, map_records, read_index
from lipnext_scale.data.source import SampleStore

pytestmark = with_ffcv


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_shards(tmp_path_factory.mktemp("shards"))


def convert(folder: Path, *options: str, out: str = "set.beton") -> Path:
    command.main(["--shards", f"{folder}/in-*.tar", "--out", str(folder / out), *options])
    return folder / out


WRITTEN = [(mode, workers) for mode in ("raw", "jpg") for workers in (1, 2)]


@pytest.fixture(scope="module")
def read_by_ffcv(folder) -> dict[tuple[str, int], tuple[Path, np.ndarray, list[int]]]:
    """The shards in each way of writing, with what FFCV reads of it."""
    paths = [
        convert(
            folder, "--write-mode", mode, "--workers", str(workers), out=f"{mode}{workers}.beton"
        )
        for mode, workers in WRITTEN
    ]
    found = zip(paths, ffcv_pixels(paths), strict=True)
    return dict(zip(WRITTEN, ((path, *read) for path, read in found), strict=True))


@pytest.mark.parametrize("mode, workers", WRITTEN)
def test_our_reader_ffcv_and_the_shards_agree(folder, read_by_ffcv, mode, workers):
    """Labels and order are the shards'; our pixels are FFCV's to the bit, raw ones the shards'."""
    path, by_ffcv, labels = read_by_ffcv[mode, workers]
    own, (images, shard_labels) = np.stack(own_pixels(path)), expected(folder)
    records = map_records(*indexed(path))
    assert records["label"].tolist() == labels == shard_labels
    assert set(records["kind"]) == {KINDS["raw" if mode == "raw" else "jpeg"]}
    assert np.array_equal(own, by_ffcv)
    if mode == "raw":
        assert np.array_equal(own, images)
    else:
        assert 0 < np.abs(own.astype(int) - images).mean() < 4


def test_records_by_ffcvs_reader_are_those_of_theindexed(folder):
    """A file without its index is read just so, and --index writes the same one again."""
    path = convert(folder, "--write-mode", "proportion", "--workers", "2", out="again.beton")
    json_path, npy_path = index_paths(path.parent, path.name)
    written, described = npy_path.read_bytes(), json.loads(json_path.read_text())
    assert np.array_equal(beton_records(path), np.load(io.BytesIO(written)))
    json_path.unlink()
    npy_path.unlink()
    command.main(["--index", str(path)])
    assert npy_path.read_bytes() == written
    assert json.loads(json_path.read_text())["shards"] == described["shards"]


def test_training_reads_it_as_it_reads_shards(folder):
    """The catalog of the file has the shards' samples, with the index and without it."""
    path = convert(folder, out="read.beton")
    shards, images = (
        SampleStore(open_catalog(f"{folder}/in-*.tar", "data.train")),
        expected(folder)[0],
    )
    for _ in range(2):
        store = SampleStore(open_catalog(str(path), "data.train"))
        assert len(store.catalog) == len(shards.catalog) == SAMPLES
        for number in range(SAMPLES):
            encoded, record = store.read(number)
            assert np.array_equal(store.decode(encoded, record, 3), images[number])
            assert record.label == shards.read(number)[1].label
        index_paths(folder, path.name)[0].unlink(missing_ok=True)


def test_an_indexed_file_is_read_without_ffcv(folder):
    """Every pixel of it, and neither FFCV nor numba is imported."""
    path = convert(folder, out="alone.beton")
    code = """
from lipnext_scale.data.catalog import open_catalog
from lipnext_scale.data.source import SampleStore
store = SampleStore(open_catalog(sys.argv[1], 'data.train'))
for number in range(len(store.catalog)):
    sys.stdout.buffer.write(store.decode(*store.read(number), 3).tobytes())
assert 'numba' not in sys.modules
"""
    ended = subprocess.run(
        [sys.executable, "-c", WITHOUT_FFCV + code, str(path)], capture_output=True
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == expected(folder)[0].tobytes()


def test_one_worker_always_writes_the_same_bytes(folder):
    """File and records follow from shards and options, the tossed coins too."""
    options = ("--write-mode", "proportion", "--compress-probability", "0.4", "--workers", "1")
    paths = [convert(folder, *options, out=f"same{i}.beton") for i in range(2)]
    first, second = (path.read_bytes() for path in paths)
    assert first == second
    kinds = map_records(*indexed(paths[0]))["kind"]
    assert set(kinds) == {KINDS["raw"], KINDS["jpeg"]}
    # Two workers lay the samples elsewhere, but toss the same coins for them.
    other = convert(folder, *options[:-1], "2", out="other.beton")
    assert map_records(*indexed(other))["kind"].tolist() == kinds.tolist()


def test_larger_images_shrink_and_sizes_may_differ(tmp_path):
    """--max-resolution bounds the longer side and keeps the shape; smart splits by the bytes."""
    sizes = [(100, 50), (20, 10), (33, 66)]
    images = [(i, "jpg", encode(picture(i, *size), "jpg")) for i, size in enumerate(sizes)]
    write_tar(tmp_path / "in-0.tar", images)
    path = convert(
        tmp_path, *("--max-resolution", "32", "--write-mode", "smart", "--smart-threshold", "700")
    )
    records = map_records(*indexed(path))
    assert list(zip(records["height"], records["width"], strict=True)) == [
        (32, 16),
        (20, 10),
        (16, 32),
    ]
    assert records["kind"].tolist() == [KINDS["jpeg"], KINDS["raw"], KINDS["jpeg"]]
    small = own_pixels(path)[0].astype(int)
    wanted = np.asarray(Image.fromarray(picture(0, 100, 50)).resize((16, 32), Image.Resampling.BOX))
    assert np.abs(small - wanted).mean() < 8
    assert np.array_equal(own_pixels(path)[1], decode(images[1][2], KINDS["jpeg"], 3))


def test_an_image_larger_than_ffcvs_page(tmp_path):
    """Pages grow with the largest image, where FFCV by itself would fail."""
    write_tar(tmp_path / "in-0.tar", [(5, "png", encode(picture(1, 1500, 2000)))])
    path = convert(tmp_path)
    assert map_records(*indexed(path))["size"].tolist() == [9_000_000]
    assert np.array_equal(own_pixels(path)[0], picture(1, 1500, 2000))


def test_the_index_tells_classes_and_settings(folder, tmp_path):
    """Class names come from the shards' index; an older index never describes a newer file."""
    from data_prep.index import main as index_shards

    for path in folder.glob("in-*.tar"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    names = [f"class {i}" for i in range(200)]
    (tmp_path / "names.txt").write_text("\n".join(names))
    index_shards([f"{tmp_path}/in-*.tar", "--classes-file", str(tmp_path / "names.txt")])
    for mode in ("raw", "jpg"):
        path = convert(tmp_path, "--write-mode", mode)
        index = read_index(index_paths(tmp_path, path.name)[0])
        assert index.classes == names and index.converter["write_mode"] == mode
        assert index.shards[0].bytes == path.stat().st_size
        assert index.shards[0].class_counts["107"] == 1 and index.samples == SAMPLES
    assert not list(tmp_path.glob("*.partial"))


def test_dry_run_writes_nothing(folder, tmp_path, capsys):
    """It tells samples and bytes; not even the directory is made."""
    out = tmp_path / "new" / "set.beton"
    command.main(["--shards", f"{folder}/in-*.tar", "--out", str(out), "--dry-run"])
    said = capsys.readouterr().out
    assert f"{SAMPLES} samples" in said and f"{SAMPLES * SIDE * SIDE * 3:,} bytes" in said
    assert not out.parent.exists()


# --- what fails ------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", ["1", "3"])
@pytest.mark.parametrize("kind", ["png", "jpg"])
def test_a_damaged_image_is_named_and_leaves_nothing(tmp_path, capsys, kind, workers):
    """FFCV's own writer would wait for ever; the file that was there stays."""
    good = [(0, kind, encode(picture(i), kind)) for i in range(150)]
    damaged = good[3][2][: len(good[3][2]) * 2 // 3]
    write_tar(tmp_path / "in-0.tar", [*good, (0, kind, damaged), *good])
    old = tmp_path / "set.beton"
    old.write_bytes(b"old")
    arguments = ("--shards", f"{tmp_path}/in-0.tar", "--out", str(old), "--workers", workers)
    assert "in-0.tar: sample k150 " in failure(capsys, *arguments)
    assert old.read_bytes() == b"old" and sorted(os.listdir(tmp_path)) == ["in-0.tar", "set.beton"]


def in_workers(monkeypatch, number: int, fault: Callable[[], object]) -> None:
    """Let a fault happen to the worker that has this sample; workers are forked from here."""
    load = command.Decoded.__getitem__

    def faulty(self: command.Decoded, wanted: int) -> tuple[np.ndarray, int]:
        if wanted == number:
            fault()
        return load(self, wanted)

    monkeypatch.setattr(command.Decoded, "__getitem__", faulty)


@pytest.mark.parametrize("room", [8 << 20, 9 << 20])
def test_a_full_disk_is_told(folder, tmp_path, capsys, monkeypatch, room):
    """Whether no byte of a page can be written or a part, of which FFCV itself says nothing."""
    limit = (room, resource.RLIM_INFINITY)
    in_workers(monkeypatch, 0, lambda: resource.setrlimit(resource.RLIMIT_FSIZE, limit))
    out = tmp_path / "set.beton"
    said = failure(capsys, "--shards", f"{folder}/in-*.tar", "--out", str(out), "--workers", "1")
    assert "set.beton" in said and ("File too large" in said or "is cut off" in said)
    assert not list(tmp_path.iterdir())


def test_a_killed_worker_is_told(folder, tmp_path, capsys, monkeypatch):
    """As where memory runs out: exit code 1, one line, no file, no wait."""
    in_workers(monkeypatch, 20, lambda: os.kill(os.getpid(), signal.SIGKILL))
    with pytest.raises(SystemExit) as end:
        command.main(["--shards", f"{folder}/in-*.tar", "--out", f"{tmp_path}/set.beton"])
    assert end.value.code == 1
    said = capsys.readouterr().err
    assert (
        said.startswith("failed: a worker process was ended by signal 9") and said.count("\n") == 1
    )
    assert not list(tmp_path.iterdir())


def test_workers_end_after_their_command_was_killed(tmp_path):
    """Killed as nothing can catch it, the command leaves no process behind."""
    write_tar(tmp_path / "in-0.tar", [(0, "png", encode(picture(0)))] * 600)
    code = """
import os, sys, time
from data_prep import ffcv
load = ffcv.Decoded.__getitem__
def slow(self, number):
    if number == 0:
        print(os.getpid(), flush=True)
    time.sleep(0.005)
    return load(self, number)
ffcv.Decoded.__getitem__ = slow
ffcv.main()
"""
    options = [
        "--shards",
        f"{tmp_path}/in-0.tar",
        "--out",
        f"{tmp_path}/set.beton",
        "--workers",
        "1",
    ]
    started = subprocess.Popen(
        [sys.executable, "-c", code, *options], stdout=subprocess.PIPE, text=True
    )
    worker = int(started.stdout.readline())
    started.kill()
    started.wait()
    started.stdout.close()
    patience = time.time() + 30
    while Path(f"/proc/{worker}").exists() and time.time() < patience:
        time.sleep(0.05)
    assert not Path(f"/proc/{worker}").exists()
    assert not (tmp_path / "set.beton").exists()


def test_shards_that_are_not_there(tmp_path, capsys):
    """The option and the pattern are named."""
    said = failure(capsys, "--shards", f"{tmp_path}/no-*.tar", "--out", f"{tmp_path}/a.beton")
    assert "--shards" in said and "no-*.tar" in said


def test_an_image_too_thin_to_shrink(tmp_path, capsys):
    """FFCV would make a side of no pixels of it."""
    write_tar(tmp_path / "in-0.tar", [(0, "png", encode(picture(0, 2, 90)))])
    arguments = ("--shards", f"{tmp_path}/in-0.tar", "--out", f"{tmp_path}/a.beton")
    said = failure(capsys, *arguments, "--max-resolution", "32")
    assert "sample k0 would have 0×32 pixels" in said
