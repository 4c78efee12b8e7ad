"""Collections of image files: in folders, or inside tars that are read where they lie."""

import hashlib
import os
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from lipnext_scale.errors import UserError

# --------------------------------------------------------------------------------------------------
# What a converter reads: the samples of a source by number, wherever they lie.


class Collection(Protocol):
    """The samples of one set, numbered in an order that the source alone decides.

    It is handed to worker processes: keep plain values in it, open files where they are needed, and
    read a file that processes may share by os.pread.
    """

    classes: list[str]  # names by label

    def __len__(self) -> int: ...

    def label(self, i: int) -> int: ...

    def name(self, i: int) -> str:
        """Where the sample comes from, without the source's own place: for messages and the key."""
        ...

    def load(self, i: int) -> bytes | np.ndarray:
        """An encoded image file, or uint8 pixels [H, W] or [H, W, 3]."""
        ...

    def fingerprint(self) -> str:
        """Of names, labels and sizes: the same source gives the same, another another."""
        ...

    def estimated_bytes(self, i: int) -> int:
        """About as many as the encoded image will have: for shard sizes and the disk check."""
        ...


class ImageFile(NamedTuple):
    """A file of a source: its name there, its class, its size, and where it lies in a tar."""

    name: str
    label: int
    size: int
    offset: int = 0


class Listing:
    """All of a collection but the loading. Arrays, for a list of a million names costs each worker
    process a copy: Python counts references inside the objects."""

    def __init__(self, classes: Sequence[str], files: Sequence[ImageFile]) -> None:
        self.classes = list(classes)
        self._names = np.array([os.fsencode(file.name) for file in files], dtype=np.bytes_)
        self._labels = np.array([file.label for file in files], dtype=np.int32)
        self._sizes = np.array([file.size for file in files], dtype=np.int64)

    def __len__(self) -> int:
        return len(self._labels)

    def label(self, i: int) -> int:
        return int(self._labels[i])

    def name(self, i: int) -> str:
        return os.fsdecode(bytes(self._names[i]))

    def estimated_bytes(self, i: int) -> int:
        return int(self._sizes[i])

    def fingerprint(self) -> str:
        digest = hashlib.sha256(repr((self.classes, self._names.shape, self._names.dtype)).encode())
        for column in (self._names, self._labels, self._sizes):
            digest.update(column.tobytes())
        return digest.hexdigest()


class FolderImages(Listing):
    """Files below a directory; their names are their paths from there."""

    def __init__(self, root: Path, classes: Sequence[str], files: Sequence[ImageFile]) -> None:
        super().__init__(classes, files)
        self._root = root

    def load(self, i: int) -> bytes:
        return (self._root / self.name(i)).read_bytes()


class TarImages(Listing):
    """Members of a tar, read by their places: nothing is ever unpacked."""

    def __init__(self, tar: Path, classes: Sequence[str], files: Sequence[ImageFile]) -> None:
        super().__init__(classes, files)
        self._tar = tar
        self._offsets = np.array([file.offset for file in files], dtype=np.int64)

    def load(self, i: int) -> bytes:
        with self._tar.open("rb", buffering=0) as file:
            return os.pread(file.fileno(), int(self._sizes[i]), int(self._offsets[i]))


def folder_files(root: Path, folder: str, label: int) -> list[ImageFile]:
    """The files right in a folder below `root`, by name; names that begin with a dot are left out,
    for they are other programs' notes."""
    found = []
    for entry in _sorted_entries(root / folder):
        if not entry.is_file():
            raise UserError(f"{entry.path}: is no file; a class's folder holds images alone")
        found.append(ImageFile(f"{folder}/{entry.name}", label, entry.stat().st_size))
    return found


def subfolders(directory: Path) -> list[str]:
    """Their names, sorted: the classes of a source in folders."""
    return [entry.name for entry in _sorted_entries(directory) if entry.is_dir()]


def _sorted_entries(directory: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(directory) as entries:
            seen = [entry for entry in entries if not entry.name.startswith(".")]
    except OSError as error:
        raise UserError(f"{directory}: cannot be read: {error.strerror}") from None
    return sorted(seen, key=lambda entry: os.fsencode(entry.name))


def text_lines(path: Path) -> list[str]:
    """The lines of a text file that are not empty."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError:
        raise UserError(f"{path}: is no text") from None
    return [line for line in lines if line.strip()]


class Member(NamedTuple):
    """A regular file in a tar: its name and where its bytes lie in the tar's file."""

    name: str
    offset: int
    size: int


def tar_members(path: Path, start: int = 0, size: int | None = None) -> Iterator[Member]:
    """The regular files of a tar, or of the tar of `size` bytes that lies in it at `start`."""
    where = f"{path}" if size is None else f"{path}: the tar at byte {start}"
    try:
        with path.open("rb") as file:
            window = _Window(file.fileno(), start, path.stat().st_size if size is None else size)
            with tarfile.open(fileobj=window, mode="r:") as tar:  # type: ignore[call-overload]
                while (entry := tar.next()) is not None:
                    if entry.size < 0:  # would send tarfile back to read the same for ever
                        raise tarfile.ReadError(f"the header at byte {entry.offset} is damaged")
                    if entry.isreg():
                        yield Member(entry.name, start + entry.offset_data, entry.size)
                    tar.members = []  # else it remembers every entry
                if window.at(tar.offset, tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
                    raise tarfile.ReadError(f"it is cut off or damaged at byte {tar.offset}")
    except OSError as error:
        raise UserError(f"{where}: cannot be read: {error.strerror}") from None
    except tarfile.TarError as error:
        reason = str(error).split("\n")[0]
        raise UserError(f"{where}: is no readable tar: {reason}") from None


class _Window:
    """A part of a file as `tarfile` reads files."""

    def __init__(self, descriptor: int, start: int, size: int) -> None:
        self._descriptor, self._start, self._size, self._place = descriptor, start, size, 0

    def at(self, place: int, size: int) -> bytes:
        within = max(0, min(size, self._size - place))
        return os.pread(self._descriptor, within, self._start + place)

    def read(self, size: int = -1) -> bytes:
        data = self.at(self._place, self._size if size < 0 else size)
        self._place += len(data)
        return data

    def seek(self, place: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._place, os.SEEK_END: self._size}[whence]
        self._place = base + place
        return self._place

    def tell(self) -> int:
        return self._place
