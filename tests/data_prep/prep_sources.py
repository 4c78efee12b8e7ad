"""Small sources of every form, made on the fly; commands run in this process; what they wrote."""

import contextlib
import gzip
import hashlib
import io
import pickle
import struct
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image
from shard_making import encode as encoded
from shard_making import noise, tar_bytes

from data_prep import imagenet
from lipnext_scale.data.index import KINDS, Record, index_paths, map_records, read_index


def smooth(height: int, width: int, seed: int = 0) -> np.ndarray:
    """RGB pixels as photographs have them: JPEG comes close to them."""
    small = Image.fromarray(noise(3, 3, 3, seed=seed))
    return np.asarray(small.resize((width, height), Image.Resampling.BICUBIC))


def decoded(content: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(content)))


def write_files(root: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)
    return root


def tar_of(files: dict[str, bytes]) -> bytes:
    return tar_bytes(list(files.items()))


def tar_gz_of(files: dict[str, bytes]) -> bytes:
    return gzip.compress(tar_of(files), mtime=0)


# --- ImageNet and CIFAR -----------------------------------------------------------------------

CLASSES = ["n01440764", "n01443537", "n02007558", "n03000684"]


def class_images(per_class: int = 3, classes: list[str] = CLASSES) -> dict[str, bytes]:
    """JPEGs by CLASS/NAME, all different."""
    return {
        f"{name}/{name}_{i}.JPEG": encoded(smooth(12 + i, 10, seed=100 * c + i), "JPEG")
        for c, name in enumerate(classes)
        for i in range(per_class)
    }


def image_folders(root: Path, train: int = 3, val: int = 2) -> Path:
    """A source of class folders with train/ and val/."""
    for split, count in (("train", train), ("val", val)):
        images = class_images(count)
        write_files(root, {f"{split}/{name}": content for name, content in images.items()})
    return root


def cifar_batch(count: int, labels: dict[str, list[int]], seed: int) -> dict:
    """The dictionary of an official file, but for the number of its images."""
    names = [f"image_s_{seed:03d}{i:03d}.png".encode() for i in range(count)]
    made = {b"data": noise(count, 3072, seed=seed), b"filenames": names}
    return made | {key.encode(): values for key, values in labels.items()}


def python2_pickle(batch: dict) -> bytes:
    """The stream that Python 2 made: text is bytes without a word of their encoding.

    Python 3 writes bytes in protocol 3 only; of the opcodes that read them, this puts Python 2's.
    """
    out = io.BytesIO()
    pickler = pickle._Pickler(out, protocol=2)

    def save_bytes(self: pickle._Pickler, value: bytes) -> None:
        short = len(value) < 256
        head = b"U" + bytes([len(value)]) if short else b"T" + struct.pack("<i", len(value))
        self.write(head + value)
        self.memoize(value)

    pickler.dispatch = {**pickler.dispatch, bytes: save_bytes}
    pickler.dump(batch)
    return out.getvalue().replace(b"numpy._core.multiarray", b"numpy.core.multiarray")


def cifar10_batches(per_batch: int = 4) -> dict[str, dict]:
    names = [*(f"data_batch_{k}" for k in range(1, 6)), "test_batch"]
    return {
        name: cifar_batch(per_batch, {"labels": [(k + i) % 10 for i in range(per_batch)]}, seed=k)
        for k, name in enumerate(names)
    }


def cifar10_files(per_batch: int = 4) -> dict[str, bytes]:
    files = {name: python2_pickle(batch) for name, batch in cifar10_batches(per_batch).items()}
    meta = {b"label_names": [f"class {i}".encode() for i in range(10)]}
    return files | {"batches.meta": python2_pickle(meta)}


# --- shards as others make them ---------------------------------------------------------------


def write_tar(path: Path, members: list[tuple[str, bytes]]) -> Path:
    path.write_bytes(tar_bytes(members))
    return path


def write_shards(
    directory: Path, labels: list[list[int]], name: str = "train", kind: str = "PNG", side: int = 8
) -> list[Path]:
    """NAME-000000.tar, … with the labels of each; sample i of shard s has the key s<s>_<i>."""
    paths = []
    for shard, own in enumerate(labels):
        members: list[tuple[str, bytes]] = []
        for i, label in enumerate(own):
            image = encoded(noise(side, side + shard, 3, seed=100 * shard + i), kind)
            suffix = {"PNG": "png", "JPEG": "jpg"}[kind]
            members += [(f"s{shard}_{i}.cls", b"%d" % label), (f"s{shard}_{i}.{suffix}", image)]
        paths.append(write_tar(directory / f"{name}-{shard:06d}.tar", members))
    return paths


def flip(path: Path, place: int, bit: int = 1) -> None:
    """Change one bit of a file."""
    content = bytearray(path.read_bytes())
    content[place] ^= bit
    path.write_bytes(content)


# --- running, and looking at what came out ----------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str


def run_command(main: Callable[[list[str]], None], *argv: object) -> Outcome:
    """Any exception but SystemExit gets through: the user would see its traceback."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main([str(argument) for argument in argv])
        except SystemExit as exit_:
            assert isinstance(exit_.code, int)
            code = exit_.code
    return Outcome(code, out.getvalue(), err.getvalue())


def succeeds(main: Callable[[list[str]], None], *argv: object) -> str:
    outcome = run_command(main, *argv)
    assert outcome.code == 0 and not outcome.err, outcome
    return outcome.out


def is_refused(main: Callable[[list[str]], None], *argv: object) -> str:
    """With code 2 and a single line, which is returned."""
    outcome = run_command(main, *argv)
    assert outcome.code == 2 and outcome.err.count("\n") == 1, outcome
    assert outcome.err.startswith("error: "), outcome
    return outcome.err


QUICK = ("--workers", 0)


def argv(source: Path, out: Path, *options: object) -> tuple:
    return ("--source", source, "--out", out, *QUICK, *options)


def convert_train(source: Path, out: Path, *options: object) -> str:
    """Of class folders the set train, in shards of four; what the command printed."""
    argv = ("--source", source, "--out", out, "--split", "train", "--shard-samples", 4)
    return succeeds(imagenet.main, *argv, *(options or QUICK))


@dataclass(frozen=True)
class Sample:
    label: int
    content: bytes
    kind: str
    shape: tuple[int, int, int]


def samples_of(out: Path, name: str) -> dict[str, Sample]:
    """Every sample by its key, read by the index and compared with what tarfile finds."""
    json_path, npy_path = index_paths(out, name)
    index = read_index(json_path)
    records = map_records(npy_path, index.samples)
    found, rest = {}, iter(records)
    for shard in index.shards:
        content = (out / shard.file).read_bytes()
        assert len(content) == shard.bytes
        assert hashlib.sha256(content).hexdigest() == shard.sha256
        with tarfile.open(fileobj=io.BytesIO(content), mode="r:") as tar:
            members = [(entry.name, tar.extractfile(entry).read()) for entry in tar]
        assert len(members) == 2 * shard.samples
        for (cls_name, label), (image_name, image) in zip(members[::2], members[1::2], strict=True):
            record = Record(*next(rest).item())
            assert content[record.offset :][: record.size] == image and record.label == int(label)
            key, suffix = image_name.split(".")
            kind = {"jpg": "jpeg", "png": "png"}[suffix]
            assert cls_name == f"{key}.cls" and record.kind == KINDS[kind]
            shape = (record.height, record.width, record.channels)
            found[key] = Sample(record.label, image, kind, shape)
    assert len(found) == index.samples
    return found


def contents(directory: Path) -> dict[str, bytes | None]:
    """Every file below a directory with its bytes, and every directory."""
    return {
        str(path.relative_to(directory)): path.read_bytes() if path.is_file() else None
        for path in sorted(directory.rglob("*"))
    }
