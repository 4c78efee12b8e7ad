"""EDM's zip: images, and dataset.json with their labels; both are read in place."""

import hashlib
import json
import os
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.sources.listing import ImageFile, Listing
from data_prep.sources.zip_members import BadMember, read_member, zip_directory
from data_prep.writing.encoding import BadImage
from lipnext_scale.errors import UserError

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
