"""Tiny ImageNet from its official folder."""

from pathlib import Path

import pytest
from prep_sources import (
    CLASSES,
    argv,
    encoded,
    is_refused,
    samples_of,
    smooth,
    succeeds,
    write_files,
)

from data_prep import tiny_imagenet
from lipnext_scale.data.index import read_index


def official(root: Path) -> Path:
    """As it is published: ids in no order, boxes beside the images, test without labels."""
    images = [encoded(smooth(64, 64, seed=i), "JPEG") for i in range(16)]
    files = {"wnids.txt": "".join(f"{name}\n" for name in reversed(CLASSES)).encode()}
    for c, name in enumerate(CLASSES):
        files[f"train/{name}/{name}_boxes.txt"] = b"0 0 62 43\n"
        for i in range(3):
            files[f"train/{name}/images/{name}_{i}.JPEG"] = images[3 * c + i]
    lines = [f"val_{i}.JPEG\t{CLASSES[(i + 1) % 4]}\t0\t32\t44\t62\n" for i in range(4)]
    files["val/val_annotations.txt"] = "".join(lines).encode()
    files |= {f"val/images/val_{i}.JPEG": images[12 + i] for i in range(4)}
    files |= {"test/images/test_0.JPEG": images[0], "words.txt": b"n01440764\ttench\n"}
    return write_files(root, files)


def test_train_and_val(tmp_path):
    """Labels are places among the sorted ids; val by its annotations; bytes as they were."""
    source = official(tmp_path / "s")
    succeeds(tiny_imagenet.main, *argv(source, tmp_path / "out"))
    train, test = (samples_of(tmp_path / "out", name) for name in ("train", "test"))
    assert len(train) == 12 and len(test) == 4
    for key, sample in train.items():
        _, name, number = key.split("_")
        assert CLASSES[sample.label] == name
        image = source / "train" / name / "images" / f"{name}_{number}.JPEG"
        assert sample.content == image.read_bytes()
    for key, sample in test.items():
        number = int(key.split("_")[2])
        assert sample.label == (number + 1) % 4
        assert sample.content == (source / "val" / "images" / f"val_{number}.JPEG").read_bytes()
    assert read_index(tmp_path / "out" / "test.index.json").classes == CLASSES


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("wnids.txt", None, "wnids.txt: cannot be read"),
        ("wnids.txt", b"n01440764\nn01440764\n", "must name every class once"),
        ("wnids.txt", b"n99999999\n", "class n01440764 is in train, not in wnids.txt"),
        ("val/val_annotations.txt", b"val_0.JPEG\tn99999999\t0\n", "unknown class 'n99999999'"),
        ("val/val_annotations.txt", b"val_0.JPEG\tn01440764\n", "'val_1.JPEG' has no line"),
        ("val/val_annotations.txt", b"val_0.JPEG\tn01440764\n" * 2, "is there twice"),
        ("val/images/val_3.JPEG", None, "'val_3.JPEG' has no file in val/images"),
        ("val/images/more.JPEG", b"x", "'more.JPEG' has no line"),
    ],
)
def test_broken_folders(tmp_path, name, content, message):
    """The file is named, and what does not go together."""
    source = official(tmp_path / "s")
    if content is None:
        (source / name).unlink()
    else:
        write_files(source, {name: content})
    assert message in is_refused(tiny_imagenet.main, *argv(source, tmp_path / "out"))
    assert not (tmp_path / "out").exists()
