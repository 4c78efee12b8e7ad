"""data_prep.inspect: figures that are right, and a sheet that shows the samples."""

import json

import numpy as np
import pytest
from foreign_shards import encode, fails, noise, write_shards, write_tar
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from data_prep import index
from data_prep.checking.contents import THUMB, choose, entropy
from data_prep.inspect import main
from lipnext_scale.data.index import RECORD

pytestmark = pytest.mark.slow  # all of them together take half a minute


def inspected(arguments, capsys) -> list[dict]:
    capsys.readouterr()
    main([*map(str, arguments), "--json"])
    return json.loads(capsys.readouterr().out)


def test_figures_of_a_set(tmp_path, capsys):
    """Samples, shards, bytes, sizes, kinds, channels and classes are those of the images."""
    members = []
    shapes = [(4, 6, 3), (8, 6, 3), (10, 7)]
    for i, shape in enumerate(shapes):
        members += [(f"k{i}.cls", b"%d" % (i % 2)), (f"k{i}.png", encode(noise(*shape)))]
    members += [("j.cls", b"1"), ("j.jpg", encode(noise(30, 5, 3), "jpeg"))]
    path = write_tar(tmp_path / "train-000000.tar", members)
    (tmp_path / "names.txt").write_text("cat\ndog\nmouse")
    index.main([str(path), "--classes-file", str(tmp_path / "names.txt")])
    [values] = inspected([tmp_path], capsys)
    assert (values["samples"], values["shards"]) == (4, 1)
    assert values["bytes"] == path.stat().st_size
    assert values["kinds"] == {"png": 3, "jpeg": 1} and values["channels"] == {"1": 1, "3": 3}
    assert values["height"] == {"min": 4, "median": 9, "max": 30}
    assert values["width"] == {"min": 5, "median": 6, "max": 7}
    assert values["class_counts"] == {"0": 2, "1": 2}
    assert values["class_names"] == ["cat", "dog", "mouse"]
    assert values["converter"]["name"] == "data_prep.index"
    main([str(tmp_path)])
    text = capsys.readouterr().out
    for expected in (
        "4 in 1 shards",
        "4 to 30, median 9",
        "0 cat",
        "have none: 2 mouse",
        "png (3)",
    ):
        assert expected in text, expected


def test_shards_without_an_index(tmp_path, capsys):
    """Their headers do not tell the sizes, and that is said; labels and bytes are known."""
    write_shards(tmp_path, [[0, 1], [1]], kind="jpg")
    [values] = inspected([f"{tmp_path}/train-*.tar"], capsys)
    assert values["height"] is None and values["channels"] == {"not known": 3}
    assert values["class_counts"] == {"0": 1, "1": 2} and values["kinds"] == {"jpeg": 3}
    main([str(tmp_path)])
    assert "not known; python -m data_prep.index reads it" in capsys.readouterr().out


def test_shuffled_and_sorted_shards_are_told_apart(tmp_path, capsys):
    """One class to a shard is not shuffled; a random order is, also with few samples a shard."""
    labels = np.repeat(np.arange(10), 40)
    shuffled = np.random.default_rng(0).permutation(labels)
    for name, order in (("sorted", labels), ("random", shuffled)):
        (tmp_path / name).mkdir()
        write_shards(tmp_path / name, order.reshape(10, 40).tolist(), side=2)
    for name, verdict in (("sorted", False), ("random", True)):
        [values] = inspected([tmp_path / name], capsys)
        found = values["shuffling"]
        assert found["shards_shuffled"] is verdict
        assert found["set_entropy"] == pytest.approx(np.log2(10))
        assert found["random_entropy"] == pytest.approx(3.15, abs=0.1)
        assert found["mean_entropy"] == pytest.approx(3.15 if verdict else 0, abs=0.1)
        assert found["same_class_neighbours"] == pytest.approx(0.1 if verdict else 1, abs=0.06)
        assert found["same_class_pairs"] == pytest.approx(0.1)
    main([str(tmp_path / "sorted")])
    text = capsys.readouterr().out
    assert "NOT SHUFFLED" in text and "least in train-00000" in text


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=50).filter(any))
def test_entropy(counts):
    """0 for one class, log₂ of their number for equal ones, between them otherwise."""
    counts = np.array(counts)
    present = int((counts > 0).sum())
    assert -1e-12 <= entropy(counts) <= np.log2(present) + 1e-9
    assert entropy(np.full(present, 7)) == pytest.approx(np.log2(present))


def test_many_classes_show_the_largest_and_the_smallest(tmp_path, capsys):
    """Of 100 classes the ten largest and the ten smallest have a bar."""
    labels = [label for label in range(100) for _ in range(1 + label % 7)]
    write_shards(tmp_path, [labels], side=1)
    main([str(tmp_path)])
    text = capsys.readouterr().out
    assert "… 80 classes between them …" in text and text.count("█\n") + text.endswith("█") <= 21
    assert "100, of 1 to 7 samples each" in text


def test_an_empty_set_and_strange_labels(tmp_path, capsys):
    """No samples, and labels far apart or below zero, are told as they are."""
    write_tar(tmp_path / "empty.tar", [])
    write_shards(tmp_path, [[-5, 2**31 - 1, -(2**31)]], "odd")
    empty, odd = inspected([tmp_path / "empty.tar", tmp_path / "odd-000000.tar"], capsys)
    assert empty["samples"] == 0
    assert odd["class_counts"] == {"-5": 1, str(2**31 - 1): 1, str(-(2**31)): 1}
    main([str(tmp_path), "--sheet", str(tmp_path / "sheet.png")])
    assert "0 in 1 shards" in capsys.readouterr().out and (tmp_path / "sheet.png").exists()
    told = fails(main, [tmp_path / "empty.tar", "--sheet", tmp_path / "no.png"], capsys)
    assert "no samples to show" in told and not (tmp_path / "no.png").exists()


# --- the sheet --------------------------------------------------------------------------------


def test_the_sheet_shows_the_images_themselves(tmp_path, capsys):
    """Each image is there pixel for pixel, enlarged by a whole factor, with room below for text."""
    images = [noise(32, 32, 3, seed=i) for i in range(4)] + [noise(32, 32, seed=9)]
    members = []
    for i, image in enumerate(images):
        members += [(f"k{i}.cls", b"%d" % i), (f"k{i}.png", encode(image))]
    write_tar(tmp_path / "a.tar", members)
    main([str(tmp_path / "a.tar"), "--sheet", str(tmp_path / "sheet.png")])
    sheet = np.asarray(Image.open(tmp_path / "sheet.png"))
    factor = THUMB // 32
    for image in images:
        colour = image if image.ndim == 3 else np.repeat(image[:, :, None], 3, 2)
        large = colour.repeat(factor, 0).repeat(factor, 1)
        assert _contains(sheet, large)
    assert not _contains(sheet, noise(32, 32, 3, seed=77).repeat(factor, 0).repeat(factor, 1))


def _contains(sheet: np.ndarray, part: np.ndarray) -> bool:
    height, width, _ = part.shape
    corners = np.argwhere((sheet == part[0, 0]).all(2))
    return any(np.array_equal(sheet[y : y + height, x : x + width], part) for y, x in corners)


def test_a_damaged_image_is_crossed_out(tmp_path):
    """The sheet is written all the same, and it can be seen which cell is empty."""
    write_tar(tmp_path / "a.tar", [("a.cls", b"0"), ("a.png", b"no image")])
    main([str(tmp_path / "a.tar"), "--sheet", str(tmp_path / "sheet.png")])
    sheet = np.asarray(Image.open(tmp_path / "sheet.png"))
    red = (sheet[:, :, 0] > 150) & (sheet[:, :, 1] < 90)
    assert red.sum() > 2 * THUMB


@settings(max_examples=50, deadline=None)
@given(labels=st.lists(st.integers(0, 5), min_size=1, max_size=60), samples=st.integers(1, 80))
def test_the_sheet_has_a_share_of_every_class(labels, samples):
    """As many as asked for, none twice, in the order of classes, in the set's proportions."""
    records = np.zeros(len(labels), dtype=RECORD)
    records["label"] = labels
    chosen = choose(records, samples)
    assert len(chosen) == min(samples, len(labels)) == len(set(chosen.tolist()))
    shown = records["label"][chosen]
    assert (np.diff(shown) >= 0).all()
    for label in set(labels):
        share = len(chosen) * labels.count(label) / len(labels)
        assert abs((shown == label).sum() - share) <= 1


def test_wrong_arguments(tmp_path, capsys):
    """Each mistake is one line with what would be right, before anything is written."""
    write_shards(tmp_path, [[0]])
    for arguments, message in (
        ([tmp_path / "none.tar"], "no shard"),
        ([tmp_path, "--samples", "0"], "--samples 0: must be from 1 to 2000"),
        ([tmp_path, "--sheet", tmp_path / "a.jpg"], "must end in .png"),
        ([tmp_path, "--sheet", tmp_path / "no" / "a.png"], "cannot be written"),
    ):
        assert message in fails(main, arguments, capsys)
    assert [path.name for path in tmp_path.iterdir()] == ["train-000000.tar"]
