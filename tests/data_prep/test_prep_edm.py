"""data_prep.edm: every form of generated data comes out pixel for pixel; nothing in it is run."""

import io
import json
import os
import pickle
import subprocess
import sys
import zipfile

import numpy as np
import pytest
from edm_sources import LABELS, PIXELS, N, converted, edm_zip, refused, require_exact, run
from foreign_shards import encode, fails, noise
from hypothesis import given, settings
from hypothesis import strategies as st

from data_prep import verify
from data_prep.edm import main
from lipnext_scale.data.index import KINDS, read_index

pytestmark = pytest.mark.slow  # all of them together take half a minute

# --- every form -------------------------------------------------------------------------------


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("dtype", ["<i8", ">i4", "u1"])
def test_npz(tmp_path, capsys, save, channels, dtype):
    """Stored or compressed, grey or coloured: exact, and nothing but the set is left in --out."""
    pixels = np.ascontiguousarray(PIXELS[:, :, :, :channels])
    others = {"extra": np.arange(3)}
    save(tmp_path / "a.npz", image=pixels, label=np.array(LABELS, dtype), **others)
    run(tmp_path / "a.npz", tmp_path / "out")
    require_exact(tmp_path / "out", pixels.squeeze(3) if channels == 1 else pixels)
    told = capsys.readouterr().out
    assert f"an .npz of 6×5 images with {channels} channels: 12 images of 5 classes" in told
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"train-000000.tar", "train.index.json", "train.index.npy"}
    verify.main([str(tmp_path / "out"), "--decode"])


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_npz_in_worker_processes(tmp_path, save):
    """Forked workers share the archive, or what was unpacked of it; bytes are as with none."""
    save(tmp_path / "a.npz", image=PIXELS, label=np.array(LABELS))
    run(tmp_path / "a.npz", tmp_path / "one", "--shard-samples", 5)
    run(tmp_path / "a.npz", tmp_path / "two", "--shard-samples", 5, "--workers", 2)
    require_exact(tmp_path / "two")
    for path in (tmp_path / "one").iterdir():
        assert path.read_bytes() == (tmp_path / "two" / path.name).read_bytes(), path.name


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_edm_zip(tmp_path, capsys, method):
    """Numbers follow the names, whatever the order of dataset.json; images keep their bytes."""
    run(edm_zip(tmp_path / "a.zip", method=method), tmp_path / "out", "--name", "edm")
    require_exact(tmp_path / "out", name="edm")
    assert "EDM's zip: 12 images of 5 classes" in capsys.readouterr().out
    content = (tmp_path / "out" / "edm-000000.tar").read_bytes()
    assert all(encode(image) in content for image in PIXELS)


def test_edm_folder(tmp_path, capsys):
    """Unpacked, its folder 00000 is no class: dataset.json has the labels."""
    with zipfile.ZipFile(edm_zip(tmp_path / "a.zip")) as archive:
        archive.extractall(tmp_path / "edm")
    run(tmp_path / "edm", tmp_path / "out")
    require_exact(tmp_path / "out")
    assert "EDM's folder with dataset.json" in capsys.readouterr().out


@pytest.mark.parametrize("names", [None, ["ant", "bee", "cat", "dog", "eel", "fly"]])
def test_class_folders(tmp_path, capsys, names):
    """Named by number (with zeros before it or not) or by name; a class may have none."""
    files = []
    for i in range(N):
        folder = names[LABELS[i]] if names else f"{LABELS[i]:0{1 + LABELS[i] % 3}d}"
        files.append((folder, f"{i:02d}", i))
    for folder, name, i in files:
        (tmp_path / "source" / folder).mkdir(parents=True, exist_ok=True)
        (tmp_path / "source" / folder / f"{name}.png").write_bytes(encode(PIXELS[i]))
    options: list[object] = ["--num-classes", 6]
    if names:
        (tmp_path / "names.txt").write_text("\n".join(names) + "\n")
        options = ["--classes-file", tmp_path / "names.txt"]
    run(tmp_path / "source", tmp_path / "out", *options)
    found = converted(tmp_path / "out")
    assert len(found) == N
    for key, (image, label) in found.items():
        i = int(key.split("_")[1])
        assert np.array_equal(image, PIXELS[i]) and label == LABELS[i]
    assert "a folder for each class: 12 images of 6 classes" in capsys.readouterr().out
    classes = read_index(tmp_path / "out" / "train.index.json").classes
    assert classes == (names or [str(i) for i in range(6)])


def test_jpegs_keep_their_bytes(tmp_path):
    """A lossy image is not encoded again."""
    (tmp_path / "source" / "3").mkdir(parents=True)
    image = encode(noise(20, 20, 3), "jpeg", quality=70)
    (tmp_path / "source" / "3" / "a.JPEG").write_bytes(image)
    run(tmp_path / "source", tmp_path / "out")
    assert image in (tmp_path / "out" / "train-000000.tar").read_bytes()
    records = np.load(tmp_path / "out" / "train.index.npy")
    assert records["kind"].tolist() == [KINDS["jpeg"]] and records["label"].tolist() == [3]


@pytest.mark.parametrize("form", ["lines", "table", "table with titles", "inside"])
def test_flat_folder_with_labels(tmp_path, capsys, form):
    """A label a line in the order of names, or name,label in any order; the file may lie inside."""
    source = tmp_path / "source"
    source.mkdir()
    for i in range(N):
        (source / f"{i:03d}.png").write_bytes(encode(PIXELS[i]))
    lines = [f"{i:03d}.png,{LABELS[i]}" for i in reversed(range(N))]
    if form in ("lines", "inside"):
        lines = [str(label) for label in LABELS]
    elif form == "table with titles":
        lines = ["name,label", *lines]
    path = (source if form == "inside" else tmp_path) / "labels.csv"
    path.write_text("\n".join(lines) + "\n\n")
    run(source, tmp_path / "out", "--labels", path)
    require_exact(tmp_path / "out")
    assert "a folder of images with a file of labels" in capsys.readouterr().out


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
@pytest.mark.parametrize("options", [[], ["--short-side", 4], ["--short-side", 400]])
def test_a_dry_run_writes_nothing(tmp_path, capsys, save, options):
    """Also of a compressed archive, which would have to be unpacked, and where images are to be
    scaled, which some are to see how large they become."""
    save(tmp_path / "a.npz", image=PIXELS, label=np.array(LABELS))
    run(tmp_path / "a.npz", tmp_path / "out", "--dry-run", *options)
    told = capsys.readouterr().out
    assert "train: 12 samples of 5 classes in 1 shards" in told and "nothing was written" in told
    assert {path.name for path in tmp_path.iterdir()} == {"a.npz"}


def test_another_source_is_not_taken_for_the_same(tmp_path, capsys):
    """Only the pixels differ: the set that is there is not that of the source."""
    for name, pixels in (("a", PIXELS), ("b", PIXELS ^ 1)):
        np.savez(tmp_path / f"{name}.npz", image=pixels, label=np.array(LABELS))
    run(tmp_path / "a.npz", tmp_path / "out")
    run(tmp_path / "a.npz", tmp_path / "out")
    assert "already complete" in capsys.readouterr().out
    arguments = ["--source", tmp_path / "b.npz", "--out", tmp_path / "out", "--workers", "0"]
    assert "another set is there" in fails(main, arguments, capsys)


@settings(max_examples=25, deadline=None)
@given(
    shape=st.tuples(*[st.integers(1, 9)] * 3),
    channels=st.sampled_from([1, 3]),
    packed=st.booleans(),
    seed=st.integers(0, 99),
)
def test_npz_of_any_size(tmp_path_factory, shape, channels, packed, seed):
    """Every image of every shape is found at its place in the archive."""
    directory = tmp_path_factory.mktemp("any")
    pixels = noise(*shape, channels, seed=seed)
    labels = np.random.default_rng(seed).integers(0, 9, shape[0])
    save = np.savez_compressed if packed else np.savez
    save(directory / "a.npz", label=labels, image=pixels)
    run(directory / "a.npz", directory / "out")
    require_exact(directory / "out", pixels.squeeze(3) if channels == 1 else pixels, labels)


@pytest.mark.slow
@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_memory_does_not_grow_with_the_images(tmp_path, method):
    """150 MB of images are read one by one in a process that grows by a fifth of that at most."""
    images, side = 50, 1000
    with zipfile.ZipFile(tmp_path / "a.npz", "w", method) as archive:
        buffer = io.BytesIO()
        np.save(buffer, np.zeros(images, np.int64))
        archive.writestr("label.npy", buffer.getvalue())
        with archive.open("image.npy", "w", force_zip64=True) as file:
            header = {"descr": "|u1", "fortran_order": False, "shape": (images, side, side, 3)}
            np.lib.format.write_array_header_1_0(file, header)
            for i in range(images):
                file.write(bytes([i]) * (side * side * 3))
    code = (
        "import resource, sys, pathlib; from data_prep.sources.npz import NpzImages; "
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss; before = peak(); "
        "images = NpzImages(pathlib.Path(sys.argv[1])); images.open(pathlib.Path(sys.argv[2])); "
        "assert all((images.load(i) == i).all() for i in range(len(images))); "
        "print(peak() - before)"
    )
    arguments = [str(tmp_path / "a.npz"), str(tmp_path / "out")]
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) * 1024 < 30e6


# --- what is never run or written -------------------------------------------------------------


class MakesDirectory:
    """Unpickled, it makes a directory."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


@pytest.mark.parametrize("name", ["image", "label"])
def test_pickles_in_an_npz_are_not_opened(tmp_path, capsys, name):
    """An array of objects is refused, its pickle makes no directory; others are left alone."""
    code = np.array([MakesDirectory(str(tmp_path / "made"))] * N, dtype=object)
    arrays = {"image": PIXELS, "label": np.array(LABELS)}
    np.savez(tmp_path / "a.npz", **(arrays | {name: code}))
    assert f"its {name} holds Python objects" in refused(tmp_path / "a.npz", capsys)
    np.savez(tmp_path / "b.npz", **arrays, other=code)
    run(tmp_path / "b.npz", tmp_path / "out")
    require_exact(tmp_path / "out")
    with zipfile.ZipFile(tmp_path / "c.npz", "w") as archive:
        archive.writestr("image.npy", pickle.dumps(MakesDirectory(str(tmp_path / "made"))))
    assert "its image is no array of numpy" in refused(tmp_path / "c.npz", capsys)
    assert not (tmp_path / "made").exists()


def test_hostile_names_in_a_zip_stay_inside_the_shards(tmp_path):
    """../ and absolute paths are read as any member; no file appears, no key leaves a directory."""
    names = ["../../up.png", "/tmp/abs.png", "a/../../b.png", "nul\\..\\c.png", "ü\n.png"]
    path = tmp_path / "in" / "a.zip"
    path.parent.mkdir()
    with zipfile.ZipFile(path, "w") as archive:
        for name, image in zip(names, PIXELS, strict=False):
            archive.writestr(name, encode(image))
        labels = [[name, i] for i, name in enumerate(names)]
        archive.writestr("dataset.json", json.dumps({"labels": labels}))
    before = {p for p in tmp_path.rglob("*")}
    run(path, tmp_path / "out")
    created = {p for p in tmp_path.rglob("*")} - before
    assert all(p == tmp_path / "out" or p.parent == tmp_path / "out" for p in created)
    found = converted(tmp_path / "out")
    assert len(found) == len(names) and not any("." in key or "/" in key for key in found)
    for image, label in found.values():
        assert np.array_equal(image, PIXELS[label])
