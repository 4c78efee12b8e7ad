"""Images in an .npz: read one by one where they lie, never all into memory.

Arrays that np.savez stored are read inside the archive; those of np.savez_compressed are unpacked
once into a file without a name, which is gone with the process. Python objects are never loaded.
"""

import hashlib
import os
import shutil
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, BinaryIO

import numpy as np
from numpy.lib import format as npy

from data_prep.sources.edm import BadMember, data_start, member_chunks, zip_directory
from data_prep.writing.encoding import BadImage
from lipnext_scale.errors import UserError
from lipnext_scale.progress import Progress

LOG_SECONDS = 10
PNG_SHARE = 0.75  # of the bytes of pixels, about
LONGEST_HEADER = 1 << 14
_HEADERS = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}


@dataclass(frozen=True)
class NpyMember:
    """An array of the archive: its zip entry, its shape and dtype, and where in it data begins."""

    info: zipfile.ZipInfo
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    header: int

    @property
    def stored(self) -> bool:
        return self.info.compress_type == zipfile.ZIP_STORED


class NpzImages:
    """A collection of the arrays `image`, uint8 [N, H, W, 1 or 3], and `label`, integers [N].

    After `open` images are read in any order; forked processes may share what it opened. Before,
    for a dry run, which unpacks nothing, `load` goes through the archive.
    """

    def __init__(self, path: Path) -> None:
        self.classes: list[str] = []
        self._path, self._start = path, 0
        self._file: BinaryIO | None = None
        self._passing: IO[bytes] | None = None
        members = {info.filename: info for info in zip_directory(path)}
        self._image = _array(path, members, "image")
        self._require_images()
        self.labels = self._read_labels(_array(path, members, "label"))

    def _require_images(self) -> None:
        shape, dtype = self._image.shape, self._image.dtype
        if dtype != np.uint8 or len(shape) != 4 or shape[3] not in (1, 3) or 0 in shape:
            raise UserError(
                f"--source {self._path}: its image is {dtype} {list(shape)}; it must be uint8 "
                "[N, height, width, 1 or 3]"
            )

    def _read_labels(self, label: NpyMember) -> np.ndarray:
        if label.dtype.kind not in "iu" or label.shape != self._image.shape[:1]:
            raise UserError(
                f"--source {self._path}: its label is {label.dtype} {list(label.shape)}; it must "
                f"be integers [{len(self)}], one for each image"
            )
        with self._path.open("rb") as file:
            content = b"".join(_chunks(self._path, file.fileno(), label))
        return np.frombuffer(content, label.dtype, offset=label.header)

    @property
    def size(self) -> tuple[int, ...]:
        """Height, width and channels of every image."""
        return self._image.shape[1:]

    def open(self, scratch: Path) -> None:
        """Check the archive's bytes; unpack compressed ones into the directory `scratch`."""
        file: BinaryIO = self._path.open("rb")
        info, start = self._image.info, self._image.header
        what = "checking" if self._image.stored else "unpacking"
        progress = Progress(info.file_size >> 20, 0, "MiB", f"{what} the images", LOG_SECONDS)
        unpacked = None if self._image.stored else _scratch_file(scratch, info.file_size)
        done = 0
        try:
            for chunk in _chunks(self._path, file.fileno(), self._image):
                if unpacked:
                    unpacked.write(chunk)
                progress.advance(((done + len(chunk)) >> 20) - (done >> 20))
                done += len(chunk)
            if unpacked:
                unpacked.flush()
        except OSError as error:
            raise UserError(f"--out {scratch}: cannot be written: {error.strerror}") from None
        finally:
            progress.close()
        if unpacked is None:
            start += data_start(file.fileno(), info.header_offset)
        self._file, self._start = unpacked or file, start

    def __len__(self) -> int:
        return self._image.shape[0]

    def label(self, i: int) -> int:
        return int(self.labels[i])

    def name(self, i: int) -> str:
        return f"image[{i}]"

    def load(self, i: int) -> np.ndarray:
        height, width, channels = self.size
        size = height * width * channels
        if self._file is not None:
            content = os.pread(self._file.fileno(), size, self._start + i * size)
        else:
            content = self._read_passing(self._image.header + i * size, size)
        if len(content) != size:
            raise BadImage("the archive ends before it")
        shape = (height, width) if channels == 1 else self.size
        return np.frombuffer(content, np.uint8).reshape(shape)

    def _read_passing(self, place: int, size: int) -> bytes:
        """Some bytes of the images where they are packed; one pass, if places ascend."""
        try:
            if self._passing is None:
                self._passing = zipfile.ZipFile(self._path).open(self._image.info)
            self._passing.seek(place)
            return self._passing.read(size)
        except Exception as error:  # whatever zipfile makes of damaged bytes
            raise BadImage(f"the archive is damaged: {error}") from None

    def fingerprint(self) -> str:
        """Of the labels and of the checksum that the archive has of the images."""
        facts = (self.classes, self._image.shape, self._image.info.CRC)
        digest = hashlib.sha256(repr(facts).encode())
        digest.update(self.labels.astype("<i8").tobytes())
        return digest.hexdigest()

    def estimated_bytes(self, i: int) -> int:
        return int(PNG_SHARE * np.prod(self.size)) + 100


def _array(path: Path, members: dict[str, zipfile.ZipInfo], name: str) -> NpyMember:
    """The header of an array, believed only if the array is as long as it says."""
    if f"{name}.npy" not in members:
        there = ", ".join(sorted(n.removesuffix(".npy") for n in members)[:8]) or "nothing"
        raise UserError(
            f"--source {path}: has no array {name!r} but {there}; the arrays image and label are "
            "needed"
        )
    info = members[f"{name}.npy"]
    try:
        with zipfile.ZipFile(path) as archive, archive.open(info) as file:
            read_header = _HEADERS[npy.read_magic(file)]
            shape, fortran, dtype = read_header(file, max_header_size=LONGEST_HEADER)
            header = file.tell()
    except Exception as error:  # numpy evaluates the header; damage shows as any kind of error
        reason = str(error).split("\n")[0] or type(error).__name__
        raise UserError(f"--source {path}: its {name} is no array of numpy: {reason}") from None
    if dtype.hasobject:
        raise UserError(f"--source {path}: its {name} holds Python objects, which are not loaded")
    if fortran and len(shape) > 1:
        raise UserError(
            f"--source {path}: its {name} is in Fortran's order, in which no image lies together; "
            "save np.ascontiguousarray of it"
        )
    if min(shape, default=0) < 0 or header + _size(shape, dtype) != info.file_size:
        raise UserError(f"--source {path}: its {name} is damaged: it is not as long as it says")
    return NpyMember(info, shape, dtype, header)


def _size(shape: tuple[int, ...], dtype: np.dtype[Any]) -> int:
    size = dtype.itemsize
    for length in shape:  # np.prod would overflow silently
        size *= length
    return size


def _chunks(path: Path, descriptor: int, member: NpyMember) -> Iterator[bytes]:
    try:
        yield from member_chunks(descriptor, member.info)
    except BadMember as error:
        raise UserError(f"--source {path}: its {member.info.filename} {error}") from None


def _scratch_file(directory: Path, size: int) -> BinaryIO:
    """A file that nobody has to remove: the system does, even after a kill."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(directory).free
        if size > free:
            raise UserError(
                f"--out {directory}: the images unpacked need {size:,} bytes, {free:,} are free"
            )
        return tempfile.TemporaryFile(dir=directory)
    except OSError as error:
        raise UserError(f"--out {directory}: cannot be written: {error.strerror}") from None
