"""Generated images (of EDM, EDM2 or any other model) as shards of one set.

    python -m data_prep.edm --source SOURCE --out data/cifar10_edm [--name train]

SOURCE is one of these; which one is found out, and said:

    an .npz     image uint8 [N, H, W, 3] and label integers [N]
    a .zip      EDM's: images and dataset.json
    a folder    EDM's, with dataset.json
                a folder for each class, named by its number, or by its name in --classes-file
                images right in it, and --labels FILE: a label a line in the order of the images'
                names, or name,label

Sources are read in place: nothing is loaded whole, unpacked by name, or run.
"""

import argparse
import re
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from data_prep.sources.edm import (
    LABELS,
    ZipImages,
    class_folder_files,
    edm_folder_files,
    labelled_files,
    zip_directory,
    zip_images,
)
from data_prep.sources.listing import Collection, FolderImages, ImageFile, text_lines
from data_prep.sources.npz import NpzImages
from data_prep.writing.convert import add_conversion_options, conversion_options, run_conversion
from lipnext_scale.errors import ArgumentParser, UserError, command

MOST_CLASSES = 100_000  # more than any data set has: a label beyond is a mistake


@dataclass(frozen=True)
class ClassRules:
    """What the user says of the classes: their names by label (or none), their number (or 0)."""

    names: list[str]
    number: int

    def classes(self, labels: Sequence[int] | np.ndarray, source: Path) -> list[str]:
        """The classes' names, if the labels are among them."""
        lowest, highest = int(np.min(labels)), int(np.max(labels))
        count = self.number or min(highest + 1, MOST_CLASSES)
        if lowest < 0 or highest >= count:
            allowed = f"0 to {(self.number or MOST_CLASSES) - 1}"
            reason = f", for there are {self.number} classes" if self.number else ""
            raise UserError(
                f"--source {source}: has labels from {lowest} to {highest}; they must be {allowed}"
                f"{reason}"
            )
        return self.names or [str(label) for label in range(count)]


def class_rules(names_file: Path | None, number: int | None) -> ClassRules:
    names = [line.strip() for line in text_lines(names_file)] if names_file else []
    if names_file and not names:
        raise UserError(f"--classes-file {names_file}: names no class")
    if len(set(names)) < len(names):
        raise UserError(f"--classes-file {names_file}: has a class twice")
    if number is not None and not 1 <= number <= MOST_CLASSES:
        raise UserError(f"--num-classes {number}: must be from 1 to {MOST_CLASSES}")
    if names and number is not None and number != len(names):
        raise UserError(f"--num-classes {number}: but --classes-file names {len(names)}")
    return ClassRules(names, number or len(names))


def open_source(source: Path, labels: Path | None, rules: ClassRules) -> tuple[Collection, str]:
    """The collection of a source in any form, and what that form is."""
    if source.is_dir():
        files, form = _folder(source, labels, rules)
        if not files:
            raise UserError(f"--source {source}: holds no images")
        classes = rules.classes([file.label for file in files], source)
        return FolderImages(source, classes, files), form
    if not source.is_file():
        raise UserError(f"--source {source}: there is no such file or folder")
    if labels is not None:
        raise UserError(f"--labels {labels}: goes with a folder; an archive has its own labels")
    if _is_npz(zip_directory(source)):
        npz = NpzImages(source)
        npz.classes = rules.classes(npz.labels, source)
        height, width, channels = npz.size
        return npz, f"an .npz of {height}×{width} images with {channels} channels"
    members, numbers = zip_images(source)
    return ZipImages(source, rules.classes(numbers, source), members, numbers), "EDM's zip"


def _folder(source: Path, labels: Path | None, rules: ClassRules) -> tuple[list[ImageFile], str]:
    if labels is not None:
        return labelled_files(source, labels), "a folder of images with a file of labels"
    if (source / LABELS).exists():
        return edm_folder_files(source), f"EDM's folder with {LABELS}"
    return class_folder_files(source, rules.names), "a folder for each class"


def _is_npz(members: list[zipfile.ZipInfo]) -> bool:
    names = [info.filename for info in members]
    return LABELS not in names and any(name.endswith(".npy") for name in names)


def parse(argv: list[str] | None) -> argparse.Namespace:
    assert __doc__ is not None
    parser = ArgumentParser(
        prog="data_prep.edm",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--source", type=Path, required=True, help="an .npz, a .zip or a folder, see above")
    add("--name", default="train", help="of the set and its shards (default train)")
    add("--labels", type=Path, metavar="FILE", help="the labels of images right in a folder")
    add("--classes-file", type=Path, metavar="FILE", help="class names by label, one a line")
    add("--num-classes", type=int, metavar="N", help="refuse labels that are not below N")
    add_conversion_options(parser)
    return parser.parse_args(argv)


@command
def main(argv: list[str] | None = None) -> None:
    arguments = parse(argv)
    options = conversion_options(arguments, "data_prep.edm")
    name: str = arguments.name
    if not re.fullmatch(r"[A-Za-z0-9_-]+", name):
        raise UserError(f"--name {name}: must be of the letters a to z, digits, - and _")
    rules = class_rules(arguments.classes_file, arguments.num_classes)
    collection, form = open_source(arguments.source, arguments.labels, rules)
    count = len(collection.classes)
    print(f"{arguments.source}: {form}: {len(collection):,} images of {count:,} classes")
    if isinstance(collection, NpzImages) and not options.dry_run:
        collection.open(options.out)
    run_conversion(collection, name, {"data": "generated images", "form": form}, options)


if __name__ == "__main__":
    main()
