"""ImageNet in each of its forms: class folders, the official tars, subsets of classes."""

import io
import shutil
import tarfile
from pathlib import Path

import numpy as np
import pytest
from prep_sources import (
    CLASSES,
    argv,
    class_images,
    contents,
    image_folders,
    is_refused,
    run_command,
    samples_of,
    succeeds,
    tar_gz_of,
    tar_of,
    write_files,
)
from scipy.io import savemat

from data_prep import imagenet
from lipnext_scale.data.index import read_index

pytestmark = pytest.mark.slow  # all of them together take half a minute

TRAIN_TAR, VAL_TAR = "ILSVRC2012_img_train.tar", "ILSVRC2012_img_val.tar"
DEVKIT = "ILSVRC2012_devkit_t12.tar.gz"


def devkit() -> bytes:
    """With the kit's own numbers, which are not in the order of the ids, and a parent class."""
    kinds = [("ILSVRC2012_ID", "O"), ("WNID", "O"), ("words", "O"), ("num_children", "O")]
    rows = [(i + 1, name, "a word", 0) for i, name in enumerate(reversed(CLASSES))]
    synsets = np.array([*rows, (5, "n00001740", "entity", 4)], dtype=kinds).reshape(-1, 1)
    buffer = io.BytesIO()
    savemat(buffer, {"synsets": synsets})
    truth = "".join(f"{len(CLASSES) - CLASSES.index(name)}\n" for name in val_classes())
    data = "ILSVRC2012_devkit_t12/data"
    files = {f"{data}/meta.mat": buffer.getvalue(), f"{data}/readme.txt": b"x"}
    return tar_gz_of(files | {f"{data}/ILSVRC2012_validation_ground_truth.txt": truth.encode()})


def val_classes() -> list[str]:
    return [CLASSES[i] for i in (2, 0, 3, 3, 1, 0)]


def val_images() -> dict[str, bytes]:
    images = list(class_images(2).values())[:6]
    return {f"ILSVRC2012_val_{i + 1:08d}.JPEG": content for i, content in enumerate(images)}


def official(root: Path) -> Path:
    """Both tars and the kit, the members of val in another order than their names."""
    inner = {
        f"{name}.tar": tar_of(
            {k.split("/")[1]: v for k, v in class_images(3).items() if k.startswith(name)}
        )
        for name in reversed(CLASSES)
    }
    shuffled = dict(sorted(val_images().items(), reverse=True))
    files = {TRAIN_TAR: tar_of(inner), VAL_TAR: tar_of(shuffled), DEVKIT: devkit()}
    return write_files(root, files)


@pytest.fixture
def tars(tmp_path) -> Path:
    return official(tmp_path / "tars")


def labelled(out: Path, name: str) -> dict[str, tuple[int, bytes]]:
    """(label, bytes) by the original stem."""
    found = samples_of(out, name)
    return {key.split("_", 1)[1]: (s.label, s.content) for key, s in found.items()}


def test_folders_and_tars_hold_the_same(tars, tmp_path):
    """train from class folders and from the tar of tars are the same samples, byte for byte."""
    folders = image_folders(tmp_path / "folders")
    succeeds(imagenet.main, *argv(folders, tmp_path / "a"))
    before = contents(tars)
    succeeds(imagenet.main, *argv(tars, tmp_path / "b"))
    assert contents(tars) == before  # nothing was unpacked
    assert samples_of(tmp_path / "a", "train") == samples_of(tmp_path / "b", "train")
    assert len(labelled(tmp_path / "b", "train")) == 12
    assert read_index(tmp_path / "b" / "train.index.json").classes == CLASSES


def test_val_tar_has_the_labels_of_the_kit(tars, tmp_path):
    """The kit's number of an image, by its name's order, to an id, to its place among all ids."""
    succeeds(imagenet.main, *argv(tars, tmp_path / "out", "--split", "val"))
    assert labelled(tmp_path / "out", "test") == {
        name.split(".")[0]: (CLASSES.index(class_id), content)
        for (name, content), class_id in zip(val_images().items(), val_classes(), strict=True)
    }


def test_val_labels_from_a_text_file(tars, tmp_path):
    """One id a line gives the same set as the kit, also for the tar alone."""
    (tars / DEVKIT).rename(tmp_path / "kit")
    (tmp_path / "labels.txt").write_text("".join(f"{name}\n" for name in val_classes()))
    error = is_refused(imagenet.main, *argv(tars / VAL_TAR, tmp_path / "none"))
    assert "give --devkit" in error and "--val-labels" in error
    text = ("--val-labels", tmp_path / "labels.txt")
    succeeds(imagenet.main, *argv(tars / VAL_TAR, tmp_path / "a", *text))
    succeeds(imagenet.main, *argv(tars / VAL_TAR, tmp_path / "b", "--devkit", tmp_path / "kit"))
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


@pytest.mark.parametrize("form", ["folders", "tars"])
def test_a_subset_of_the_classes(tars, tmp_path, form):
    """The same two classes in both sets, numbered in sorted order, whichever set is converted."""
    source = tars if form == "tars" else image_folders(tmp_path / "folders")
    subset = ("--classes", 2, "--class-seed", 5)
    succeeds(imagenet.main, *argv(source, tmp_path / "both", *subset))
    chosen = read_index(tmp_path / "both" / "train.index.json").classes
    assert len(chosen) == 2 and chosen == sorted(chosen) and set(chosen) < set(CLASSES)
    assert read_index(tmp_path / "both" / "test.index.json").classes == chosen
    for stem, (label, _) in labelled(tmp_path / "both", "train").items():
        assert stem.split("_")[0] == chosen[label]
    assert len(labelled(tmp_path / "both", "train")) == 6
    succeeds(imagenet.main, *argv(source, tmp_path / "one", *subset, "--split", "val"))
    assert samples_of(tmp_path / "one", "test") == samples_of(tmp_path / "both", "test")


def test_subsets_follow_their_seed():
    """The same for a seed, others for others; 400 of 1000 as in the scaling study."""
    ids = [f"n{i:08d}" for i in range(1000)]
    one, again, other = (imagenet.chosen_classes(ids, 400, seed) for seed in (0, 0, 1))
    assert one == again != other and len(set(one)) == 400 and one == sorted(one)
    # The very classes, so that a set converted years apart has the same.
    assert one[:4] == ["n00000001", "n00000002", "n00000005", "n00000008"]


def test_class_folders_need_their_split(tmp_path):
    """Class folders right in the source are no split by name; with --split val they are test. What
    desktop programs leave in folders is no image."""
    hidden = {f"{CLASSES[0]}/.DS_Store": b"x", ".cache/x": b"y"}
    source = write_files(tmp_path / "s", class_images(2) | hidden)
    assert "give --split" in is_refused(imagenet.main, *argv(source, tmp_path / "out"))
    succeeds(imagenet.main, *argv(source, tmp_path / "out", "--split", "val"))
    assert len(samples_of(tmp_path / "out", "test")) == 8


def test_hostile_names_in_a_tar(tmp_path):
    """Paths that climb, begin at the root or are links: read by place, never followed or made."""
    names = ["../../x.JPEG", "/etc/passwd", "a/../b.JPEG", "...", "犬.JPEG", "y" * 300]
    images = dict(zip(names, class_images(2).values(), strict=False))
    inner = tar_of(images)
    link = tarfile.TarInfo("link.JPEG")
    link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
    outer = tar_of({"../../n01440764.tar": link.tobuf() + inner, "/n01443537.tar": inner})
    source = write_files(tmp_path / "deep" / "source", {TRAIN_TAR: outer})
    succeeds(imagenet.main, *argv(source, tmp_path / "deep" / "out"))
    found = samples_of(tmp_path / "deep" / "out", "train")
    assert sorted(s.content for s in found.values()) == sorted([*images.values()] * 2)
    assert {s.label for s in found.values()} == {0, 1}
    assert read_index(tmp_path / "deep" / "out" / "train.index.json").classes == CLASSES[:2]
    assert [path.name for path in tmp_path.iterdir()] == ["deep"]
    assert sorted(path.name for path in (tmp_path / "deep").iterdir()) == ["out", "source"]


@pytest.mark.parametrize("cut", [1, 20_000])
def test_a_tar_that_is_cut_off(tars, tmp_path, cut):
    """A download that broke off is not a smaller data set."""
    for name in (TRAIN_TAR, VAL_TAR):
        content = (tars / name).read_bytes().rstrip(b"\0")
        short = tmp_path / name
        short.write_bytes(content[: -min(cut, len(content) - 600)])
        error = is_refused(imagenet.main, *argv(short, tmp_path / "out", "--devkit", tars / DEVKIT))
        assert f"{short}: " in error and "cannot be read" in error
    assert not (tmp_path / "out").exists()


def test_broken_labels_of_val(tars, tmp_path):
    """The kit or the text file is named, with what is wrong with it."""
    (tars / DEVKIT).unlink()
    truth = "ILSVRC2012_validation_ground_truth.txt"
    for option, content, message in (
        ("--devkit", b"nothing", "cannot be read"),
        ("--devkit", tar_gz_of({"readme": b"x"}), "has no "),
        ("--devkit", tar_gz_of({"meta.mat": b"x", truth: b"1"}), "meta.mat: cannot be read"),
        ("--val-labels", None, "cannot be read: No such file"),
        ("--val-labels", b"n01440764\n" * 5, "has 6 images, but there are 5 labels"),
        ("--val-labels", b"n99999999\n" * 6, "its class n99999999 is none of"),
    ):
        file = tmp_path / "labels"
        file.unlink(missing_ok=True)
        if content is not None:
            file.write_bytes(content)
        outcome = run_command(imagenet.main, *argv(tars, tmp_path / "out", option, file))
        assert outcome.code == 2 and message in outcome.err, outcome


def test_wrong_options_and_folders(tmp_path):
    """Named with their value and what is right."""
    source = image_folders(tmp_path / "s")
    for options, message in (
        (("--classes", 0), "--classes 0: the source has 4 classes"),
        (("--classes", 5), "--classes 5: the source has 4 classes"),
        (("--class-seed", -1), "--class-seed: -1: must be 0 to"),
        (("--source", "nowhere"), "--source nowhere: is neither"),
        (("--source", __file__), "give --split train or --split val"),
    ):
        assert message in is_refused(imagenet.main, *argv(source, tmp_path / "out", *options))
    write_files(source, {"val/n99999999/a.png": b""})
    error = is_refused(imagenet.main, *argv(source, tmp_path / "out"))
    assert "n99999999: is no class of train" in error
    shutil.rmtree(source / "train")
    error = is_refused(imagenet.main, *argv(source, tmp_path / "out", "--split", "train"))
    assert "--split train: " in error and "has none" in error
    write_files(source, {f"val/{CLASSES[0]}/more/a.png": b"x"})  # it would be lost silently
    error = is_refused(imagenet.main, *argv(source, tmp_path / "out"))
    assert f"{CLASSES[0]}/more: is no file" in error
    assert not (tmp_path / "out").exists()
