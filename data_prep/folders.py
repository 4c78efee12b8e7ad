"""Your own images in class folders as shards.

    python -m data_prep.folders SOURCE --out data/own [--test-share 0.1] [--short-side 256]

SOURCE has a folder of images for each class, or train/ and test/ (or val/) with such folders in
each. Folders, sorted, are the labels; their names are those of the classes. Without test/ or val/ a
share of each class is for testing, at least one image of two, by a hash of --seed and their names.
"""

import lipnext_scale.utils.passive  # noqa: F401

import os
from hashlib import sha256
from itertools import groupby
from pathlib import Path

from data_prep.common import number
from data_prep.convert import SetSource, conversion_parser, run_conversions
from data_prep.imagenet import FolderSource
from data_prep.sources import FolderImages, ImageFile, folder_files, subfolders
from lipnext_scale.utils.errors import UserError, command


def split(files: list[ImageFile], share: float, seed: int) -> dict[str, list[ImageFile]]:
    """Files that are listed by class: of each the share for testing, one at least, never all."""
    test: list[ImageFile] = []
    for _, of_class in groupby(files, lambda file: file.label):
        own = sorted(of_class, key=lambda f: sha256(os.fsencode(f"{seed}/{f.name}")).digest())
        test += own[: min(max(1, round(share * len(own))), len(own) - 1)]
    return {"train": sorted({*files} - {*test}), "test": sorted(test)}


def set_sources(source: Path, share: float | None, seed: int) -> list[SetSource]:
    origin, found = {"data": "class folders"}, subfolders(source)
    others = [name for name in found if name != "train"]
    if others and "train" in found and {*others} <= {"val", "valid", "test"}:
        if share is not None:
            raise UserError(f"--test-share {share:g}: {source} has {', '.join(others)} already")
        parts = {name if len(others) > 1 else "test": source / name for name in others}
        folders = FolderSource({"train": source / "train"} | parts)
        classes = folders.classes()
        return [SetSource(p, folders.collection(p, classes), origin) for p in folders.splits]
    root = source / "train" if found == ["train"] else source
    classes = FolderSource({"train": root}).classes()
    files = [f for label, name in enumerate(classes) for f in folder_files(root, name, label)]
    sets = split(files, share or 0.1, seed).items()
    return [SetSource(name, FolderImages(root, classes, own), origin) for name, own in sets]


@command
def main(argv: list[str] | None = None) -> None:
    parser = conversion_parser("folders", __doc__)
    parser.add_argument("source", type=Path, metavar="SOURCE", help="a directory of class folders")
    parser.add_argument("--test-share", type=number(0.001, 0.9, float), help="default 0.1")
    options = parser.parse_args(argv)
    sets = set_sources(options.source, options.test_share, options.seed)
    run_conversions(sets, options)
    train = "to train: python -m lipnext_scale.train --config builtin:own_images.yaml"
    shards = f"data.train='{options.out}/train-*.tar' data.test='{options.out}/test-*.tar'"
    print(f"{train} {shards} model.num_classes={len(sets[0].collection.classes)}")


if __name__ == "__main__":
    main()
