"""data_prep.index: an index beside shards that others have made."""

import hashlib

import numpy as np
from prep_sources import encoded, is_refused, noise, succeeds, write_shards, write_tar

from data_prep.index import main
from lipnext_scale.data.index import KINDS, index_paths, map_records, read_index


def indexed(directory, name="train"):
    json_path, npy_path = index_paths(directory, name)
    index = read_index(json_path)
    return index, map_records(npy_path, index.samples)


def test_the_index_says_what_is_in_the_shards(tmp_path):
    """Names, sizes, sha256, counts and every record; the shards keep their bytes."""
    paths = write_shards(tmp_path, [[3, 1, 1], [2, 0]])
    before = [path.read_bytes() for path in paths]
    printed = succeeds(main, f"{tmp_path}/train-*.tar", "--workers", 2)
    assert printed == f"{tmp_path}/train.index.json: 2 shards, 5 samples\n"
    assert [path.read_bytes() for path in paths] == before
    index, records = indexed(tmp_path)
    assert [(e.file, e.samples, e.bytes, e.sha256, e.class_counts) for e in index.shards] == [
        (path.name, samples, len(content), hashlib.sha256(content).hexdigest(), counts)
        for path, samples, content, counts in zip(
            paths, (3, 2), before, ({"1": 2, "3": 1}, {"0": 1, "2": 1}), strict=True
        )
    ]
    assert index.classes == [] and index.converter["name"] == "data_prep.index"
    assert records["label"].tolist() == [3, 1, 1, 2, 0]
    assert records["height"].tolist() == [8] * 5 and records["width"].tolist() == [8, 8, 8, 9, 9]
    for record, shard in zip(records, (0, 0, 0, 1, 1), strict=True):
        found = before[shard][int(record["offset"]) :][: int(record["size"])]
        assert found in [encoded(noise(8, 8 + shard, 3, seed=100 * shard + i)) for i in range(3)]


def test_sizes_channels_and_kinds_are_those_of_the_images(tmp_path):
    """Greyscale is one channel, palettes and alpha three; the kind is the content's, not the
    suffix's: some sets have a PNG that is called .JPEG."""
    grey, colour, alpha = noise(5, 7), noise(6, 9, 3), noise(4, 4, 4)
    members = []
    for key, suffix, image in (
        ("a", "png", encoded(grey)),
        ("b", "jpg", encoded(grey, "JPEG")),
        ("c", "JPEG", encoded(colour, "JPEG")),
        ("d", "JPEG", encoded(colour)),
        ("e", "png", encoded(alpha)),
        ("f", "jpg", encoded(colour, "JPEG", progressive=True)),
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


def test_several_sets_and_parts_of_sets(tmp_path):
    """Each set has an index of its own, of the shards that were named."""
    for name in ("train", "test"):
        (tmp_path / name).mkdir()
        write_shards(tmp_path / name, [[0], [1]], name)
    patterns = (f"{tmp_path}/train/train-{{000000..000001}}.tar", f"{tmp_path}/test/*0.tar")
    succeeds(main, *patterns)
    assert indexed(tmp_path / "train")[0].samples == 2
    assert [e.file for e in indexed(tmp_path / "test", "test")[0].shards] == ["test-000000.tar"]


def test_an_index_is_replaced_only_by_force(tmp_path):
    """Without --force the old one stays, byte for byte."""
    write_shards(tmp_path, [[0, 1]])
    main([f"{tmp_path}/train-*.tar"])
    before = (tmp_path / "train.index.json").read_bytes()
    write_shards(tmp_path, [[0, 1, 2]])
    assert "is there already; --force" in is_refused(main, f"{tmp_path}/train-*.tar")
    assert (tmp_path / "train.index.json").read_bytes() == before
    main([f"{tmp_path}/train-*.tar", "--force"])
    assert indexed(tmp_path)[0].samples == 3


def test_class_names(tmp_path):
    """One a line; too few for the labels is an error that names both numbers."""
    write_shards(tmp_path, [[0, 2]])
    names = tmp_path / "names.txt"
    names.write_text("cat\ndog\n", encoding="utf-8")
    error = is_refused(main, f"{tmp_path}/train-*.tar", "--classes-file", names)
    assert "names 2 classes" in error and "label 2" in error
    assert not (tmp_path / "train.index.json").exists()
    names.write_text("cat\ndog\nKäfer\n", encoding="utf-8")
    main([f"{tmp_path}/train-*.tar", "--classes-file", str(names)])
    assert indexed(tmp_path)[0].classes == ["cat", "dog", "Käfer"]


def test_what_cannot_be_indexed(tmp_path):
    """FFCV files, patterns without files, empty and broken shards: one line, and no index."""
    (tmp_path / "a.beton").write_bytes(b"")
    assert "data_prep.ffcv" in is_refused(main, tmp_path / "a.beton")
    assert "no shard" in is_refused(main, tmp_path / "none-*.tar")
    write_tar(tmp_path / "empty.tar", [])
    assert "empty.tar: the shards hold no samples" in is_refused(main, tmp_path / "empty.tar")
    [path] = write_shards(tmp_path, [[0, 1]])
    path.write_bytes(path.read_bytes()[:1000])
    assert f"{path}: is not a readable shard" in is_refused(main, path)
    assert "--workers: 0: must be at least 1" in is_refused(main, path, "--workers", "0")
    path = write_tar(tmp_path / "b.tar", [("bad.cls", b"0"), ("bad.png", b"GIF89a" + bytes(100))])
    assert f"{path}: sample bad is neither a JPEG nor a PNG" in is_refused(main, path)
    assert not list(tmp_path.glob("*.index.*"))
