"""FFCV files: what data_prep.ffcv writes, and what becomes of a writer that fails."""

import json
import os
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import simplejpeg
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from prep_sources import encoded, is_refused, run_command, smooth, succeeds, write_tar

from data_prep import ffcv as command
from data_prep.index import main as index_shards
from lipnext_scale.data.catalog import open_catalog
from lipnext_scale.data.decode import decode
from lipnext_scale.data.index import (
    INSTALL,
    KINDS,
    beton_records,
    index_paths,
    map_records,
    read_index,
)
from lipnext_scale.data.source import SampleStore
from lipnext_scale.utils.errors import UserError

SAMPLES, SIDE = 24, 40
LABELS = [7 * i - 3 for i in range(SAMPLES)]
PIXELS = [smooth(SIDE, SIDE, seed=i) for i in range(SAMPLES)]
PIXELS[3] = PIXELS[3][:, :, 0]
IMAGES = np.stack([p if p.ndim == 3 else np.repeat(p[:, :, None], 3, 2) for p in PIXELS])
# A first line for `python -c`.
WITHOUT_FFCV = "import sys; sys.modules['ffcv'] = None\n"
needs_ffcv = pytest.mark.skipif(find_spec("ffcv") is None, reason=f"needs FFCV: {INSTALL}")
# Importing FFCV alone takes seconds.
pytestmark = pytest.mark.slow


def write_images(path: Path, images: list[tuple[int, str, bytes]]) -> None:
    """A tar of (label, suffix, encoded image) samples."""
    members = []
    for number, (label, suffix, content) in enumerate(images):
        members += [(f"k{number}.cls", b"%d" % label), (f"k{number}.{suffix}", content)]
    write_tar(path, members)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Two shards of PNGs, among them greyscale ones, and no index."""
    folder, half = tmp_path_factory.mktemp("shards"), SAMPLES // 2
    images = [(label, "png", encoded(p)) for label, p in zip(LABELS, PIXELS, strict=True)]
    for shard in range(2):
        write_images(folder / f"in-{shard:06d}.tar", images[shard * half :][:half])
    return folder


def convert(folder: Path, *options: str, out: str = "set.beton") -> Path:
    succeeds(command.main, "--shards", f"{folder}/in-*.tar", "--out", folder / out, *options)
    return folder / out


def records_of(path: Path) -> np.ndarray:
    json_path, npy_path = index_paths(path.parent, path.name)
    return map_records(npy_path, read_index(json_path).samples)


def own_pixels(path: Path) -> list[np.ndarray]:
    """All samples by their records; JPEGs by the fast transform, as FFCV."""
    content, images = path.read_bytes(), []
    for record in records_of(path):
        stored = content[int(record["offset"]) :][: int(record["size"])]
        shape = (int(record["height"]), int(record["width"]), int(record["channels"]))
        if record["kind"] == KINDS["jpeg"]:
            images.append(simplejpeg.decode_jpeg(stored, fastdct=True))
            assert images[-1].shape == shape
        else:
            images.append(np.frombuffer(stored, dtype=np.uint8).reshape(shape))
    return images


def ffcv_pixels(paths: list[Path]) -> list[tuple[np.ndarray, list[int]]]:
    """(all images, all labels) of each file by FFCV's own Loader, in order.

    In a process of its own: the Loader leaves threads behind, and numba complains of loaders that
    are collected while others compile.
    """
    code = """
import sys
import numpy as np
from ffcv.fields.rgb_image import SimpleRGBImageDecoder
from ffcv.loader import Loader, OrderOption

for path in sys.argv[1:]:
    loader = Loader(path, batch_size=10, num_workers=1, order=OrderOption.SEQUENTIAL,
                    drop_last=False, pipelines={"image": [SimpleRGBImageDecoder()]})
    batches = [[np.array(part) for part in batch[:2]] for batch in loader]
    images, labels = (np.concatenate(parts) for parts in zip(*batches))
    np.savez(path + ".npz", images=images, labels=labels.ravel())
"""
    subprocess.run([sys.executable, "-c", code, *map(str, paths)], check=True, timeout=300)
    found = [np.load(f"{path}.npz") for path in paths]
    return [(file["images"], file["labels"].tolist()) for file in found]


# --- what is written --------------------------------------------------------------------------


@needs_ffcv
def test_our_reader_ffcv_and_the_shards_agree(folder):
    """Labels and order are the shards'; our pixels are FFCV's to the bit, raw ones the shards'."""
    written = [("raw", "2"), ("jpg", "1")]
    paths = [
        convert(folder, "--write-mode", mode, "--workers", workers, out=f"{mode}{workers}.beton")
        for mode, workers in written
    ]
    by_ffcv = ffcv_pixels(paths)
    for (mode, _), path, (pixels, labels) in zip(written, paths, by_ffcv, strict=True):
        own, records = np.stack(own_pixels(path)), records_of(path)
        assert records["label"].tolist() == labels == LABELS
        assert set(records["kind"]) == {KINDS["raw" if mode == "raw" else "jpeg"]}
        assert np.array_equal(own, pixels)
        difference = np.abs(own.astype(int) - IMAGES).mean()
        assert difference == 0 if mode == "raw" else 0 < difference < 4


@needs_ffcv
def test_training_reads_it_as_it_reads_shards(folder):
    """The catalog of the file has the shards' samples, with the index and without it; --index
    writes the same index again; with an index neither FFCV nor numba is imported."""
    path = convert(folder, "--workers", "2", out="read.beton")
    code = """
from lipnext_scale.data.catalog import open_catalog
from lipnext_scale.data.decode import decode
from lipnext_scale.data.source import SampleStore
store = SampleStore(open_catalog(sys.argv[1], 'data.train'))
for number in range(len(store.catalog)):
    sys.stdout.buffer.write(decode(*store.read(number), 3).tobytes())
assert 'numba' not in sys.modules
"""
    argv = [sys.executable, "-c", WITHOUT_FFCV + code, str(path)]
    ended = subprocess.run(argv, capture_output=True)
    assert ended.returncode == 0 and ended.stdout == IMAGES.tobytes(), ended.stderr
    json_path, npy_path = index_paths(path.parent, path.name)
    written, described = npy_path.read_bytes(), json.loads(json_path.read_text())
    json_path.unlink()
    npy_path.unlink()
    store = SampleStore(open_catalog(str(path), "data.train"))
    for number in range(SAMPLES):
        content, record = store.read(number)
        assert np.array_equal(decode(content, record, 3), IMAGES[number])
        assert record.label == LABELS[number]
    succeeds(command.main, "--index", path)
    assert npy_path.read_bytes() == written
    assert json.loads(json_path.read_text())["shards"] == described["shards"]


@needs_ffcv
def test_one_worker_always_writes_the_same_bytes(folder):
    """File and records follow from shards and options, the random choice of JPEGs too."""
    options = ("--write-mode", "proportion", "--compress-probability", "0.4", "--workers", "1")
    first, second = (convert(folder, *options, out=f"same{i}.beton") for i in range(2))
    assert first.read_bytes() == second.read_bytes()
    kinds = records_of(first)["kind"]
    assert set(kinds) == {KINDS["raw"], KINDS["jpeg"]}
    # Two workers put the samples elsewhere, but choose the same ones.
    other = convert(folder, *options[:-1], "2", out="other.beton")
    assert records_of(other)["kind"].tolist() == kinds.tolist()


@needs_ffcv
def test_sizes(tmp_path):
    """--max-resolution bounds the longer side and keeps the shape; smart splits by the bytes; pages
    grow with the largest image, where FFCV by itself would fail."""
    images = [
        (i, "jpg", encoded(smooth(*size, seed=i), "JPEG"))
        for i, size in enumerate([(100, 50), (20, 10), (33, 66)])
    ]
    write_images(tmp_path / "in-0.tar", images)
    smart = ("--write-mode", "smart", "--smart-threshold", "700")
    path = convert(tmp_path, "--max-resolution", "32", *smart)
    records = records_of(path)
    sizes = list(zip(records["height"], records["width"], strict=True))
    assert sizes == [(32, 16), (20, 10), (16, 32)]
    assert records["kind"].tolist() == [KINDS["jpeg"], KINDS["raw"], KINDS["jpeg"]]
    wanted = Image.fromarray(smooth(100, 50)).resize((16, 32), Image.Resampling.BOX)
    assert np.abs(own_pixels(path)[0].astype(int) - np.asarray(wanted)).mean() < 8
    assert np.array_equal(own_pixels(path)[1], simplejpeg.decode_jpeg(images[1][2]))
    write_images(tmp_path / "in-0.tar", [(5, "png", encoded(smooth(1500, 2000)))])
    path = convert(tmp_path, out="large.beton")
    assert np.array_equal(own_pixels(path)[0], smooth(1500, 2000))
    write_images(tmp_path / "in-0.tar", [(0, "png", encoded(smooth(2, 90)))])
    argv = ("--shards", f"{tmp_path}/in-0.tar", "--out", tmp_path / "a.beton")
    error = is_refused(command.main, *argv, "--max-resolution", 32)
    assert "sample k0 cannot be written by FFCV" in error


@needs_ffcv
def test_the_index_has_classes_and_settings(folder, tmp_path):
    """Class names come from the shards' index; an older index never describes a newer file."""
    for path in folder.glob("in-*.tar"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    names = [f"class {i}" for i in range(200)]
    (tmp_path / "names.txt").write_text("\n".join(names))
    succeeds(index_shards, f"{tmp_path}/in-*.tar", "--classes-file", tmp_path / "names.txt")
    argv = ("--shards", f"{tmp_path}/in-*.tar", "--out", tmp_path / "new" / "set.beton")
    printed = succeeds(command.main, *argv, "--dry-run")
    assert f"{SAMPLES} samples" in printed and f"{SAMPLES * SIDE * SIDE * 3:,} bytes" in printed
    assert not (tmp_path / "new").exists()
    for mode in ("raw", "jpg"):
        path = convert(tmp_path, "--write-mode", mode)
        index = read_index(index_paths(tmp_path, path.name)[0])
        assert index.classes == names and index.converter["write_mode"] == mode
        assert index.shards[0].bytes == path.stat().st_size
        assert index.shards[0].class_counts["158"] == 1 and index.samples == SAMPLES
    assert not list(tmp_path.glob("*.partial"))


# --- what fails -------------------------------------------------------------------------------


@needs_ffcv
@pytest.mark.parametrize("workers, kind", [("1", "PNG"), ("3", "JPEG")])
def test_a_damaged_image_is_named_and_leaves_nothing(tmp_path, kind, workers):
    """FFCV's own writer would wait for ever; the file that was there stays."""
    suffix = {"PNG": "png", "JPEG": "jpg"}[kind]
    good = [(0, suffix, encoded(smooth(SIDE, SIDE, seed=i), kind)) for i in range(150)]
    damaged = good[3][2][: len(good[3][2]) * 2 // 3]
    write_images(tmp_path / "in-0.tar", [*good, (0, suffix, damaged), *good])
    if kind == "PNG":  # with an index the writer's workers meet it
        succeeds(index_shards, tmp_path / "in-0.tar")
    old, before = tmp_path / "set.beton", sorted(os.listdir(tmp_path))
    old.write_bytes(b"old")
    argv = ("--shards", f"{tmp_path}/in-0.tar", "--out", old, "--workers", workers)
    assert "in-0.tar: sample k150 " in is_refused(command.main, *argv)
    assert old.read_bytes() == b"old" and sorted(os.listdir(tmp_path)) == [*before, "set.beton"]


def in_workers(monkeypatch, number: int, fault: Callable[[], object]) -> None:
    """Let a fault happen to the worker that has this sample; workers are forked from here."""
    load, parent = command.Decoded.__getitem__, os.getpid()

    def faulty(self: command.Decoded, wanted: int) -> tuple[np.ndarray, int]:
        if wanted == number and os.getpid() != parent:
            fault()
        return load(self, wanted)

    monkeypatch.setattr(command.Decoded, "__getitem__", faulty)


@needs_ffcv
def test_a_full_disk_and_a_killed_worker(folder, tmp_path, monkeypatch):
    """Whether no byte of a page can be written or a part, of which FFCV itself says nothing; a
    worker that is killed, as where memory runs out: one line, no file, no wait."""
    argv = ("--shards", f"{folder}/in-*.tar", "--out", tmp_path / "set.beton")
    for room in (8 << 20, 9 << 20):
        limit = (room, resource.RLIM_INFINITY)
        with monkeypatch.context() as patch:
            in_workers(patch, 0, lambda: resource.setrlimit(resource.RLIMIT_FSIZE, limit))  # noqa: B023
            error = is_refused(command.main, *argv, "--workers", 1)
        assert "set.beton" in error and ("File too large" in error or "is cut off" in error)
        assert not list(tmp_path.iterdir())
    in_workers(monkeypatch, 20, lambda: os.kill(os.getpid(), signal.SIGKILL))
    outcome = run_command(command.main, *argv)
    assert outcome.code == 1 and outcome.err.count("\n") == 1
    assert outcome.err.startswith("failed: a worker process was killed")
    assert not list(tmp_path.iterdir())


WRONG = {
    "--out set.bin": "set.bin: must end in .beton",
    "": "--shards and --out are needed, or --index",
    "--out s.beton --write-mode jpg --jpeg-quality 101": "--jpeg-quality: 101: must be 1 to 100",
    "--out s.beton --jpeg-quality 90": "--jpeg-quality 90: is not used with --write-mode raw",
    "--out s.beton --write-mode smart": "--write-mode smart: needs --smart-threshold",
    "--index a.beton": "--index: takes no other options",
}


@pytest.mark.parametrize("options", WRONG)
def test_wrong_options_are_named(tmp_path, monkeypatch, options):
    """Before anything is read or written."""
    monkeypatch.chdir(tmp_path)
    error = is_refused(command.main, "--shards", "in-*.tar", *options.split())
    assert re.search(WRONG[options], error), error
    assert not list(tmp_path.iterdir())


def test_the_messages_say_what_to_install(folder, tmp_path, monkeypatch):
    """Of writing, of --index and of training on a file without an index."""
    monkeypatch.setitem(sys.modules, "ffcv", None)
    path = tmp_path / "a.beton"
    path.write_bytes(b"some bytes")
    write = ("--shards", f"{folder}/in-*.tar", "--out", tmp_path / "b.beton")
    for options in (write, ("--index", path)):
        assert f"needs FFCV: {INSTALL}" in is_refused(command.main, *options)
    with pytest.raises(UserError, match="needs FFCV.*installed: python -m data_prep.ffcv --index"):
        open_catalog(str(path), "data.train")
    assert [path.name for path in tmp_path.iterdir()] == ["a.beton"]


# --- files that others wrote ------------------------------------------------------------------


def written_by_ffcv(path: Path, fields: dict, *values: tuple) -> Path:
    from ffcv.writer import DatasetWriter

    DatasetWriter(str(path), fields, num_workers=1).from_indexed_dataset(values)
    return path


@needs_ffcv
def test_fields_of_other_files(tmp_path):
    """Names and order of image and label are the writer's own choice; an array for an image, two
    numbers, a number that is no integer, a label beyond 32 bits are refused by name."""
    from ffcv.fields import FloatField, IntField, NDArrayField, RGBImageField

    path, image = tmp_path / "a.beton", smooth(SIDE, SIDE)
    values = [(-3 + i, smooth(10 + i, 20, seed=i)) for i in range(4)]
    written_by_ffcv(path, {"y": IntField(), "x": RGBImageField()}, *values)
    records, content = beton_records(path), path.read_bytes()
    assert records["label"].tolist() == [-3, -2, -1, 0]
    for record, (_, pixels) in zip(records, values, strict=True):
        assert (record["height"], record["width"], record["channels"]) == pixels.shape
        assert content[record["offset"] :][: record["size"]] == pixels.tobytes()
    array = NDArrayField(dtype=np.dtype("uint8"), shape=image.shape)
    rgb, number = RGBImageField(), IntField()
    for fields, sample, message in (
        ({"image": array, "label": number}, (image, 1), r"fields image \(NDArrayField\), label"),
        ({"image": rgb, "label": FloatField()}, (image, 1.0), r"label \(FloatField\)"),
        ({"image": rgb, "label": number, "n": number}, (image, 1, 2), r"n \(IntField\); training"),
        ({"image": rgb, "label": number}, (image, 2**31), "its class is beyond 32 bits"),
    ):
        with pytest.raises(UserError, match=f"a.beton: .*{message}"):
            beton_records(written_by_ffcv(path, fields, sample))
    assert "no.beton: cannot be read" in is_refused(command.main, "--index", tmp_path / "no.beton")


@pytest.fixture(scope="module")
def small_beton(tmp_path_factory) -> bytes:
    from ffcv.fields import IntField, RGBImageField

    path = tmp_path_factory.mktemp("small") / "a.beton"
    fields = {"image": RGBImageField(write_mode="jpg"), "label": IntField()}
    values = ((smooth(SIDE, SIDE, seed=i), i) for i in range(3))
    return written_by_ffcv(path, fields, *values).read_bytes()


@needs_ffcv
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_damage_is_refused_or_harmless(small_beton, tmp_path_factory, data):
    """Whatever stands in header, fields and tables: records of this very file, or a UserError."""
    path = tmp_path_factory.getbasetemp() / "damaged.beton"
    content = bytearray(small_beton)
    header, table = 24 + 2 * 1044, 3 * 24  # with the fields; before and after come the samples
    places = st.one_of(
        st.integers(0, 40),
        st.integers(header - 1044, header + table),
        st.integers(len(content) - table, len(content) - 1),
    )
    for place in data.draw(st.lists(places, min_size=1, max_size=3)):
        content[place] = data.draw(st.integers(0, 255))
    path.write_bytes(content)
    try:
        records = beton_records(path)
    except UserError as error:
        assert str(error).startswith(f"{path}: ") and "\n" not in str(error)
    else:
        assert (records["offset"] + records["size"].astype(int) <= len(content)).all()
        assert set(records["kind"]) <= {KINDS["raw"], KINDS["jpeg"]}


@needs_ffcv
def test_a_file_cut_anywhere_is_refused(small_beton, tmp_path):
    """Also within its last page, where only the table shows it."""
    path, size = tmp_path / "cut.beton", len(small_beton)
    for kept in (0, 30, 1000, size // 2, size - 73, size - 72, size - 24, size - 1):
        path.write_bytes(small_beton[:kept])
        with pytest.raises(UserError, match="cut.beton: is "):
            beton_records(path)
