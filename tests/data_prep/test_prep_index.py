"""data_prep.index: an index beside shards that others have made."""

import hashlib
import subprocess
import sys

import numpy as np
import pytest
from foreign_shards import encode, fails, flip, noise, write_shards, write_tar

from data_prep.index import main
from lipnext_scale.data.index import KINDS, index_paths, map_records, read_index


def indexed(directory, name="train"):
    json_path, npy_path = index_paths(directory, name)
    index = read_index(json_path)
    return index, map_records(npy_path, index.samples)


def test_the_index_says_what_is_in_the_shards(tmp_path, capsys):
    """Names, sizes, sha256, counts and every record; the shards keep their bytes."""
    paths = write_shards(tmp_path, [[3, 1, 1], [2, 0]])
    before = [path.read_bytes() for path in paths]
    main([f"{tmp_path}/train-*.tar", "--workers", "2"])
    assert capsys.readouterr().out == f"{tmp_path}/train.index.json: 2 shards, 5 samples\n"
    assert [path.read_bytes() for path in paths] == before
    index, records = indexed(tmp_path)
    assert [entry.file for entry in index.shards] == ["train-000000.tar", "train-000001.tar"]
    assert [entry.samples for entry in index.shards] == [3, 2]
    assert [entry.bytes for entry in index.shards] == [len(content) for content in before]
    assert [e.sha256 for e in index.shards] == [hashlib.sha256(c).hexdigest() for c in before]
    assert [e.class_counts for e in index.shards] == [{"1": 2, "3": 1}, {"0": 1, "2": 1}]
    assert index.classes == [] and index.converter["name"] == "data_prep.index"
    assert records["label"].tolist() == [3, 1, 1, 2, 0]
    assert records["height"].tolist() == [8] * 5 and records["width"].tolist() == [8, 8, 8, 9, 9]
    for record, shard in zip(records, (0, 0, 0, 1, 1), strict=True):
        found = before[shard][int(record["offset"]) :][: int(record["size"])]
        assert found in [encode(noise(8, 8 + shard, 3, seed=100 * shard + i)) for i in range(3)]


def test_sizes_channels_and_kinds_are_those_of_the_images(tmp_path):
    """Greyscale is one channel, palettes and alpha three; the kind is the content's, not the
    suffix's: some sets have a PNG that is called .JPEG."""
    grey, colour, alpha = noise(5, 7), noise(6, 9, 3), noise(4, 4, 4)
    members = []
    for key, suffix, image in (
        ("a", "png", encode(grey)),
        ("b", "jpg", encode(grey, "jpeg")),
        ("c", "JPEG", encode(colour, "jpeg")),
        ("d", "JPEG", encode(colour)),
        ("e", "png", encode(alpha)),
        ("f", "jpg", encode(colour, "jpeg", progressive=True)),
    ):
        members += [(f"{key}.json", b"{}"), (f"{key}.cls", b"0"), (f"{key}.{suffix}", image)]
    write_tar(tmp_path / "odd.tar", members)
    main([f"{tmp_path}/odd.tar"])
    _, records = indexed(tmp_path, "odd.tar")
    assert records["channels"].tolist() == [1, 1, 3, 3, 3, 3]
    sizes = np.stack([records["height"], records["width"]], 1).tolist()
    assert sizes == [[5, 7], [5, 7], [6, 9], [6, 9], [4, 4], [6, 9]]
    png, jpeg = KINDS["png"], KINDS["jpeg"]
    assert records["kind"].tolist() == [png, jpeg, jpeg, png, png, jpeg]


def test_several_sets_at_once(tmp_path):
    """Each set has an index of its own, in the directory of its shards."""
    for name in ("train", "test"):
        (tmp_path / name).mkdir()
        write_shards(tmp_path / name, [[0], [1]], name)
    main([f"{tmp_path}/train/train-{{000000..000001}}.tar", f"{tmp_path}/test/*.tar"])
    for name in ("train", "test"):
        assert indexed(tmp_path / name, name)[0].samples == 2


def test_an_index_is_replaced_only_by_force(tmp_path, capsys):
    """Without --force the old one stays, byte for byte."""
    write_shards(tmp_path, [[0, 1]])
    main([f"{tmp_path}/train-*.tar"])
    before = (tmp_path / "train.index.json").read_bytes()
    write_shards(tmp_path, [[0, 1, 2]])
    told = fails(main, [f"{tmp_path}/train-*.tar"], capsys)
    assert told.startswith(f"error: {tmp_path}/train.index.json: is there already; --force")
    assert (tmp_path / "train.index.json").read_bytes() == before
    main([f"{tmp_path}/train-*.tar", "--force"])
    assert indexed(tmp_path)[0].samples == 3


def test_shards_of_the_set_that_were_not_named_are_told(tmp_path, capsys):
    """An index of a part is written, but not silently."""
    write_shards(tmp_path, [[0], [1], [2]])
    main([f"{tmp_path}/train-00000[02].tar"])
    assert "note:" in (told := capsys.readouterr().out) and "train-000001.tar: was not" in told
    assert [e.file for e in indexed(tmp_path)[0].shards] == ["train-000000.tar", "train-000002.tar"]


def test_class_names(tmp_path, capsys):
    """One a line; too few for the labels is an error that names both numbers."""
    write_shards(tmp_path, [[0, 2]])
    names = tmp_path / "names.txt"
    names.write_text("cat\ndog\n", encoding="utf-8")
    told = fails(main, [f"{tmp_path}/train-*.tar", "--classes-file", names], capsys)
    assert "names 2 classes" in told and "label 2" in told
    assert not (tmp_path / "train.index.json").exists()
    names.write_text("cat\ndog\nKäfer\n", encoding="utf-8")
    main([f"{tmp_path}/train-*.tar", "--classes-file", str(names)])
    assert indexed(tmp_path)[0].classes == ["cat", "dog", "Käfer"]


def test_what_cannot_be_indexed(tmp_path, capsys):
    """FFCV files, patterns without files, empty and broken shards: one line, and no index."""
    (tmp_path / "a.beton").write_bytes(b"")
    assert "data_prep.ffcv" in fails(main, [tmp_path / "a.beton"], capsys)
    assert "no shard" in fails(main, [tmp_path / "none-*.tar"], capsys)
    write_tar(tmp_path / "empty.tar", [])
    assert "empty.tar: the shards hold no samples" in fails(main, [tmp_path / "empty.tar"], capsys)
    [path] = write_shards(tmp_path, [[0, 1]])
    path.write_bytes(path.read_bytes()[:1000])
    assert f"{path}: is not a readable shard" in fails(main, [path], capsys)
    assert "--workers" in fails(main, [path, "--workers", "0"], capsys)
    assert not list(tmp_path.glob("*.index.*"))


@pytest.mark.parametrize(
    "image, message",
    [
        (b"", "is neither a JPEG nor a PNG"),
        (b"GIF89a" + bytes(100), "is neither a JPEG nor a PNG"),
        (encode(noise(4, 4))[:20], "is a damaged PNG"),
        (encode(noise(4, 4), "jpeg")[:20], "is a damaged JPEG"),
    ],
)
def test_an_image_without_a_header_is_named(tmp_path, capsys, image, message):
    """The shard and the sample are told; nothing is written."""
    members = [("good.cls", b"0"), ("good.png", encode(noise(4, 4)))]
    path = write_tar(tmp_path / "a.tar", [*members, ("bad.cls", b"0"), ("bad.png", image)])
    assert f"{path}: sample bad {message}" in fails(main, [path], capsys)
    assert [found.name for found in tmp_path.iterdir()] == ["a.tar"]


def test_a_header_of_too_many_pixels_is_refused(tmp_path, capsys):
    """A PNG that claims 2³¹ pixels a side is a bomb, not an image."""
    path = write_tar(tmp_path / "a.tar", [("bad.cls", b"0"), ("bad.png", encode(noise(4, 4)))])
    flip(path, path.read_bytes().index(b"IHDR") + 4, 0x40)
    assert f"{path}: sample bad says it has" in fails(main, [path], capsys)


@pytest.mark.slow
def test_as_a_command(tmp_path):
    """python -m data_prep.index, .inspect and .verify work as they are documented."""
    write_shards(tmp_path, [[0, 1]])
    for arguments in (
        ["index", f"{tmp_path}/train-*.tar"],
        ["inspect", tmp_path],
        ["verify", tmp_path],
    ):
        module, argument = arguments
        done = subprocess.run(
            [sys.executable, "-m", f"data_prep.{module}", str(argument)],
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0 and done.stderr == "" and done.stdout, (module, done.stderr)
