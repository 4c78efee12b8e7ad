"""ImageNet-1k (ILSVRC 2012), or any images in class folders, as shards.

    python -m data_prep.imagenet --source ILSVRC2012 --out data/imagenet [--short-side 256]

The source is one of
- a directory with train/ and val/ (or one of them), a folder of images for each class in each;
- a directory of class folders itself, with --split to say what it is;
- a directory with ILSVRC2012_img_train.tar and ILSVRC2012_img_val.tar (or one of them), or one of
  these files. They are read where they lie, never unpacked. The labels of val come from --devkit
  ILSVRC2012_devkit_t12.tar.gz, which is found if it lies beside, or from --val-labels.

A label is the place of the class's WordNet id among all of the source, sorted: the usual numbers.
--classes 400 takes as many classes by --class-seed, the same for both sets, and numbers them in
their sorted order. The sets are called train and test; test is val.
"""

import argparse
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.sources.imagenet_sources import FolderSource, ImageSource, TarSource, ValLabels
from data_prep.writing.convert import (
    LARGEST_SEED,
    SetSource,
    add_conversion_options,
    conversion_options,
    run_conversions,
)
from lipnext_scale.errors import ArgumentParser, UserError, command

SET_NAMES = {"train": "train", "val": "test"}


def open_source(source: Path, split: str | None, val_labels: ValLabels) -> ImageSource:
    """What --source is, by what lies there."""
    if source.is_file():
        return TarSource({split or TarSource.split_of(source): source}, val_labels)
    if not source.is_dir():
        raise UserError(f"--source {source}: is neither a directory nor a tar")
    folders = {part: source / part for part in SET_NAMES if (source / part).is_dir()}
    tars = TarSource.find(source)
    if folders:
        return FolderSource(folders)
    if tars:
        return TarSource(tars, val_labels)
    if split:
        return FolderSource({split: source})
    raise UserError(
        f"--source {source}: has neither train/ or val/ nor ILSVRC2012_img_train.tar or "
        "ILSVRC2012_img_val.tar; for class folders right in it say --split train or --split val"
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
    labels = ValLabels(arguments.devkit, arguments.val_labels)
    source = open_source(arguments.source, arguments.split, labels)
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
    parser = ArgumentParser(
        prog="data_prep.imagenet",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--source", type=Path, required=True, help="a directory or one of the official tars")
    add("--split", choices=tuple(SET_NAMES), help="convert this one alone (default: all there)")
    add("--devkit", type=Path, help="ILSVRC2012_devkit_t12.tar.gz, for the labels of the val tar")
    add(
        "--val-labels",
        type=Path,
        help="instead of --devkit: a text file, a WordNet id for each image of val by name",
    )
    add("--classes", type=int, metavar="N", help="only N of the classes (default: all)")
    add("--class-seed", type=int, default=0, help="which N classes (default 0)")
    add_conversion_options(parser)
    return parser.parse_args(argv)


@command
def main(argv: list[str] | None = None) -> None:
    arguments = parse(argv)
    options = conversion_options(arguments, "data_prep.imagenet")
    if not 0 <= arguments.class_seed <= LARGEST_SEED:
        raise UserError(f"--class-seed {arguments.class_seed}: must be 0 to {LARGEST_SEED}")
    run_conversions(set_sources(arguments), options)


if __name__ == "__main__":
    main()
