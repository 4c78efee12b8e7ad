"""data_prep.edm: every form of generated data comes out pixel for pixel; nothing in it is run."""

import json
import os
import pickle
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prep_sources import (
    argv,
    contents,
    decoded,
    encoded,
    flip,
    is_refused,
    noise,
    run_command,
    samples_of,
    succeeds,
    write_tar,
)
from shard_making import Runs

from data_prep import verify
from data_prep.edm import main
from lipnext_scale.data.index import read_index

pytestmark = pytest.mark.slow  # all of them together take half a minute

N = 12
PIXELS = noise(N, 6, 5, 3)
LABELS = [i * 7 % 5 for i in range(N)]


def run(source: Path, out: Path, *options: object) -> str:
    return succeeds(main, *argv(source, out, *options))


def refused(source: Path, *options: object) -> str:
    """The line of a source that is refused; nothing is left in --out."""
    out = source.parent / "refused"
    error = is_refused(main, *argv(source, out, *options))
    assert not out.exists() or not list(out.iterdir())
    return error


def require_exact(out: Path, pixels=PIXELS, labels=LABELS, name: str = "train") -> None:
    """All samples are there, in some order, with the pixels and labels of their number."""
    found = samples_of(out, name)
    assert len(found) == len(pixels)
    for key, sample in found.items():
        number = int(key.split("_")[0])
        assert np.array_equal(decoded(sample.content), pixels[number]), key
        assert sample.label == labels[number], key


def edm_zip(path: Path, values: object = None, method: int = zipfile.ZIP_STORED) -> Path:
    """A zip as EDM's dataset_tool writes it; `values`: of its dataset.json."""
    with zipfile.ZipFile(path, "w", method) as archive:
        for i in range(N):
            archive.writestr(f"00000/img{i:08d}.png", encoded(PIXELS[i]))
        labels = [[f"00000/img{i:08d}.png", LABELS[i]] for i in reversed(range(N))]
        archive.writestr("dataset.json", json.dumps(values or {"labels": labels}))
    return path


# --- every form -------------------------------------------------------------------------------


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
@pytest.mark.parametrize("channels, dtype", [(1, ">i4"), (3, "<i8"), (3, "u1")])
def test_npz(tmp_path, save, channels, dtype):
    """Stored or compressed, grey or coloured: exact, and nothing but the set is left in --out; in
    worker processes the same bytes; a dry run writes nothing."""
    pixels = np.ascontiguousarray(PIXELS[:, :, :, :channels])
    source = tmp_path / "a.npz"
    save(source, image=pixels, label=np.array(LABELS, dtype), extra=np.arange(3))
    printed = run(source, tmp_path / "out", "--dry-run", "--short-side", 4)
    assert "train: 12 samples of 5 classes" in printed and "nothing was written" in printed
    assert {path.name for path in tmp_path.iterdir()} == {"a.npz"}
    printed = run(source, tmp_path / "out", "--shard-samples", 5)
    assert f"an .npz of 6×5 images with {channels} channels: 12 images of 5 classes" in printed
    require_exact(tmp_path / "out", pixels.squeeze(3) if channels == 1 else pixels)
    shards = {f"train-{i:06d}.tar" for i in range(3)}
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == shards | {"train.index.json", "train.index.npy"}
    succeeds(verify.main, tmp_path / "out", "--decode")
    run(source, tmp_path / "two", "--shard-samples", 5, "--workers", 2)
    assert contents(tmp_path / "out") == contents(tmp_path / "two")


def test_another_source_is_not_taken_for_the_same(tmp_path):
    """Only the pixels differ: the set that is there is not that of the source."""
    for name, pixels in (("a", PIXELS), ("b", PIXELS ^ 1)):
        np.savez(tmp_path / f"{name}.npz", image=pixels, label=np.array(LABELS))
    run(tmp_path / "a.npz", tmp_path / "out")
    assert "already complete" in run(tmp_path / "a.npz", tmp_path / "out")
    error = is_refused(main, *argv(tmp_path / "b.npz", tmp_path / "out"))
    assert "another set is there" in error


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_edm_zip_and_folder(tmp_path, method):
    """Numbers follow the names, whatever the order of dataset.json; images keep their bytes.
    Unpacked, its folder 00000 is no class: dataset.json has the labels."""
    source = edm_zip(tmp_path / "a.zip", method=method)
    printed = run(source, tmp_path / "out", "--name", "edm")
    assert "EDM's zip: 12 images of 5 classes" in printed
    require_exact(tmp_path / "out", name="edm")
    content = (tmp_path / "out" / "edm-000000.tar").read_bytes()
    assert all(encoded(image) in content for image in PIXELS)
    with zipfile.ZipFile(source) as archive:
        archive.extractall(tmp_path / "edm")
    assert "EDM's folder with dataset.json" in run(tmp_path / "edm", tmp_path / "folder")
    require_exact(tmp_path / "folder")


@pytest.mark.parametrize("names", [None, ["ant", "bee", "cat", "dog", "eel", "fly"]])
def test_class_folders(tmp_path, names):
    """Named by number (with zeros before it or not) or by name; a class may have none."""
    for i, label in enumerate(LABELS):
        folder = tmp_path / "source" / (names[label] if names else f"{label:0{1 + label % 3}d}")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{i:02d}.png").write_bytes(encoded(PIXELS[i]))
    options: list[object] = ["--num-classes", 6]
    if names:
        (tmp_path / "names.txt").write_text("\n".join(names) + "\n")
        options = ["--classes-file", tmp_path / "names.txt"]
    printed = run(tmp_path / "source", tmp_path / "out", *options)
    assert "a folder for each class: 12 images of 6 classes" in printed
    found = samples_of(tmp_path / "out", "train")
    assert len(found) == N
    for key, sample in found.items():
        i = int(key.split("_")[1])
        assert np.array_equal(decoded(sample.content), PIXELS[i]) and sample.label == LABELS[i]
    classes = read_index(tmp_path / "out" / "train.index.json").classes
    assert classes == (names or [str(i) for i in range(6)])


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_memory_does_not_grow_with_the_images(tmp_path, save):
    """150 MB of images are read one by one in a process that grows by a fifth of that at most."""
    images = np.repeat(np.arange(50, dtype=np.uint8), 3_000_000).reshape(50, 1000, 1000, 3)
    save(tmp_path / "a.npz", image=images, label=np.zeros(50, np.int64))
    code = (
        "import resource, sys, pathlib; from data_prep.edm import NpzImages, zip_directory; "
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss; before = peak(); "
        "path = pathlib.Path(sys.argv[1]); images = NpzImages(path, zip_directory(path)); "
        "images.prepare(pathlib.Path(sys.argv[2])); "
        "assert all((images.load(i) == i).all() for i in range(len(images))); "
        "print(peak() - before)"
    )
    arguments = [str(tmp_path / "a.npz"), str(tmp_path / "out")]
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) * 1024 < 30e6


# --- what is never run or written -------------------------------------------------------------


@pytest.mark.parametrize("name", ["image", "label"])
def test_pickles_in_an_npz_are_not_opened(tmp_path, name):
    """An array of objects is refused, its pickle makes no directory; others are left alone."""
    code = np.array([Runs(os.mkdir, (str(tmp_path / "made"),))] * N, dtype=object)
    arrays = {"image": PIXELS, "label": np.array(LABELS)}
    np.savez(tmp_path / "a.npz", **(arrays | {name: code}))
    assert re.search(f"its {name}.*[Oo]bject", refused(tmp_path / "a.npz"))
    np.savez(tmp_path / "b.npz", **arrays, other=code)
    run(tmp_path / "b.npz", tmp_path / "out")
    require_exact(tmp_path / "out")
    with zipfile.ZipFile(tmp_path / "c.npz", "w") as archive:
        archive.writestr(f"{name}.npy", pickle.dumps(code[0]))
    assert "cannot be read" in refused(tmp_path / "c.npz")
    assert not (tmp_path / "made").exists()


# --- what is refused --------------------------------------------------------------------------

NPZ = {
    "no image": ({"label": np.array(LABELS)}, "its image: cannot be read"),
    "no label": ({"image": PIXELS}, "its label: cannot be read"),
    "floats": ({"image": PIXELS / 255, "label": np.array(LABELS)}, "its image is float64"),
    "NCHW": ({"image": PIXELS.transpose(0, 3, 1, 2).copy()}, "must be uint8 .N, height, width"),
    "no images": (
        {"image": PIXELS[:0], "label": np.zeros(0, int)},
        "its image is damaged or empty",
    ),
    "Fortran": ({"image": np.asfortranarray(PIXELS)}, "is in Fortran's order"),
    "few labels": ({"image": PIXELS, "label": np.arange(5)}, r"its label is int64 \[5\]; .*\[12\]"),
    "float labels": ({"image": PIXELS, "label": np.array(LABELS) / 1}, "its label is float64"),
    "negative": ({"image": PIXELS, "label": np.array(LABELS) - 1}, "labels from -1 to 3"),
    "huge": ({"image": PIXELS, "label": np.array(LABELS, "u8") << 60}, "labels from 0 to 46116"),
}


@pytest.mark.parametrize("name", NPZ)
def test_arrays_that_are_no_images(tmp_path, name):
    """One line with what the array is and what it must be, exit code 2, nothing written."""
    arrays, message = NPZ[name]
    np.savez(
        tmp_path / "a.npz",
        **({"label": np.array(LABELS)} | arrays if name != "no label" else arrays),
    )
    error = refused(tmp_path / "a.npz")
    assert error.startswith(f"error: --source {tmp_path}/a.npz: ")
    assert re.search(message, error), error


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_damaged_archive_is_refused_or_exact(tmp_path_factory, data):
    """Bytes changed anywhere in an npz or a zip: one line, or the very same images."""
    directory = tmp_path_factory.mktemp("damaged")
    if data.draw(st.booleans()):
        source = directory / "a.npz"
        save = data.draw(st.sampled_from([np.savez, np.savez_compressed]))
        save(source, image=PIXELS, label=np.array(LABELS))
    else:
        method = data.draw(st.sampled_from([zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED]))
        source = edm_zip(directory / "a.zip", method=method)
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, source.stat().st_size - 1))
        flip(source, place, data.draw(st.integers(1, 255)))
    if data.draw(st.booleans()):
        content = source.read_bytes()
        source.write_bytes(content[: data.draw(st.integers(0, len(content)))])
    outcome = run_command(main, *argv(source, directory / "out"))
    if outcome.code == 0:
        require_exact(directory / "out")
    else:
        assert outcome.code == 2 and outcome.err.count("\n") == 1, outcome


ZIP = {
    "labels are null": ({"labels": None}, "has no labels"),
    "a list": ([1], "is not"),
    "one missing": ({"labels": [[f"00000/img{i:08d}.png", 0] for i in range(11)]}, "has no label"),
    "one too many": (
        {"labels": [[f"00000/img{i:08d}.png", 0] for i in range(13)]},
        "'00000/img00000012.png' has no image",
    ),
    "twice": ({"labels": [["a.png", 0], ["a.png", 1]]}, "has 'a.png' twice"),
    "one-hot": ({"labels": [["a.png", [0, 1]]]}, "in place of a name and a class number"),
    "truth": ({"labels": [["a.png", True]]}, "in place of a name and a class number"),
}


@pytest.mark.parametrize("name", ZIP)
def test_labels_of_a_zip_that_are_none(tmp_path, name):
    """Each way in which dataset.json can be wrong, with the archive's name."""
    values, message = ZIP[name]
    error = refused(edm_zip(tmp_path / "a.zip", values))
    assert error.startswith(f"error: --source {tmp_path}/a.zip: ") and message in error


def test_a_zip_without_labels_or_of_another_kind(tmp_path):
    """No dataset.json, one that is no JSON or too deep, no zip; bad images can be skipped."""
    for text, message in (
        (None, "has no dataset.json"),
        (b"{", "is not"),
        (b"[" * 10**6, "is not"),
    ):
        with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
            archive.writestr("a.png", encoded(PIXELS[0]))
            if text is not None:
                archive.writestr("dataset.json", text)
        assert message in refused(tmp_path / "a.zip")
    write_tar(tmp_path / "c.zip", [("a", b"")])
    assert "c.zip: cannot be read: File is not a zip file" in refused(tmp_path / "c.zip")
    path = edm_zip(tmp_path / "b.zip")
    content = path.read_bytes()
    flip(path, content.index(b"IDAT", content.index(b"img00000001")) + 8)
    run(path, tmp_path / "out", "--on-bad", "skip")
    index = read_index(tmp_path / "out" / "train.index.json")
    assert index.samples == N - 1 and "Bad CRC" in index.skipped[0]["reason"]


def test_folders_that_are_no_classes(tmp_path):
    """Names without --classes-file, unknown ones, loose images, nothing."""
    source, names = tmp_path / "source", tmp_path / "names.txt"
    source.mkdir()
    assert "has no class folders" in refused(source)
    (source / "cat").mkdir()
    (source / "cat" / "a.png").write_bytes(encoded(PIXELS[0]))
    assert "'cat' is no class number; give the classes' names" in refused(source)
    names.write_text("dog\nowl\n")
    assert "'cat' is none of --classes-file" in refused(source, "--classes-file", names)
    (source / "loose.png").write_bytes(encoded(PIXELS[0]))
    assert "holds 'loose.png' beside the class folders" in refused(source)
    (tmp_path / "empty" / "0").mkdir(parents=True)
    assert "holds no images" in refused(tmp_path / "empty")


def test_options_that_do_not_fit(tmp_path):
    """Each mistake names the option, its value and what is right."""
    np.savez(tmp_path / "a.npz", image=PIXELS, label=np.array(LABELS))
    source, names = tmp_path / "a.npz", tmp_path / "names.txt"
    names.write_text("a\nb\nc\n")
    for options, message in (
        (["--num-classes", 4], "has labels from 0 to 4; they must be 0 to 3"),
        (["--classes-file", names], "labels from 0 to 4; they must be 0 to 2, for there are 3"),
        (["--classes-file", names, "--num-classes", 5], "--num-classes 5: but --classes-file"),
        (["--num-classes", 0], "--num-classes: 0: must be 1 to"),
        (["--name", "../up"], "--name ../up: must be of the letters"),
        (["--classes-file", tmp_path / "none"], "none: cannot be read"),
    ):
        assert message in refused(source, *options)
    names.write_text("a\na\n")
    assert "must name every class once" in refused(source, "--classes-file", names)
    assert "there is no such file" in refused(tmp_path / "none.npz")
