"""Samples of a source by number: what a conversion reads, and image files in folders."""

import hashlib
import os
import tarfile
from collections.abc import Container, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from data_prep.common import reading
from lipnext_scale.utils.errors import UserError


class Collection:
    """The samples of one set, numbered in an order that the source alone decides; `classes` are
    names by label.

    Worker processes share it: keep plain values in it, open files where they are needed, and read
    a shared file by os.pread.
    """

    def __init__(self, classes: Sequence[str], labels: Sequence[int] | np.ndarray) -> None:
        self.classes, self.labels = list(classes), np.asarray(labels)

    def __len__(self) -> int:
        return len(self.labels)

    def name(self, i: int) -> str:
        """The sample's name in the source: for messages and the key."""
        raise NotImplementedError

    def load(self, i: int) -> bytes | np.ndarray:
        """An encoded image file, or uint8 pixels [H, W] or [H, W, 3]."""
        raise NotImplementedError

    def fingerprint(self) -> str:
        """Of names, labels and sizes: it differs where the source differs."""
        raise NotImplementedError

    def sizes(self) -> np.ndarray:
        """About the bytes of each encoded image: for shard sizes and the disk check."""
        raise NotImplementedError


class ImageFile(NamedTuple):
    """A file of a source: its name there, its class, its size, and where it lies in a tar."""

    name: str
    label: int
    size: int
    offset: int = 0


class Listing(Collection):
    """Image files; all but the loading. Arrays, for a list of a million names costs each worker
    process a copy: Python counts references inside the objects."""

    def __init__(self, root: Path, classes: Sequence[str], files: Sequence[ImageFile]) -> None:
        super().__init__(classes, np.array([file.label for file in files], dtype=np.int32))
        self.root = root
        self._names = np.array([os.fsencode(file.name) for file in files], dtype=np.bytes_)
        self._sizes = np.array([file.size for file in files], dtype=np.int64)

    def name(self, i: int) -> str:
        return os.fsdecode(bytes(self._names[i]))

    def sizes(self) -> np.ndarray:
        return self._sizes

    def fingerprint(self) -> str:
        digest = hashlib.sha256(repr((self.classes, self._names.shape, self._names.dtype)).encode())
        for column in (self._names, self.labels, self._sizes):
            digest.update(column.tobytes())
        return digest.hexdigest()


class FolderImages(Listing):
    """Files below a directory; their names are their paths from there."""

    def load(self, i: int) -> bytes:
        return (self.root / self.name(i)).read_bytes()


def folder_files(root: Path, folder: str, label: int) -> list[ImageFile]:
    """The files of a folder below `root`, by name."""
    found = []
    for entry in sorted_entries(root / folder):
        if not entry.is_file():
            raise UserError(f"{entry.path}: is no file; the folder of a class holds only images")
        found.append(ImageFile(f"{folder}/{entry.name}", label, entry.stat().st_size))
    return found


def subfolders(directory: Path) -> list[str]:
    """Their names, sorted: the classes of a source in folders."""
    return [entry.name for entry in sorted_entries(directory) if entry.is_dir()]


def sorted_entries(directory: Path) -> list[os.DirEntry[str]]:
    """Without names that begin with a dot, which other programs leave behind."""
    with reading(directory), os.scandir(directory) as entries:
        seen = [entry for entry in entries if not entry.name.startswith(".")]
    return sorted(seen, key=lambda entry: os.fsencode(entry.name))


def archived_files(path: Path, wanted: Container[str]) -> dict[str, bytes]:
    """The files of a tar, compressed or not, that have one of the wanted names in any folder."""
    found = {}
    with reading(path), tarfile.open(path, "r:*") as tar:
        for entry in tar:
            name = entry.name.rsplit("/", 1)[-1]
            content = tar.extractfile(entry) if name in wanted else None
            if content is not None:
                found[name] = content.read()
    return found
