"""Generated images (of EDM, EDM2 or any other model) as shards of one set.

    python -m data_prep.edm --source SOURCE --out data/cifar10_edm [--name train]

SOURCE is one of these; the command finds out which, and prints it:

    an .npz     image uint8 [N, H, W, 3] and label integers [N]
    a .zip      EDM's: images and dataset.json
    a folder    EDM's, with dataset.json
                a folder for each class, named by its number, or by its name in --classes-file

Sources are read in place: nothing is loaded whole, unpacked by name, or run.
"""

import lipnext_scale.utils.passive  # noqa: F401

import hashlib
import json
import math
import os
import re
import struct
import tempfile
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.lib import format as npy

from data_prep.common import (
    LOG_SECONDS,
    number,
    reading,
    require_space,
    text_lines,
    writing,
)
from data_prep.convert import SetSource, conversion_parser, run_conversions
from data_prep.encoding import BadImage
from data_prep.sources import (
    Collection,
    FolderImages,
    ImageFile,
    Listing,
    folder_files,
    sorted_entries,
    subfolders,
)
from lipnext_scale.utils.collectives import reason_of
from lipnext_scale.utils.errors import UserError, command
from lipnext_scale.utils.progress import Progress

MOST_CLASSES = 100_000  # more than any data set has: a label beyond is a mistake
LABELS = "dataset.json"
IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp")
PNG_SHARE = 0.75  # of the bytes of pixels, about
CHUNK = 1 << 22
_HEADERS = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
_LOCAL_HEADER = struct.Struct("<4s5H3L2H")
_CLASS_NUMBER = re.compile(r"\d{1,9}")

# --------------------------------------------------------------------------------------------------
# Members of a zip, each read by its place, so that processes need not share an open archive.


def zip_directory(path: Path) -> dict[str, zipfile.ZipInfo]:
    """The files of an archive by name."""
    with reading(f"--source {path}"), zipfile.ZipFile(path) as archive:
        return {info.filename: info for info in archive.infolist() if not info.is_dir()}


def open_member(file: IO[bytes], info: zipfile.ZipInfo) -> zipfile.ZipExtFile:
    """A member's content; its checksum is compared when its end is read. Leaves `file` where the
    member's bytes begin: the header before them has a length of its own."""
    file.seek(info.header_offset)
    header = file.read(_LOCAL_HEADER.size)
    *_, name_length, extra_length = _LOCAL_HEADER.unpack(header)
    file.seek(name_length + extra_length, os.SEEK_CUR)
    return zipfile.ZipExtFile(file, "r", info)


def read_member(path: Path, info: zipfile.ZipInfo) -> bytes:
    """All of a member, never more than it claims to have."""
    with path.open("rb") as file:
        return open_member(file, info).read(info.file_size)


class ZipImages(Listing):
    """A collection of zip members."""

    def __init__(
        self, path: Path, members: Mapping[str, zipfile.ZipInfo], labels: Mapping[str, int]
    ) -> None:
        infos = [members[name] for name in labels]
        files = [ImageFile(m.filename, labels[m.filename], m.file_size) for m in infos]
        super().__init__(path, [], files)
        columns = ("header_offset", "compress_size", "CRC", "compress_type", "flag_bits")
        self._facts = {c: np.array([getattr(m, c) for m in infos], np.int64) for c in columns}

    def load(self, i: int) -> bytes:
        info = zipfile.ZipInfo(self.name(i))
        info.file_size = int(self._sizes[i])
        for name, column in self._facts.items():
            setattr(info, name, int(column[i]))
        try:
            return read_member(self.root, info)
        except OSError:
            raise
        except Exception as error:  # zipfile and zlib raise many kinds on damaged bytes
            raise BadImage(f"it is damaged in the archive: {reason_of(error)}") from None

    def fingerprint(self) -> str:
        """Also of the checksums that the archive has of its members."""
        digest = hashlib.sha256(super().fingerprint().encode())
        digest.update(self._facts["CRC"].tobytes())
        return digest.hexdigest()


def zip_labels(path: Path, members: Mapping[str, zipfile.ZipInfo]) -> dict[str, int]:
    """The labels of the images of EDM's zip, in the order of their names."""
    if LABELS not in members:
        raise UserError(
            f"--source {path}: has no {LABELS}, in which EDM's zips keep their labels; for images "
            "of one class a folder, unpack it"
        )
    where = f"--source {path}: its {LABELS}"
    with reading(where):
        text = read_member(path, members[LABELS])
    return dataset_labels(text, where, filter(is_image, members))


# --------------------------------------------------------------------------------------------------
# An .npz is a zip too. Arrays that np.savez stored are read inside it; those of np.savez_compressed
# are unpacked once into a file without a name, which the system removes even after a kill.


class NpzImages(Collection):
    """The arrays `image`, uint8 [N, H, W, 1 or 3], and `label`, integers [N].
    Images can be loaded after `prepare`, in any order and by forked processes too."""

    def __init__(self, path: Path, members: Mapping[str, zipfile.ZipInfo]) -> None:
        with reading(f"--source {path}: its label"), np.load(path) as archive:
            super().__init__([], archive["label"])  # numpy refuses Python objects
        self._path, self._start = path, 0
        self._file: IO[bytes] | None = None
        with reading(f"--source {path}: its image"), path.open("rb") as file:
            self._info = members["image.npy"]
            member = open_member(file, self._info)
            read_header = _HEADERS[npy.read_magic(member)]
            self.shape, fortran, dtype = read_header(member)
            self._header = member.tell()
        if dtype != np.uint8 or len(self.shape) != 4 or self.shape[3] not in (1, 3):
            raise self._wrong("image", dtype, self.shape, "uint8 [N, height, width, 1 or 3]")
        if fortran:  # no image lies together
            raise self._wrong("image", "in Fortran's order", self.shape, "C-contiguous")
        if min(self.shape) < 1 or self._header + math.prod(self.shape) != self._info.file_size:
            raise self._wrong("image", "damaged or empty:", self.shape, "as long as it says")
        if self.labels.dtype.kind not in "iu" or self.labels.shape != self.shape[:1]:
            right = f"integers [{self.shape[0]}], one for each image"
            raise self._wrong("label", self.labels.dtype, self.labels.shape, right)

    def _wrong(self, name: str, what: object, shape: tuple[int, ...], right: str) -> UserError:
        found = f"its {name} is {what} {list(shape)}"
        return UserError(f"--source {self._path}: {found}; it must be {right}")

    def prepare(self, scratch: Path) -> None:
        """Check the archive's bytes; unpack compressed ones into the directory `scratch`."""
        info, file, unpacked = self._info, self._path.open("rb"), None
        member, place = open_member(file, info), file.tell()
        if info.compress_type != zipfile.ZIP_STORED:
            with writing(f"--out {scratch}"):
                scratch.mkdir(parents=True, exist_ok=True)
                require_space(scratch, info.file_size)
                unpacked = tempfile.TemporaryFile(dir=scratch)
        progress = Progress(info.file_size >> 20, 0, "MiB", "reading the images", LOG_SECONDS)
        with closing(progress), reading(f"--source {self._path}: its image"):
            while chunk := member.read(CHUNK):
                if unpacked:
                    with writing(f"--out {scratch}"):
                        unpacked.write(chunk)
                        unpacked.flush()
                progress.advance(len(chunk) >> 20)
        self._file, self._start = unpacked or file, self._header + (0 if unpacked else place)

    def name(self, i: int) -> str:
        return f"image[{i}]"

    def load(self, i: int) -> np.ndarray:
        if self._file is None:  # a dry run unpacks nothing
            raise BadImage("it is not unpacked")
        _, height, width, channels = self.shape
        size = height * width * channels
        content = os.pread(self._file.fileno(), size, self._start + i * size)
        shape = (height, width) if channels == 1 else (height, width, channels)
        return np.frombuffer(content, np.uint8).reshape(shape)

    def fingerprint(self) -> str:
        """Of the labels and of the checksum that the archive has of the images."""
        facts = (self.classes, self.shape, self._info.CRC)
        digest = hashlib.sha256(repr(facts).encode())
        digest.update(self.labels.astype("<i8").tobytes())
        return digest.hexdigest()

    def sizes(self) -> np.ndarray:
        return np.full(len(self), int(PNG_SHARE * math.prod(self.shape[1:])) + 100)


# --------------------------------------------------------------------------------------------------
# Images in folders: one of each class, or any with EDM's dataset.json.


def class_folder_files(root: Path, names: Sequence[str]) -> list[ImageFile]:
    """root/CLASS/IMAGE, where CLASS is a class number, or one of `names`."""
    folders = subfolders(root)
    if not folders:
        raise UserError(
            f"--source {root}: has no class folders and no {LABELS} with "
            '{"labels": [["NAME", LABEL], …]}'
        )
    if loose := [entry.name for entry in sorted_entries(root) if is_image(entry.name)]:
        raise UserError(f"--source {root}: holds {loose[0]!r} beside the class folders")
    files = []
    for folder in folders:
        if folder in names:
            label = names.index(folder)
        elif _CLASS_NUMBER.fullmatch(folder):
            label = int(folder)
        else:
            wrong = "is none of --classes-file" if names else "is no class number"
            right = "" if names else "; give the classes' names by --classes-file FILE"
            raise UserError(f"--source {root}: the folder {folder!r} {wrong}{right}")
        files += folder_files(root, folder, label)
    return files


def edm_folder_files(root: Path) -> list[ImageFile]:
    """EDM's folder: dataset.json has the labels of all images below."""
    with reading(root / LABELS):
        text = (root / LABELS).read_bytes()
    labels = dataset_labels(text, str(root / LABELS), image_names(root))
    return [ImageFile(name, label, (root / name).stat().st_size) for name, label in labels.items()]


def dataset_labels(text: bytes, where: str, images: Iterable[str]) -> dict[str, int]:
    """{"labels": [["00000/img00000000.png", 3], …]} as name → label, in the order of the names:
    those of all images, and no others."""
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
    for name in sorted(set(images) ^ labels.keys()):
        raise UserError(f"{where}: {name!r} has no {'image' if name in labels else 'label'}")
    return {name: labels[name] for name in sorted(labels, key=os.fsencode)}


def is_image(name: str) -> bool:
    return name.lower().endswith(IMAGE_SUFFIXES)


def image_names(root: Path) -> list[str]:
    """The images below a folder by their paths from there; links to folders are not followed."""
    with reading(root):
        paths = [path.relative_to(root) for path in root.rglob("*") if path.is_file()]
    shown = [path for path in paths if not any(part.startswith(".") for part in path.parts)]
    return [path.as_posix() for path in shown if is_image(path.name)]


# --------------------------------------------------------------------------------------------------
# The command.


def class_names(labels: np.ndarray, names: list[str], number: int, source: Path) -> list[str]:
    """The classes' names, if the labels are among them; `number`: of classes, 0 if not known."""
    lowest, highest = int(np.min(labels)), int(np.max(labels))
    count = number or min(highest + 1, MOST_CLASSES)
    if lowest < 0 or highest >= count:
        reason = f", for there are {number} classes" if number else ""
        raise UserError(
            f"--source {source}: has labels from {lowest} to {highest}; they must be 0 to "
            f"{(number or MOST_CLASSES) - 1}{reason}"
        )
    return names or [str(label) for label in range(count)]


def open_source(source: Path, names: list[str]) -> tuple[Collection, str]:
    """The collection of a source in any form, without its classes, and what that form is."""
    if source.is_dir():
        edm = (source / LABELS).exists()
        files = edm_folder_files(source) if edm else class_folder_files(source, names)
        if not files:
            raise UserError(f"--source {source}: holds no images")
        form = f"EDM's folder with {LABELS}" if edm else "a folder for each class"
        return FolderImages(source, [], files), form
    if not source.is_file():
        raise UserError(f"--source {source}: there is no such file or folder")
    members = zip_directory(source)
    if LABELS not in members and any(name.endswith(".npy") for name in members):
        npz = NpzImages(source, members)
        _, height, width, channels = npz.shape
        return npz, f"an .npz of {height}×{width} images with {channels} channels"
    return ZipImages(source, members, zip_labels(source, members)), "EDM's zip"


@command
def main(argv: list[str] | None = None) -> None:
    parser = conversion_parser("edm", __doc__)
    add = parser.add_argument
    add("--source", type=Path, required=True, help="an .npz, a .zip or a folder, see above")
    add("--name", default="train", help="of the set and its shards (default train)")
    add("--classes-file", type=Path, metavar="FILE", help="class names by label, one a line")
    limits = number(1, MOST_CLASSES)
    add("--num-classes", type=limits, metavar="N", help="refuse labels that are not below N")
    arguments = parser.parse_args(argv)
    name, file, count = arguments.name, arguments.classes_file, arguments.num_classes
    if not re.fullmatch(r"[A-Za-z0-9_-]+", name):
        raise UserError(f"--name {name}: must be of the letters a to z, digits, - and _")
    names = text_lines(file) if file else []
    if file and (not names or len(set(names)) < len(names)):
        raise UserError(f"--classes-file {file}: must name every class once")
    if names and count not in (None, len(names)):
        raise UserError(f"--num-classes {count}: but --classes-file names {len(names)}")
    source: Path = arguments.source
    collection, form = open_source(source, names)
    collection.classes = class_names(collection.labels, names, count or len(names), source)
    print(f"{source}: {form}: {len(collection):,} images of {len(collection.classes):,} classes")
    if isinstance(collection, NpzImages) and not arguments.dry_run:
        collection.prepare(arguments.out)
    origin = {"data": "generated images", "form": form}
    run_conversions([SetSource(name, collection, origin)], arguments)


if __name__ == "__main__":
    main()
