"""data_prep.inspect: figures that are right, and a sheet that shows the samples."""

import json

import numpy as np
import pytest
from PIL import Image
from prep_sources import encoded, is_refused, noise, succeeds, write_shards, write_tar

from data_prep import index
from data_prep.inspect import THUMB, main

pytestmark = pytest.mark.slow  # all of them together take half a minute


def inspected(*arguments) -> list[dict]:
    return json.loads(succeeds(main, *arguments, "--json"))


def test_figures_of_a_set(tmp_path):
    """Samples, shards, bytes, sizes, kinds, channels and classes are those of the images."""
    members = []
    for i, shape in enumerate([(4, 6, 3), (8, 6, 3), (10, 7)]):
        members += [(f"k{i}.cls", b"%d" % (i % 2)), (f"k{i}.png", encoded(noise(*shape)))]
    members += [("j.cls", b"1"), ("j.jpg", encoded(noise(30, 5, 3), "JPEG"))]
    path = write_tar(tmp_path / "train-000000.tar", members)
    (tmp_path / "names.txt").write_text("cat\ndog\nmouse")
    index.main([str(path), "--classes-file", str(tmp_path / "names.txt")])
    [values] = inspected(tmp_path)
    assert (values["samples"], values["shards"]) == (4, 1)
    assert values["bytes"] == path.stat().st_size
    assert values["kinds"] == {"png": 3, "jpeg": 1} and values["channels"] == {"1": 1, "3": 3}
    assert values["height"] == {"min": 4, "median": 9, "max": 30}
    assert values["width"] == {"min": 5, "median": 6, "max": 7}
    assert values["class_counts"] == {"0": 2, "1": 2}
    assert values["class_names"] == ["cat", "dog", "mouse"]
    text = succeeds(main, tmp_path)
    for part in ("min: 4, median: 9, max: 30", "0 cat", "have no samples: 2 mouse", "png: 3"):
        assert part in text, text


def test_shards_without_an_index(tmp_path):
    """Their headers have no sizes; labels and bytes are known."""
    write_shards(tmp_path, [[0, 1], [1]], kind="JPEG")
    [values] = inspected(f"{tmp_path}/train-*.tar")
    assert values["height"] is None and values["channels"] == {"not known": 3}
    assert values["class_counts"] == {"0": 1, "1": 2} and values["kinds"] == {"jpeg": 3}
    assert "not known; python -m data_prep.index reads it" in succeeds(main, tmp_path)


def test_shuffled_and_sorted_shards(tmp_path):
    """One class to a shard is not shuffled; a random order is, also with few samples a shard."""
    labels = np.repeat(np.arange(10), 40)
    shuffled = np.random.default_rng(0).permutation(labels)
    for name, order, verdict in (("sorted", labels, False), ("random", shuffled, True)):
        (tmp_path / name).mkdir()
        write_shards(tmp_path / name, order.reshape(10, 40).tolist(), side=2)
        found = inspected(tmp_path / name)[0]["shuffling"]
        assert found["shards_shuffled"] is verdict
        assert (found["most_in_a_shard"] == 1) is not verdict
        assert found["same_class_pairs"] == pytest.approx(0.1, abs=0.01)
    assert "NOT SHUFFLED" in succeeds(main, tmp_path / "sorted")


def test_many_classes_and_strange_labels(tmp_path):
    """Of 100 classes the largest and the smallest have a bar; labels may be below zero."""
    labels = [label for label in range(100) for _ in range(1 + label % 7)]
    [path] = write_shards(tmp_path, [labels], "many", side=1)
    assert "… 60 classes between them …" in succeeds(main, path)
    write_tar(tmp_path / "empty.tar", [])
    assert "hold no samples" in is_refused(main, tmp_path / "empty.tar")
    write_shards(tmp_path, [[-5, 2**31 - 1]], "odd")
    [odd] = inspected(tmp_path / "odd-000000.tar")
    assert odd["class_counts"] == {"-5": 1, str(2**31 - 1): 1}


def test_the_sheet_shows_the_images_themselves(tmp_path):
    """Pixel for pixel, enlarged by a whole factor; a damaged image is red."""
    images = [noise(32, 32, 3, seed=i) for i in range(4)] + [noise(32, 32, seed=9)]
    members = []
    for i, image in enumerate(images):
        members += [(f"k{i}.cls", b"%d" % i), (f"k{i}.png", encoded(image))]
    write_tar(tmp_path / "a.tar", [*members, ("bad.cls", b"0"), ("bad.png", b"no image")])
    succeeds(main, tmp_path / "a.tar", "--sheet", tmp_path / "sheet.png")
    sheet = np.asarray(Image.open(tmp_path / "sheet.png"))
    for image in images:
        colour = image if image.ndim == 3 else np.repeat(image[:, :, None], 3, 2)
        large = colour.repeat(THUMB // 32, 0).repeat(THUMB // 32, 1)
        corners = np.argwhere((sheet == large[0, 0]).all(2))
        parts = [sheet[y : y + THUMB, x : x + THUMB] for y, x in corners]
        assert any(np.array_equal(part, large) for part in parts)
    assert (sheet == (0xC0, 0x39, 0x2B)).all(2).sum() > 2 * THUMB


def test_wrong_arguments(tmp_path):
    """Each mistake is one line with what would be right, before anything is written."""
    write_shards(tmp_path, [[0]])
    for arguments, message in (
        ([tmp_path / "none.tar"], "no shard"),
        ([tmp_path, "--samples", "0"], "--samples: 0: must be 1 to 2000"),
        ([tmp_path, "--sheet", tmp_path / "a.jpg"], "must end in .png"),
        ([tmp_path, "--sheet", tmp_path / "no" / "a.png"], "cannot be written"),
    ):
        assert message in is_refused(main, *arguments)
    assert [path.name for path in tmp_path.iterdir()] == ["train-000000.tar"]
