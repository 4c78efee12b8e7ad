"""data_prep.edm: sources that are broken or do not fit are refused in one line."""

import json
import re
import zipfile

import numpy as np
import pytest
from edm_sources import LABELS, PIXELS, N, edm_zip, refused, require_exact, run
from foreign_shards import encode, fails, flip, write_tar
from hypothesis import given, settings
from hypothesis import strategies as st

from data_prep.edm import main
from lipnext_scale.data.index import read_index

pytestmark = pytest.mark.slow  # all of them together take half a minute

NPZ = {
    "no image": ({"label": np.array(LABELS)}, "has no array 'image' but label"),
    "no label": ({"image": PIXELS}, "has no array 'label'"),
    "floats": ({"image": PIXELS / 255, "label": np.array(LABELS)}, "its image is float64"),
    "NCHW": ({"image": PIXELS.transpose(0, 3, 1, 2).copy()}, "must be uint8 .N, height, width"),
    "no dimension": ({"image": PIXELS[0]}, "must be uint8 .N, height, width"),
    "no images": ({"image": PIXELS[:0], "label": np.zeros(0, int)}, "must be uint8"),
    "Fortran": ({"image": np.asfortranarray(PIXELS)}, "is in Fortran's order"),
    "few labels": ({"image": PIXELS, "label": np.arange(5)}, r"its label is int64 \[5\]; .*\[12\]"),
    "float labels": ({"image": PIXELS, "label": np.array(LABELS) / 1}, "its label is float64"),
    "one-hot": ({"image": PIXELS, "label": np.eye(12, dtype=int)}, "must be integers"),
    "negative": ({"image": PIXELS, "label": np.array(LABELS) - 1}, "labels from -1 to 3"),
    "huge": ({"image": PIXELS, "label": np.array(LABELS, "u8") << 60}, "labels from 0 to 46116"),
    "strings": ({"image": PIXELS, "label": np.array(["a"] * N)}, "its label is <U1"),
}


@pytest.mark.parametrize("name", NPZ)
def test_arrays_that_are_no_images(tmp_path, capsys, name):
    """One line with what the array is and what it must be, exit code 2, nothing written."""
    arrays, message = NPZ[name]
    np.savez(tmp_path / "a.npz", **arrays)
    told = refused(tmp_path / "a.npz", capsys)
    assert told.startswith(f"error: --source {tmp_path}/a.npz: ")
    assert re.search(message, told), told


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
    if data.draw(st.booleans()):  # it is the conversion's to tell, but a dry run may meet it too
        try:
            run(source, directory / "out", "--dry-run", "--short-side", 4)
        except SystemExit as ended:
            assert ended.code == 2
    try:
        run(source, directory / "out")
    except SystemExit as ended:
        assert ended.code == 2
    else:
        require_exact(directory / "out")


ZIP = {
    "null": (None, "not"),
    "labels are null": ({"labels": None}, "has no labels"),
    "no labels": ({}, "is not"),
    "a list": ([], "is not"),
    "one missing": ({"labels": [[f"00000/img{i:08d}.png", 0] for i in range(11)]}, "have no label"),
    "one too many": (
        {"labels": [[f"00000/img{i:08d}.png", 0] for i in range(13)]},
        "1 of 13 labels have no image, '00000/img00000012.png' is one",
    ),
    "twice": ({"labels": [["a.png", 0], ["a.png", 1]]}, "has 'a.png' twice"),
    "one-hot": ({"labels": [["a.png", [0, 1]]]}, "in place of a name and a class number"),
    "fraction": ({"labels": [["a.png", 0.5]]}, "in place of a name and a class number"),
    "truth": ({"labels": [["a.png", True]]}, "in place of a name and a class number"),
    "not pairs": ({"labels": ["a.png"]}, "in place of a name and a class number"),
    "surrogate": ({"labels": [["\ud800.png", 1]]}, "have no label"),
}


@pytest.mark.parametrize("name", ZIP)
def test_labels_of_a_zip_that_are_none(tmp_path, capsys, name):
    """Each way in which dataset.json can be wrong is told with the archive's name."""
    values, message = ZIP[name]
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        for i in range(N):
            archive.writestr(f"00000/img{i:08d}.png", encode(PIXELS[i]))
        archive.writestr("dataset.json", json.dumps(values))
    told = refused(tmp_path / "a.zip", capsys)
    assert told.startswith(f"error: --source {tmp_path}/a.zip: ") and message in told


def test_a_zip_without_labels_or_of_another_kind(tmp_path, capsys):
    """No dataset.json, one that is no JSON or too deep, an encrypted image, no zip at all."""
    for text, message in (
        (None, "has no dataset.json"),
        (b"{", "is not"),
        (b"[" * 10**6, "is not"),
    ):
        with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
            archive.writestr("a.png", encode(PIXELS[0]))
            if text is not None:
                archive.writestr("dataset.json", text)
        assert message in refused(tmp_path / "a.zip", capsys)
    path = edm_zip(tmp_path / "b.zip")
    content = bytearray(path.read_bytes())
    content[content.index(b"PK\x01\x02") + 8] |= 1
    path.write_bytes(content)
    out = tmp_path / "bad"
    told = fails(main, ["--source", path, "--out", out, "--workers", "0"], capsys)
    assert "00000/img00000000.png (it is encrypted)" in told
    write_tar(tmp_path / "c.zip", [("a", b"")])
    assert "is no readable zip archive" in refused(tmp_path / "c.zip", capsys)


@pytest.mark.parametrize(
    "lines, message",
    [
        (["1"] * (N - 1), "has 11 labels for 12 images"),
        (["1"] * (N - 1) + ["cat"], "'cat' is no class number"),
        (["1"] * (N - 1) + ["1.5"], "'1.5' is no class number"),
        (["1"] * (N - 1) + ["--5"], "'--5' is no class number"),
        (["1"] * (N - 1) + ["-1"], "labels from -1 to 1"),
        ([f"{i:03d}.png,1" for i in range(N - 1)], "1 of 12 images have no label, '011.png'"),
        ([f"{i:03d}.png,1" for i in range(N + 1)], "1 of 13 labels have no image, '012.png'"),
        (["000.png,1", "000.png,1"], "has '000.png' twice"),
        (["../000.png,1"], "have no label"),
        (["000.png,1,2"], "is not name,label"),
        ([], "has 0 labels for 12 images"),
    ],
)
def test_a_file_of_labels_that_does_not_fit(tmp_path, capsys, lines, message):
    """Too few, too many, twice, no numbers: told with what does not fit."""
    (tmp_path / "source").mkdir()
    for i in range(N):
        (tmp_path / "source" / f"{i:03d}.png").write_bytes(encode(PIXELS[i]))
    labels = tmp_path / "labels.txt"
    labels.write_text("\n".join(lines))
    assert message in refused(tmp_path / "source", capsys, "--labels", labels)


def test_folders_that_are_no_classes(tmp_path, capsys):
    """Names without --classes-file, unknown ones, the same number twice, loose images, nothing."""
    source = tmp_path / "source"
    source.mkdir()
    assert "holds no folder of a class" in refused(source, capsys)
    (source / "cat").mkdir()
    (source / "cat" / "a.png").write_bytes(encode(PIXELS[0]))
    assert "'cat' is no class number; give the classes' names" in refused(source, capsys)
    names = tmp_path / "names.txt"
    names.write_text("dog\nowl\n")
    told = refused(source, capsys, "--classes-file", names)
    assert "'cat' is none of --classes-file" in told
    (source / "cat").rename(source / "1")
    (source / "01").mkdir()
    assert "two folders have the same class number" in refused(source, capsys)
    (source / "loose.png").write_bytes(encode(PIXELS[0]))
    assert "holds 'loose.png' beside the folders" in refused(source, capsys)
    empty = tmp_path / "empty"
    (empty / "0").mkdir(parents=True)
    assert "holds no images" in refused(empty, capsys)


def test_options_that_do_not_fit(tmp_path, capsys):
    """Each mistake names the option, its value and what is right."""
    np.savez(tmp_path / "a.npz", image=PIXELS, label=np.array(LABELS))
    source, names = tmp_path / "a.npz", tmp_path / "names.txt"
    names.write_text("a\nb\nc\n")
    for options, message in (
        (["--num-classes", 4], "has labels from 0 to 4; they must be 0 to 3"),
        (["--classes-file", names], "labels from 0 to 4; they must be 0 to 2, for there are 3"),
        (["--classes-file", names, "--num-classes", 5], "--num-classes 5: but --classes-file"),
        (["--num-classes", 0], "--num-classes 0: must be from 1"),
        (["--labels", names], "goes with a folder"),
        (["--name", "../up"], "--name ../up: must be of the letters"),
        (["--classes-file", tmp_path / "none"], "none: cannot be read"),
    ):
        assert message in refused(source, capsys, *map(str, options))
    names.write_text("a\na\n")
    assert "has a class twice" in refused(source, capsys, "--classes-file", names)
    assert "there is no such file" in refused(tmp_path / "none.npz", capsys)


def test_a_damaged_image_is_named(tmp_path, capsys):
    """By its name in the source; --on-bad skip leaves it out and lists it."""
    path = edm_zip(tmp_path / "a.zip")
    flip(path, path.read_bytes().index(b"IDAT") + 8)
    out = tmp_path / "out"
    told = fails(main, ["--source", path, "--out", out, "--workers", "0"], capsys)
    assert "img00000000.png" in told and "checksum" in told
    run(path, out, "--on-bad", "skip")
    index = read_index(out / "train.index.json")
    assert index.samples == N - 1
    assert [bad["name"] for bad in index.skipped] == ["00000/img00000000.png"]
