"""Members of a zip read where they lie, by any number of processes: nothing is ever unpacked to a
name of the archive's own."""

import csv
import hashlib
import json
import os
import struct
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.sources.listing import ImageFile, Listing, folder_files, subfolders, text_lines
from data_prep.writing.encoding import BadImage
from lipnext_scale.errors import UserError

_LOCAL_HEADER, _LOCAL_MAGIC = struct.Struct("<4s5H3L2H"), b"PK\x03\x04"
_ENCRYPTED = 0x1
_CHUNK = 1 << 22


class BadMember(Exception):
    """A member that cannot be read, and why."""


def zip_directory(path: Path) -> list[zipfile.ZipInfo]:
    """What the archive says is in it, but for directories."""
    try:
        with zipfile.ZipFile(path) as archive:
            return [info for info in archive.infolist() if not info.is_dir()]
    except OSError as error:
        raise UserError(f"--source {path}: cannot be read: {error.strerror or error}") from None
    except Exception as error:  # whatever zipfile makes of bytes that are no zip
        reason = str(error).split("\n")[0] or type(error).__name__
        raise UserError(f"--source {path}: is no readable zip archive: {reason}") from None


def data_start(descriptor: int, header: int) -> int:
    """Where a member's bytes begin: its local header, at `header`, has a length of its own."""
    fixed = os.pread(descriptor, _LOCAL_HEADER.size, header)
    if len(fixed) < _LOCAL_HEADER.size or not fixed.startswith(_LOCAL_MAGIC):
        raise BadMember(f"has no header at byte {header}")
    *_, name_length, extra_length = _LOCAL_HEADER.unpack(fixed)
    return header + _LOCAL_HEADER.size + int(name_length) + int(extra_length)


def require_plain(info: zipfile.ZipInfo) -> None:
    """Stored or deflated, not encrypted: what every numpy and every EDM tool writes."""
    if info.flag_bits & _ENCRYPTED:
        raise BadMember("is encrypted")
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise BadMember(f"is packed by method {info.compress_type}; store it or deflate it")


def member_chunks(descriptor: int, info: zipfile.ZipInfo) -> Iterator[bytes]:
    """The member's content in pieces; at its end its length and checksum are compared."""
    require_plain(info)
    start = data_start(descriptor, info.header_offset)
    chunks = _stored(descriptor, start, start + info.compress_size)
    if info.compress_type == zipfile.ZIP_DEFLATED:
        chunks = _inflated(chunks)
    size = checksum = 0
    for chunk in chunks:
        size, checksum = size + len(chunk), zlib.crc32(chunk, checksum)
        if size > info.file_size:  # a bomb, or damaged
            break
        yield chunk
    if size != info.file_size or checksum != info.CRC:
        raise BadMember("is damaged: its length or checksum differs")


def _stored(descriptor: int, place: int, end: int) -> Iterator[bytes]:
    while place < end:
        chunk = os.pread(descriptor, min(_CHUNK, end - place), place)
        if not chunk:
            raise BadMember("is cut off")
        place += len(chunk)
        yield chunk


def _inflated(chunks: Iterator[bytes]) -> Iterator[bytes]:
    unpack = zlib.decompressobj(-zlib.MAX_WBITS)
    try:
        for packed in chunks:
            while packed:
                yield unpack.decompress(packed, _CHUNK)
                packed = unpack.unconsumed_tail
        yield unpack.flush()
    except zlib.error as error:
        raise BadMember(f"is damaged: {error}") from None


def read_member(descriptor: int, info: zipfile.ZipInfo) -> bytes:
    return b"".join(member_chunks(descriptor, info))


# --------------------------------------------------------------------------------------------------
# EDM's zip: images, and dataset.json with their labels; both are read in place.

LABELS = "dataset.json"
IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp")
# Bytes. Ten million labels have fewer; no image has more.
LARGEST_LABELS, LARGEST_IMAGE = 1 << 30, 1 << 28


class ZipImages(Listing):
    """A collection of zip members, each read by its place in the archive."""

    def __init__(
        self,
        path: Path,
        classes: Sequence[str],
        members: Sequence[zipfile.ZipInfo],
        labels: Sequence[int],
    ) -> None:
        files = [
            ImageFile(info.filename, label, info.file_size)
            for info, label in zip(members, labels, strict=True)
        ]
        super().__init__(classes, files)
        self._path = path
        facts = [(m.header_offset, m.compress_size, m.CRC, m.compress_type) for m in members]
        self._facts = np.array(facts, dtype=np.int64).reshape(-1, 4)
        self._flags = np.array([m.flag_bits for m in members], dtype=np.int32)

    def load(self, i: int) -> bytes:
        info = zipfile.ZipInfo(self.name(i))
        info.header_offset, info.compress_size, info.CRC, info.compress_type = self._facts[
            i
        ].tolist()
        info.file_size, info.flag_bits = self.estimated_bytes(i), int(self._flags[i])
        if info.file_size > LARGEST_IMAGE:
            raise BadImage(f"it claims {info.file_size:,} bytes")
        with open(self._path, "rb", buffering=0) as file:
            try:
                return read_member(file.fileno(), info)
            except BadMember as error:
                raise BadImage(f"it {error}") from None

    def fingerprint(self) -> str:
        """Also of the checksums that the archive has of its members."""
        digest = hashlib.sha256(super().fingerprint().encode())
        digest.update(np.ascontiguousarray(self._facts[:, 2]).tobytes())
        return digest.hexdigest()


def zip_images(path: Path) -> tuple[list[zipfile.ZipInfo], list[int]]:
    """The labelled images of EDM's zip, in the order of their names."""
    members = {info.filename: info for info in zip_directory(path)}
    if LABELS not in members:
        raise UserError(
            f"--source {path}: has no {LABELS}, in which EDM's zips keep their labels; for images "
            "of one class a folder, unpack it"
        )
    info = members[LABELS]
    if info.file_size > LARGEST_LABELS:
        raise UserError(f"--source {path}: its {LABELS} has {info.file_size:,} bytes")
    try:
        with path.open("rb") as file:
            text = read_member(file.fileno(), info)
    except BadMember as error:
        raise UserError(f"--source {path}: its {LABELS} {error}") from None
    labels = dataset_labels(text, f"--source {path}: its {LABELS}")
    images = {name for name in members if is_image(name)}
    require_all_labelled(f"--source {path}", images, labels)
    names = sorted(labels, key=os.fsencode)
    return [members[name] for name in names], [labels[name] for name in names]


def dataset_labels(text: bytes, where: str) -> dict[str, int]:
    """{"labels": [["00000/img00000000.png", 3], …]} as name → label."""
    try:
        pairs: Any = json.loads(text)["labels"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise UserError(f'{where} is not {{"labels": [["NAME", LABEL], …]}}') from None
    if not isinstance(pairs, list) or not pairs:
        raise UserError(f"{where} has no labels; data for a classifier needs them")
    labels: dict[str, int] = {}
    for pair in pairs:
        name, label = pair if isinstance(pair, list) and len(pair) == 2 else (None, None)
        if not isinstance(name, str) or type(label) is not int:
            raise UserError(f"{where} has {str(pair)[:80]!r} in place of a name and a class number")
        if name in labels:
            raise UserError(f"{where} has {name!r} twice")
        labels[name] = label
    return labels


def is_image(name: str) -> bool:
    return name.lower().endswith(IMAGE_SUFFIXES)


def require_all_labelled(where: str, images: set[str], labels: Mapping[str, int]) -> None:
    """Every image has a label, every label its image."""
    without_label, without_image = images - labels.keys(), labels.keys() - images
    if without_label:
        raise UserError(
            f"{where}: {len(without_label):,} of {len(images):,} images have no label, "
            f"{min(without_label)!r} is one"
        )
    if without_image:
        raise UserError(
            f"{where}: {len(without_image):,} of {len(labels):,} labels have no image, "
            f"{min(without_image)!r} is one"
        )


# --------------------------------------------------------------------------------------------------
# Generated images in folders: one of each class, EDM's with its dataset.json, or a flat one with
# the labels in a file.

LONGEST_NUMBER = 9  # digits of a class number


def class_folder_files(root: Path, names: Sequence[str]) -> list[ImageFile]:
    """root/CLASS/IMAGE, where CLASS is a class number, or one of `names`."""
    folders = subfolders(root)
    if not folders:
        raise UserError(
            f"--source {root}: holds no folder of a class and no {LABELS}; for images right in it "
            "give their labels by --labels FILE"
        )
    loose = _image_names(root, root, recursive=False)
    if loose:
        raise UserError(f"--source {root}: holds {loose[0]!r} beside the folders of its classes")
    labels = _folder_labels(root, folders, names)
    return [file for folder in folders for file in folder_files(root, folder, labels[folder])]


def _folder_labels(root: Path, folders: Sequence[str], names: Sequence[str]) -> dict[str, int]:
    if names and all(folder in names for folder in folders):
        return {folder: names.index(folder) for folder in folders}
    labels = {}
    for folder in folders:
        if not folder.isdecimal() or len(folder) > LONGEST_NUMBER:
            wrong = "is none of --classes-file" if names else "is no class number"
            right = "" if names else "; give the classes' names by --classes-file FILE"
            raise UserError(f"--source {root}: the folder {folder!r} {wrong}{right}")
        labels[folder] = int(folder)
    if len(set(labels.values())) < len(folders):
        raise UserError(f"--source {root}: two folders have the same class number")
    return labels


def edm_folder_files(root: Path) -> list[ImageFile]:
    """EDM's folder: dataset.json has the labels of all images below."""
    try:
        text = (root / LABELS).read_bytes()
    except OSError as error:
        raise UserError(f"{root / LABELS}: cannot be read: {error.strerror}") from None
    names = _image_names(root, root, recursive=True)
    labels = dataset_labels(text, str(root / LABELS))
    require_all_labelled(str(root / LABELS), set(names), labels)
    return [ImageFile(name, labels[name], (root / name).stat().st_size) for name in names]


def labelled_files(root: Path, path: Path) -> list[ImageFile]:
    """The images right in a folder with the labels of a file: `name,label` a line, or a label a
    line in the order of the images' names."""
    names = _image_names(root, root, recursive=False)
    if not names:
        raise UserError(f"--source {root}: holds no images")
    lines = text_lines(path)
    if "," in "".join(lines[:1]):
        labels = _named_labels(lines, path)
        require_all_labelled(f"--labels {path}", set(names), labels)
    elif len(lines) != len(names):
        raise UserError(f"--labels {path}: has {len(lines):,} labels for {len(names):,} images")
    else:
        labels = {n: _number(line, path) for n, line in zip(names, lines, strict=True)}
    return [ImageFile(name, labels[name], (root / name).stat().st_size) for name in names]


def _named_labels(lines: list[str], path: Path) -> dict[str, int]:
    labels: dict[str, int] = {}
    try:
        rows = list(csv.reader(lines))
    except csv.Error as error:
        raise UserError(f"--labels {path}: is no table of name,label: {error}") from None
    if len(rows[0]) == 2 and not rows[0][1].strip().removeprefix("-").isdecimal():
        rows = rows[1:]  # the columns' titles
    for row in rows:
        if len(row) != 2:
            raise UserError(f"--labels {path}: {','.join(row)[:80]!r} is not name,label")
        name = row[0].strip()
        if name in labels:
            raise UserError(f"--labels {path}: has {name!r} twice")
        labels[name] = _number(row[1], path)
    return labels


def _number(text: str, path: Path) -> int:
    text = text.strip()
    if not text.removeprefix("-").isdecimal() or len(text) > LONGEST_NUMBER:
        raise UserError(f"--labels {path}: {text[:40]!r} is no class number")
    return int(text)


def _image_names(root: Path, directory: Path, recursive: bool) -> list[str]:
    """The images below a directory by their paths from `root`, sorted; links to directories are
    not followed, and names that begin with a dot are other programs' notes."""
    found: list[str] = []
    try:
        entries = [entry for entry in os.scandir(directory) if not entry.name.startswith(".")]
    except OSError as error:
        raise UserError(f"{directory}: cannot be read: {error.strerror}") from None
    for entry in entries:
        path = Path(entry.path)
        if recursive and entry.is_dir(follow_symlinks=False):
            found += _image_names(root, path, recursive)
        elif is_image(entry.name) and entry.is_file():
            found.append(path.relative_to(root).as_posix())
    return sorted(found, key=os.fsencode)
