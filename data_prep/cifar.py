"""CIFAR-10 and CIFAR-100 as shards of PNGs, from the official files for Python.

    python -m data_prep.cifar --source cifar-10-python.tar.gz --out data/cifar10
    python -m data_prep.cifar --source cifar-100-python --out data/cifar100

The source is the archive, which is read in place, or the directory unpacked from it. Its files are
pickles: only numpy arrays and plain values are taken from them, nothing in them is run. Pixels are
exact.
"""

import lipnext_scale.utils.passive  # noqa: F401

import hashlib
import io
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.common import reading
from data_prep.convert import SetSource, conversion_parser, run_conversions
from data_prep.sources import Collection, archived_files
from lipnext_scale.utils.errors import UserError, command

SIDE = 32
PNG_BYTES = 2300  # of one of their images, about


@dataclass(frozen=True)
class Edition:
    """The files of one of the two sets with their published md5 sums, and the keys inside them."""

    title: str
    classes: int
    files: dict[str, dict[str, str]]  # set → file → md5
    meta: str
    labels: str
    names: str


CIFAR10 = Edition(
    "CIFAR-10",
    10,
    {
        "train": {
            "data_batch_1": "c99cafc152244af753f735de768cd75f",
            "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
            "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
            "data_batch_4": "634d18415352ddfa80567beed471001a",
            "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
        },
        "test": {"test_batch": "40351d587109b95175f43aff81a1287e"},
    },
    "batches.meta",
    "labels",
    "label_names",
)
_FILES100 = {
    "train": {"train": "16019d7e3df5f24257cddd939b257f8d"},
    "test": {"test": "f0ef6b0ae62326f3e7ffdfab6717acfc"},
}
CIFAR100 = Edition("CIFAR-100", 100, _FILES100, "meta", "fine_labels", "fine_label_names")
CIFAR100_COARSE = Edition("CIFAR-100", 20, _FILES100, "meta", "coarse_labels", "coarse_label_names")
_ALL_FILES = {
    name for e in (CIFAR10, CIFAR100) for files in e.files.values() for name in (*files, e.meta)
}


class PixelCollection(Collection):
    """Images in memory, [N, 3, 32, 32] as the files have them."""

    def __init__(
        self, classes: list[str], images: np.ndarray, labels: list[int], names: list[str]
    ) -> None:
        super().__init__(classes, labels)
        self._images, self._names = images, names

    def name(self, i: int) -> str:
        return self._names[i]

    def load(self, i: int) -> np.ndarray:
        return np.ascontiguousarray(self._images[i].transpose(1, 2, 0))

    def fingerprint(self) -> str:
        facts = (self.classes, self.labels.tolist(), self._names)
        digest = hashlib.sha256(repr(facts).encode())
        digest.update(self._images.tobytes())
        return digest.hexdigest()

    def sizes(self) -> np.ndarray:
        return np.full(len(self), PNG_BYTES)


class _DataOnly(pickle.Unpickler):
    """These three put numpy's arrays together; a pickle that asks for anything else is refused, for
    calling it could do anything."""

    ALLOWED = {
        ("numpy.core.multiarray", "_reconstruct"): np.zeros(0).__reduce__()[0],
        ("numpy._core.multiarray", "_reconstruct"): np.zeros(0).__reduce__()[0],
        ("numpy", "ndarray"): np.ndarray,
        ("numpy", "dtype"): np.dtype,
    }

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self.ALLOWED:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which is not data")
        return self.ALLOWED[module, name]


def unpickled(content: bytes, where: str) -> dict[str, Any]:
    """A file's dictionary with its keys as text."""
    with reading(where):
        values = _DataOnly(io.BytesIO(content), encoding="bytes").load()
        return {key.decode() if isinstance(key, bytes) else key: v for key, v in values.items()}


def source_files(source: Path) -> dict[str, bytes]:
    """The files of the set by name: of a directory, or of the archive."""
    if not source.is_dir():
        return archived_files(source, _ALL_FILES)
    # Some unpack the archive into a directory around its own.
    inner = [source / name for name in ("cifar-10-batches-py", "cifar-100-python")]
    directory = next((path for path in inner if path.is_dir()), source)
    paths = [directory / name for name in sorted(_ALL_FILES)]
    with reading(f"--source {source}"):
        return {path.name: path.read_bytes() for path in paths if path.is_file()}


def edition_of(files: Mapping[str, bytes], coarse: bool, source: Path) -> Edition:
    edition = CIFAR10 if "test_batch" in files else CIFAR100_COARSE if coarse else CIFAR100
    needed = [name for part in edition.files.values() for name in part]
    if missing := [name for name in needed if name not in files]:
        raise UserError(
            f"--source {source}: has no {', '.join(missing)}; give cifar-10-batches-py, "
            "cifar-100-python or their archive"
        )
    if coarse and edition is CIFAR10:
        raise UserError("--coarse: CIFAR-10 has no coarse labels, CIFAR-100 has")
    return edition


def class_names(files: Mapping[str, bytes], edition: Edition) -> list[str]:
    """From the file for it; without that CIFAR-10's own, CIFAR-100's labels as numbers."""
    if edition.meta not in files:
        ten = "airplane automobile bird cat deer dog frog horse ship truck".split()
        return ten if edition is CIFAR10 else [str(label) for label in range(edition.classes)]
    values = unpickled(files[edition.meta], edition.meta)
    with reading(edition.meta):
        return [name.decode(errors="replace") for name in values[edition.names]]


def collection(files: Mapping[str, bytes], edition: Edition, part: str) -> PixelCollection:
    """The images of "train" or "test", in the order of the files."""
    images: list[np.ndarray] = []
    labels: list[int] = []
    names: list[str] = []
    for file in edition.files[part]:
        values = unpickled(files[file], file)
        with reading(file):
            images.append(values["data"].reshape(-1, 3, SIDE, SIDE))
            labels += values[edition.labels]
            names += [name.decode(errors="replace") for name in values["filenames"]]
        if not set(labels) <= set(range(edition.classes)) or images[-1].dtype != np.uint8:
            right = f"bytes and {edition.labels} from 0 to {edition.classes - 1}"
            raise UserError(f"{file}: holds other values than {right}")
        if not sum(map(len, images)) == len(labels) == len(names):
            raise UserError(f"{file}: its data, {edition.labels} and filenames do not match")
    return PixelCollection(class_names(files, edition), np.concatenate(images), labels, names)


def provenance(files: Mapping[str, bytes], edition: Edition) -> dict[str, Any]:
    """The md5 sums of the files, and whether they are the published ones; prints it."""
    published = {name: md5 for part in edition.files.values() for name, md5 in part.items()}
    sums = {name: hashlib.md5(files[name], usedforsecurity=False).hexdigest() for name in published}
    others = [name for name in published if sums[name] != published[name]]
    if others:
        print(f"{edition.title}: not the published files: the md5 of {', '.join(others)} differs")
    else:
        print(f"{edition.title}: all {len(sums)} md5 sums are the published ones")
    labels = {"labels": edition.labels}
    return {"data": edition.title, **labels, "md5": sums, "as_published": not others}


@command
def main(argv: list[str] | None = None) -> None:
    parser = conversion_parser("cifar", __doc__)
    add = parser.add_argument
    add("--source", type=Path, required=True, help="the official .tar.gz, or its directory")
    add("--coarse", action="store_true", help="the 20 coarse labels of CIFAR-100")
    arguments = parser.parse_args(argv)
    files = source_files(arguments.source)
    edition = edition_of(files, arguments.coarse, arguments.source)
    source = provenance(files, edition)
    sets = [SetSource(part, collection(files, edition, part), source) for part in edition.files]
    run_conversions(sets, arguments)


if __name__ == "__main__":
    main()
