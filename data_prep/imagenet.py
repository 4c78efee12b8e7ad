"""ImageNet-1k (ILSVRC 2012), or any images in class folders, as shards.

    python -m data_prep.imagenet --source ILSVRC2012 --out data/imagenet [--short-side 256]

The source is one of
- a directory with train/ and val/ (or one of them), a folder of images for each class in each;
- a directory of class folders itself, with --split to say what it is;
- a directory with ILSVRC2012_img_train.tar and ILSVRC2012_img_val.tar (or one of them), or one of
  these files. They are read in place, never unpacked. The labels of val come from --devkit
  ILSVRC2012_devkit_t12.tar.gz, which is found if it lies beside, or from --val-labels.

A label is the place of the class's WordNet id among all of the source, sorted: the usual numbers.
--classes 400 takes as many classes by --class-seed, the same for both sets, and numbers them in
their sorted order. The sets are called train and test; test is val.
"""

import lipnext_scale.utils.passive  # noqa: F401

import argparse
import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.common import LARGEST_SEED, number, reading, text_lines
from data_prep.convert import SetSource, conversion_parser, run_conversions
from data_prep.sources import (
    FolderImages,
    ImageFile,
    Listing,
    PackedImages,
    archived_files,
    folder_files,
    subfolders,
)
from lipnext_scale.data.index import tar_files
from lipnext_scale.utils.errors import UserError, command

SET_NAMES = {"train": "train", "val": "test"}
TARS = {"train": "ILSVRC2012_img_train.tar", "val": "ILSVRC2012_img_val.tar"}
DEVKIT = "ILSVRC2012_devkit_t12.tar.gz"
TRUTH, META = "ILSVRC2012_validation_ground_truth.txt", "meta.mat"

# Both sources have `splits`, "train" and "val" as far as they are there; `classes`, the WordNet ids
# of the whole source, sorted, whichever split is converted; and `collection`, the images of some of
# these classes, whose label is a place in that list.


@dataclass(frozen=True)
class FolderSource:
    """A directory of class folders for each split."""

    splits: dict[str, Path]
    form = "folders"

    def classes(self) -> list[str]:
        found = {split: subfolders(directory) for split, directory in self.splits.items()}
        all_classes = next(iter(found.values()))  # those of train, where there is a train
        if not all_classes:
            raise UserError(f"{next(iter(self.splits.values()))}: has no class folders")
        for split, names in found.items():
            for strange in sorted(set(names) - set(all_classes)):
                raise UserError(
                    f"{self.splits[split] / strange}: is no class of {next(iter(found))}"
                )
        return all_classes

    def collection(self, split: str, classes: list[str]) -> Listing:
        root = self.splits[split]
        there = set(subfolders(root))
        files = [
            file
            for label, name in enumerate(classes)
            if name in there
            for file in folder_files(root, name, label)
        ]
        return FolderImages(root, classes, files)


@dataclass(frozen=True)
class TarSource:
    """The tar of class tars for training, the flat tar for validation; `val_ids` reads
    (a WordNet id for each image of val in the order of their names, all ids sorted)."""

    splits: dict[str, Path]
    val_ids: Callable[[], tuple[list[str], list[str]]]
    form = "tars"

    def classes(self) -> list[str]:
        if "train" not in self.splits:
            return self.val_ids()[1]
        tar = self.splits["train"]
        with reading(tar), tar.open("rb") as file:
            found = [Path(m.name).stem for m in tar_files(file) if m.name.endswith(".tar")]
        if not found or len(set(found)) < len(found):
            raise UserError(f"{tar}: must hold one tar for each class")
        return sorted(found)

    def collection(self, split: str, classes: list[str]) -> Listing:
        labels = {name: label for label, name in enumerate(classes)}
        files = self._train_files(labels) if split == "train" else self._val_files(labels)
        return PackedImages(self.splits[split], classes, files)

    def _train_files(self, labels: Mapping[str, int]) -> list[ImageFile]:
        files: list[ImageFile] = []
        tar = self.splits["train"]
        with reading(tar), tar.open("rb") as outer, tar.open("rb") as inner:
            for entry in tar_files(outer):
                name = Path(entry.name).stem
                if entry.name.endswith(".tar") and name in labels:
                    inner.seek(entry.offset_data)
                    with reading(f"{tar}: its {entry.name}"):
                        for m in tar_files(inner):
                            image = f"{name}/{Path(m.name).name}"
                            files.append(ImageFile(image, labels[name], m.size, m.offset_data))
        return sorted(files)

    def _val_files(self, labels: Mapping[str, int]) -> list[ImageFile]:
        tar = self.splits["val"]
        with reading(tar), tar.open("rb") as file:
            images = sorted((m.name, m.offset_data, m.size) for m in tar_files(file))
        ids, _ = self.val_ids()
        if "train" in self.splits and (strange := sorted(set(ids) - set(self.classes()))):
            raise UserError(f"{tar}: its class {strange[0]} is none of {TARS['train']}")
        if len(images) != len(ids):
            raise UserError(f"{tar}: has {len(images)} images, but there are {len(ids)} labels")
        return [
            ImageFile(Path(image).name, labels[name], size, place)
            for (image, place, size), name in zip(images, ids, strict=True)
            if name in labels
        ]


def val_ids(arguments: argparse.Namespace) -> tuple[list[str], list[str]]:
    """The labels of val, from a text file or from the development kit."""
    if arguments.val_labels:
        ids = text_lines(arguments.val_labels)
        return ids, sorted(set(ids))
    source: Path = arguments.source
    devkit = arguments.devkit or (source if source.is_dir() else source.parent) / DEVKIT
    if not devkit.exists():
        raise UserError(
            f"{TARS['val']} has no labels in it: give --devkit {DEVKIT} or --val-labels FILE"
        )
    files = archived_files(devkit, (TRUTH, META))
    for name in {TRUTH, META} - files.keys():
        raise UserError(f"{devkit}: has no {name}; it is not {DEVKIT}")
    numbered = _ids_by_number(files[META], devkit)
    try:
        truth = [numbered[int(line)] for line in files[TRUTH].split()]
    except (ValueError, KeyError) as error:
        raise UserError(f"{devkit}: {TRUTH} has the unknown class {error}") from None
    return truth, sorted(numbered.values())


def _ids_by_number(meta: bytes, devkit: Path) -> dict[int, str]:
    """WordNet ids by the kit's own numbers. The file has parents of the classes too: they have
    children."""
    try:
        from scipy.io import loadmat
    except ImportError:
        raise UserError(
            "--devkit: scipy reads its meta.mat and is not installed: "
            "pip install 'lipnext_scale[prep]'; or give --val-labels"
        ) from None
    with reading(f"{devkit}: its {META}"):
        rows = loadmat(io.BytesIO(meta), squeeze_me=True)["synsets"]
        leaves = [row for row in rows if int(row["num_children"]) == 0]
        return {int(row["ILSVRC2012_ID"]): str(row["WNID"]) for row in leaves}


def open_source(arguments: argparse.Namespace) -> FolderSource | TarSource:
    """What --source is, by what lies there."""
    source, split = arguments.source, arguments.split
    if source.is_file():
        split = split or next((part for part, name in TARS.items() if source.name == name), None)
        if split is None:
            raise UserError(f"--source {source}: give --split train or --split val with this name")
        return TarSource({split: source}, lambda: val_ids(arguments))
    if not source.is_dir():
        raise UserError(f"--source {source}: is neither a directory nor a tar")
    if folders := {part: source / part for part in SET_NAMES if (source / part).is_dir()}:
        return FolderSource(folders)
    if tars := {part: source / tar for part, tar in TARS.items() if (source / tar).is_file()}:
        return TarSource(tars, lambda: val_ids(arguments))
    if split:
        return FolderSource({split: source})
    raise UserError(
        f"--source {source}: has neither train/ or val/ nor {TARS['train']} or {TARS['val']}; for "
        "class folders right in it give --split train or --split val"
    )


def chosen_classes(classes: list[str], count: int | None, seed: int) -> list[str]:
    """`count` of the sorted classes, drawn by the seed; all of them if None."""
    if count is None:
        return classes
    if not 1 <= count <= len(classes):
        raise UserError(f"--classes {count}: the source has {len(classes)} classes")
    # Of numpy's generators the one whose numbers are promised never to change.
    drawn = np.random.RandomState(seed).permutation(len(classes))[:count]
    return [classes[i] for i in sorted(drawn)]


def set_sources(arguments: argparse.Namespace) -> list[SetSource]:
    source = open_source(arguments)
    splits = [arguments.split] if arguments.split else list(source.splits)
    for split in splits:
        if split not in source.splits:
            raise UserError(f"--split {split}: --source {arguments.source} has none")
    print(f"listing the images of {arguments.source}", flush=True)  # a big tar takes minutes
    found = source.classes()
    classes = chosen_classes(found, arguments.classes, arguments.class_seed)
    origin: dict[str, Any] = {"data": "ImageNet", "form": source.form}
    if arguments.classes is not None:
        origin |= {"classes_of": len(found), "class_seed": arguments.class_seed}
    return [
        SetSource(SET_NAMES[split], source.collection(split, classes), origin | {"split": split})
        for split in splits
    ]


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = conversion_parser("imagenet", __doc__)
    add = parser.add_argument
    add("--source", type=Path, required=True, help="a directory or one of the official tars")
    add("--split", choices=tuple(SET_NAMES), help="convert this one alone (default: all there)")
    add("--devkit", type=Path, help=f"{DEVKIT}, for the labels of the val tar")
    add(
        "--val-labels",
        type=Path,
        help="instead of --devkit: a text file, a WordNet id for each image of val by name",
    )
    add("--classes", type=int, metavar="N", help="only N of the classes (default: all)")
    add("--class-seed", type=number(0, LARGEST_SEED), default=0, help="which N (default 0)")
    return parser.parse_args(argv)


@command
def main(argv: list[str] | None = None) -> None:
    arguments = parse(argv)
    run_conversions(set_sources(arguments), arguments)


if __name__ == "__main__":
    main()
