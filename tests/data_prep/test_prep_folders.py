"""Class folders of one's own, and Datasets, as shards."""

from collections import Counter

import numpy as np
import pytest
import torch
from PIL import Image
from prep_sources import (
    QUICK,
    class_images,
    contents,
    decoded,
    encoded,
    is_refused,
    samples_of,
    smooth,
    succeeds,
    write_files,
)
from shard_making import noise

from data_prep import folders, write_shards
from lipnext_scale.data.index import read_index
from lipnext_scale.utils.errors import UserError

PETS = ["cat", "dog", "train"]  # a class may have the name of a split


def test_a_share_of_each_class_is_for_testing(tmp_path):
    """Of 10, 3 and 1 images 2, 1 and none; by names and seed alone; no image is in both."""
    images = class_images(10, ["cat"]) | class_images(3, ["dog"]) | class_images(1, ["train"])
    for name in ("one", "moved"):
        write_files(tmp_path / name, images)
        argv = (tmp_path / name, "--out", tmp_path / f"{name}_out", "--test-share", 0.2, *QUICK)
        printed = succeeds(folders.main, *argv)
    assert "builtin:own_images.yaml" in printed and "model.num_classes=3" in printed
    assert contents(tmp_path / "one_out") == contents(tmp_path / "moved_out")
    train, test = (samples_of(tmp_path / "one_out", name) for name in ("train", "test"))
    assert Counter(sample.label for sample in train.values()) == {0: 8, 1: 2, 2: 1}
    assert Counter(sample.label for sample in test.values()) == {0: 2, 1: 1}
    stored = [sample.content for sample in (*train.values(), *test.values())]
    assert sorted(stored) == sorted(images.values())
    assert read_index(tmp_path / "one_out" / "test.index.json").classes == PETS
    argv = (tmp_path / "one", "--out", tmp_path / "other", "--test-share", 0.2, "--seed", 1)
    succeeds(folders.main, *argv, *QUICK)
    other = samples_of(tmp_path / "other", "test").values()
    assert {sample.content for sample in other} != {sample.content for sample in test.values()}


def test_splits_that_are_there(tmp_path):
    """val alone is the test set; beside test it keeps its name. A share is then a mistake."""
    images = class_images(1, PETS)
    for parts, sets in ((["train", "val"], {"test", "train"}), (["train", "val", "test"], {"val"})):
        source, out = tmp_path / f"s{len(parts)}", tmp_path / f"out{len(parts)}"
        write_files(source, {f"{part}/{name}": v for part in parts for name, v in images.items()})
        succeeds(folders.main, source, "--out", out, *QUICK)
        assert {path.name.split(".")[0] for path in out.glob("*.index.json")} == sets | {
            "train",
            "test",
        }
    error = is_refused(folders.main, source, "--out", tmp_path / "no", "--test-share", 0.5)
    assert "--test-share 0.5" in error and "has test, val already" in error
    (source / "val" / "cow").mkdir()
    assert "val/cow: is no class of train" in is_refused(
        folders.main, source, "--out", tmp_path / "no"
    )


def test_portable_pixmaps(tmp_path):
    """Of 8 bits they become PNGs; deeper ones, which Pillow cuts off silently, are refused."""
    pixels = smooth(6, 5)
    deep = b"P6 5 6 1023\n" + pixels.astype(">u2").tobytes()
    source = write_files(tmp_path / "s", {f"cat/{i}.ppm": encoded(pixels, "PPM") for i in range(2)})
    succeeds(folders.main, source, "--out", tmp_path / "out", *QUICK)
    for sample in samples_of(tmp_path / "out", "train").values():
        assert sample.kind == "png" and np.array_equal(decoded(sample.content), pixels)
    write_files(source, {"cat/2.ppm": deep, "cat/3.ppm": deep, "cat/4.ppm": deep})
    error = is_refused(folders.main, source, "--out", tmp_path / "no", *QUICK)
    assert "it has 10 bits a channel" in error


class Indexed(torch.utils.data.Dataset):
    """As torch wants it: neither __iter__ nor an IndexError at its end."""

    classes = PETS

    def __init__(self, images) -> None:
        self.images = images

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, i):
        return self.images[i % len(self.images)], torch.tensor(i % 3)


def test_a_dataset_becomes_shards(tmp_path):
    """In any form of an image: the very pixels, the labels, the names of the classes."""
    pixels = noise(8, 9, 3)
    tensor = torch.from_numpy(pixels).permute(2, 0, 1)
    forms = [Image.fromarray(pixels), pixels, pixels / 255, tensor, tensor.float() / 255]
    write_shards(Indexed(forms), tmp_path, "train")
    write_shards(
        ((image, 1) for image in (pixels[..., 0], tensor[:1])), str(tmp_path), "test", "ab"
    )
    train, test = (samples_of(tmp_path, name) for name in ("train", "test"))
    for key, sample in train.items():
        assert sample.label == int(key.split("_")[1]) % 3 and len(train) == 5
        assert np.array_equal(decoded(sample.content), pixels)
    for sample in test.values():
        assert sample.label == 1 and len(test) == 2
        assert np.array_equal(decoded(sample.content), pixels[..., 0])
    assert read_index(tmp_path / "train.index.json").classes == PETS
    assert read_index(tmp_path / "test.index.json").classes == ["a", "b"]
    with pytest.raises(UserError, match="another set is there"):  # of the same sizes
        write_shards(Indexed([255 - pixels] * 5), tmp_path, "train")


@pytest.mark.parametrize(
    "image, label, message",
    [
        (torch.full((3, 8, 8), -1.0), 0, "is from -1 to -1; must be in \\[0, 1\\]"),
        (np.full((8, 8), np.nan), 0, "must be in"),
        (np.zeros((8, 8, 3), np.int64), 0, "Cannot handle this data type"),
        (np.zeros((8, 8), np.uint16), 0, "all 1 images are bad"),
        (np.zeros((8, 8), np.uint8), 2, "its label is 2, of 2 named classes"),
        (np.zeros((8, 8), np.uint8), 0.5, "cannot be interpreted as an integer"),
    ],
)
def test_samples_that_are_refused(tmp_path, image, label, message):
    with pytest.raises(UserError, match=message):
        write_shards([(image, label)], tmp_path, classes=["cat", "dog"])
    assert not list(tmp_path.glob("*.index.json"))
