"""Where the samples of a tar lie, found by walking its headers: for shards that have no index.

Of the members only the short .cls files are read; images are stepped over, and all else (.json,
pickles, links, directories) is left alone. Nothing is ever extracted.
"""

import io
import os
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from webdataset.tariterators import group_by_keys

from lipnext_scale.data.index import KINDS, RECORD, Record
from lipnext_scale.errors import UserError

# Suffix in lower case → kind; of several images in one sample the first of these is taken.
IMAGE_KINDS = {"png": "png", "jpg": "jpeg", "jpeg": "jpeg"}
# Bytes. Long names and pax headers are shorter; one that claims more is not read into memory.
LONGEST_HEADER = 1 << 20
LONGEST_LABEL = 64
LARGEST_IMAGE = 2**32 - 1  # what RECORD can say
_META = "__"  # WebDataset's own members, __meta__ and __meta__/…, belong to no sample
_PACKED = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd"}


def scan_tar(path: str | Path, name: str | None = None) -> tuple[np.ndarray, int]:
    """(a RECORD for each sample in the tar's order, the tar's size in bytes).

    name: the shard's in messages, where the path is not what the user knows it by.

    A sample is what WebDataset takes for one: consecutive members with the same path up to the
    first dot of the file name. A key that comes again after others is a sample of its own, as
    there; a member given twice in one sample is refused, as there.
    """
    name = name or str(path)
    records: list[Record] = []
    try:
        with _HeaderFile(path) as file:
            samples = group_by_keys(_members(file))
            while (sample := _next_sample(samples, name)) is not None:
                records.append(_record(sample, file, name))
            return np.array(records, dtype=RECORD), os.fstat(file.fileno()).st_size
    except OSError as error:
        raise UserError(f"{name}: cannot be read: {error.strerror or error}") from None


def sample_key(path: str | Path, record: Record) -> str:
    """The key of a record's sample by the header before its image; "at byte N" where that header
    does not tell: a name too long for it stands in another one, and an FFCV file has none."""
    offset, unknown = record.offset, f"at byte {record.offset}"
    try:
        with open(path, "rb", buffering=0) as file:
            block = os.pread(file.fileno(), tarfile.BLOCKSIZE, max(offset - tarfile.BLOCKSIZE, 0))
        entry = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
    except (OSError, tarfile.HeaderError):
        return unknown
    cut_off = len(block[:100].rstrip(b"\0")) >= 99 and not block[345:500].strip(b"\0")
    # Where a name has letters beyond ASCII some writers put "?" here and the name elsewhere.
    if cut_off or "?" in entry.name or not entry.isreg() or entry.size != record.size:
        return unknown
    directory, slash, file_name = entry.name.rpartition("/")
    return printable(directory + slash + file_name.split(".")[0])


def printable(name: str) -> str:
    """A name from a tar as it can be shown in one line of any terminal."""
    return name if name.isprintable() else repr(name)


class _HeaderFile(io.FileIO):
    """A tar that lets only headers be read; all of the rest is out of reach of `tarfile`."""

    def read(self, size: int | None = -1, /) -> bytes:
        if size is None or not 0 <= size <= LONGEST_HEADER:
            raise tarfile.ReadError(f"a header claims to be {size} bytes long")
        return super().read(size) or b""


def _members(file: _HeaderFile) -> Iterator[dict[str, Any]]:
    """The regular files of the tar as `group_by_keys` takes them; their data is their TarInfo."""
    _refuse_compressed(file)
    with tarfile.open(fileobj=file, mode="r:") as tar:
        before = -1
        while (entry := tar.next()) is not None:
            # A negative size would send tarfile back, to read the same members for ever.
            if entry.size < 0 or entry.offset_data <= before:
                raise tarfile.ReadError(f"the header at byte {entry.offset} is damaged")
            before = entry.offset_data
            if entry.isreg() and not _is_meta(entry.name):
                yield {"fname": entry.name, "data": entry, "__url__": file.name}
            tar.members = []  # type: ignore[attr-defined]  # else it remembers every entry
        _require_end(file, tar.offset)


def _refuse_compressed(file: _HeaderFile) -> None:
    start = os.pread(file.fileno(), 8, 0)
    for magic, method in _PACKED.items():
        if start.startswith(magic):
            raise tarfile.ReadError(f"it is compressed by {method}; unpack it")


def _is_meta(name: str) -> bool:
    first = name.split("/")[0]
    return len(first) >= 2 * len(_META) and first.startswith(_META) and first.endswith(_META)


def _require_end(file: _HeaderFile, end: int) -> None:
    """tarfile takes a cut or a damaged header between two files for the end. The end is two empty
    blocks, and nothing but zeros after them: a second tar there would be lost silently."""
    blocks = os.pread(file.fileno(), 2 * tarfile.BLOCKSIZE, end)
    if any(blocks):
        raise tarfile.ReadError(f"the header at byte {end} is damaged")
    if len(blocks) < 2 * tarfile.BLOCKSIZE:
        raise tarfile.ReadError(f"it is cut off at byte {end + len(blocks)}")
    place = end + len(blocks)
    while rest := os.pread(file.fileno(), LONGEST_HEADER, place):
        if rest.strip(b"\0"):
            raise tarfile.ReadError(f"there is more after its end at byte {end}")
        place += len(rest)


def _next_sample(samples: Iterator[dict[str, Any]], shard: str) -> dict[str, Any] | None:
    try:
        return next(samples, None)
    except Exception as error:  # whatever tarfile makes of bytes that are no tar
        reason = str(error.args[0] if error.args else error).split("\n")[0]
        raise UserError(f"{shard}: is not a readable shard: {reason}") from None


def _record(sample: dict[str, Any], file: _HeaderFile, shard: str) -> Record:
    name = f"{shard}: sample {printable(sample['__key__'])}"
    suffix = next((suffix for suffix in IMAGE_KINDS if suffix in sample), None)
    if suffix is None or "cls" not in sample:
        raise UserError(f"{name} needs a .cls and an image ({', '.join(IMAGE_KINDS)})")
    image: tarfile.TarInfo = sample[suffix]
    for entry in (image, sample["cls"]):
        if entry.issparse():
            raise UserError(f"{name} has a sparse member, whose bytes do not lie together")
    if image.size > LARGEST_IMAGE:
        raise UserError(f"{name} has an image of {image.size} bytes; at most {LARGEST_IMAGE}")
    label = _label(file, sample["cls"], name)
    return Record(image.offset_data, image.size, label, 0, 0, 0, KINDS[IMAGE_KINDS[suffix]], 0)


def _label(file: _HeaderFile, entry: tarfile.TarInfo, name: str) -> int:
    text = os.pread(file.fileno(), min(entry.size, LONGEST_LABEL + 1), entry.offset_data)
    try:
        label = int(text) if entry.size <= LONGEST_LABEL else None
    except ValueError:
        label = None
    if label is None:
        shown = repr(text[:20])[1:] + ("…" if len(text) > 20 else "")
        raise UserError(f"{name} cannot be decoded: its class is {shown}, not a number")
    if not -(2**31) <= label < 2**31:
        raise UserError(f"{name} has a class beyond 32 bits: {label}")
    return label
