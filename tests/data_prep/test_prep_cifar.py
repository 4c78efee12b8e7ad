"""CIFAR-10 and CIFAR-100 from official files: exact pixels, and nothing in a pickle is run."""

import os
import pickle
from pathlib import Path

import numpy as np
import pytest
from prep_sources import (
    argv,
    cifar10_batches,
    cifar10_files,
    cifar_batch,
    contents,
    decoded,
    is_refused,
    noise,
    python2_pickle,
    samples_of,
    succeeds,
    tar_gz_of,
    write_files,
)
from shard_making import Runs

from data_prep import cifar
from lipnext_scale.data.index import read_index

pytestmark = pytest.mark.slow  # all of them together take half a minute

DIRECTORY = "cifar-10-batches-py"


def cifar100_files(count: int = 6) -> dict[str, bytes]:
    files = {}
    for seed, name in enumerate(("train", "test")):
        labels = {
            "fine_labels": [(7 * i + seed) % 100 for i in range(count)],
            "coarse_labels": [(3 * i + seed) % 20 for i in range(count)],
        }
        files[name] = python2_pickle(cifar_batch(count, labels, seed))
    meta = {
        b"fine_label_names": [f"fine {i}".encode() for i in range(100)],
        b"coarse_label_names": [f"coarse {i}".encode() for i in range(20)],
    }
    return files | {"meta": python2_pickle(meta)}


def assert_holds(out: Path, name: str, batches: list[dict], labels: str) -> None:
    """Every image of the batches, to the pixel, in their numbers' order."""
    found = samples_of(out, name)
    numbered = {int(key.split("_")[0]): (key, sample) for key, sample in found.items()}
    images = np.concatenate([batch[b"data"] for batch in batches])
    wanted = [label for batch in batches for label in batch[labels.encode()]]
    names = [n.decode() for batch in batches for n in batch[b"filenames"]]
    assert sorted(numbered) == list(range(len(images)))
    for i, (key, sample) in numbered.items():
        pixels = images[i].reshape(3, 32, 32).transpose(1, 2, 0)
        assert np.array_equal(decoded(sample.content), pixels)
        assert sample.label == wanted[i] and sample.shape == (32, 32, 3)
        assert key == f"{i:06d}_{names[i].split('.')[0]}"


def test_cifar10_from_its_directory_and_archive(tmp_path):
    """Exact pixels, labels, names, classes; the directory, its parent and the .tar.gz alike."""
    files = cifar10_files()
    named = {f"{DIRECTORY}/{name}": content for name, content in files.items()}
    write_files(tmp_path / "unpacked", named)
    (tmp_path / "cifar.tar.gz").write_bytes(tar_gz_of({**named, f"{DIRECTORY}/readme.html": b"x"}))
    printed = succeeds(cifar.main, *argv(tmp_path / "unpacked" / DIRECTORY, tmp_path / "a"))
    assert "not the published files: the md5 of data_batch_1" in printed
    batches = list(cifar10_batches().values())
    assert_holds(tmp_path / "a", "train", batches[:5], "labels")
    assert_holds(tmp_path / "a", "test", batches[5:], "labels")
    index = read_index(tmp_path / "a" / "train.index.json")
    assert index.classes == [f"class {i}" for i in range(10)]
    assert index.source["data"] == "CIFAR-10" and not index.source["as_published"]
    succeeds(cifar.main, *argv(tmp_path / "unpacked", tmp_path / "b"))
    succeeds(cifar.main, *argv(tmp_path / "cifar.tar.gz", tmp_path / "c"))
    assert contents(tmp_path / "a") == contents(tmp_path / "b") == contents(tmp_path / "c")


def test_cifar100(tmp_path):
    """Fine labels, or the coarse ones on demand, each with their names; they do not mix."""
    source = write_files(tmp_path / "s", cifar100_files())
    for kind, count, options in (("fine", 100, []), ("coarse", 20, ["--coarse"])):
        out = tmp_path / kind
        succeeds(cifar.main, *argv(source, out, *options))
        for name in ("train", "test"):
            batch = pickle.loads((source / name).read_bytes(), encoding="bytes")
            assert_holds(out, name, [batch], f"{kind}_labels")
            index = read_index(out / f"{name}.index.json")
            assert index.classes == [f"{kind} {i}" for i in range(count)]
    error = is_refused(cifar.main, *argv(source, tmp_path / "fine", "--coarse"))
    assert "its source.labels differs: fine_labels, asked for coarse_labels" in error
    ten = write_files(tmp_path / "ten", cifar10_files())
    assert "no coarse labels" in is_refused(cifar.main, *argv(ten, tmp_path / "o", "--coarse"))


@pytest.mark.parametrize("place", ["data", "label", "meta", "all"])
def test_a_malicious_pickle_is_not_run(tmp_path, place):
    """Wherever the call hides: nothing happens, and what it asked for is named."""
    mark = tmp_path / "mark"
    evil = Runs(os.system, (f"touch {mark}",))
    batch, files = cifar10_batches()["data_batch_2"], cifar10_files()
    files |= {
        "data": {"data_batch_2": pickle.dumps(batch | {b"data": evil})},
        "label": {"data_batch_2": pickle.dumps(batch | {b"labels": [0, evil, 2, 3]})},
        "meta": {"batches.meta": pickle.dumps({b"label_names": evil})},
        "all": {"test_batch": pickle.dumps(evil)},
    }[place]
    error = is_refused(cifar.main, *argv(write_files(tmp_path / "s", files), tmp_path / "out"))
    assert "which is not data" in error and "system" in error
    assert not mark.exists() and not (tmp_path / "out").exists()


def changed(**values: object) -> bytes:
    batch = cifar10_batches()["data_batch_1"]
    return pickle.dumps(batch | {key.encode(): value for key, value in values.items()})


@pytest.mark.parametrize(
    "content, message",
    [
        (b"hello", "cannot be read"),
        (cifar10_files()["data_batch_1"][:5000], "cannot be read"),
        (changed(data=noise(4, 3071)), "cannot be read: cannot reshape"),
        (changed(labels=[0, 1, 2, 10]), "holds other values than bytes and labels from 0 to 9"),
        (changed(labels=[0, 1]), "its data, labels and filenames do not match"),
    ],
)
def test_broken_batches(tmp_path, content, message):
    """The file is named, and what is wrong in it."""
    source = write_files(tmp_path / "s", cifar10_files() | {"data_batch_1": content})
    error = is_refused(cifar.main, *argv(source, tmp_path / "out"))
    assert f"data_batch_1: {message}" in error


def test_sources_that_are_none(tmp_path):
    """Missing files, an empty directory, half an archive, no source at all."""
    files = cifar10_files()
    del files["data_batch_3"]
    source = write_files(tmp_path / "s", files)
    assert "has no data_batch_3;" in is_refused(cifar.main, *argv(source, tmp_path / "out"))
    (tmp_path / "empty").mkdir()
    assert "has no train, test;" in is_refused(cifar.main, *argv(tmp_path / "empty", tmp_path))
    packed = tar_gz_of(cifar10_files())
    (tmp_path / "x.tar.gz").write_bytes(packed[: len(packed) // 2])
    error = is_refused(cifar.main, *argv(tmp_path / "x.tar.gz", tmp_path / "out"))
    assert "x.tar.gz: cannot be read" in error
    assert "No such file" in is_refused(cifar.main, *argv(tmp_path / "none", tmp_path / "out"))
