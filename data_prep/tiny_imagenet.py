"""Tiny ImageNet (200 classes, 64×64) as shards, from the official folder.

    python -m data_prep.tiny_imagenet --source tiny-imagenet-200 --out data/tiny_imagenet

The folder has wnids.txt, train/WNID/images/ and val/images/ with val_annotations.txt. A label is
the place of the WordNet id among all of them, sorted; its name is in words.txt. The set "test" is
val: the official test images have no labels.
"""

import lipnext_scale.utils.passive  # noqa: F401

from pathlib import Path

from data_prep.common import text_lines
from data_prep.convert import SetSource, conversion_parser, run_conversions
from data_prep.sources import FolderImages, ImageFile, folder_files, subfolders
from lipnext_scale.utils.errors import UserError, command

ANNOTATIONS = "val/val_annotations.txt"


def class_ids(root: Path) -> list[str]:
    """The WordNet ids by label."""
    ids = sorted(text_lines(root / "wnids.txt"))
    if not ids or len(set(ids)) < len(ids):
        raise UserError(f"{root / 'wnids.txt'}: must name every class once")
    for name in sorted(set(subfolders(root / "train")) ^ set(ids)):
        where = "has no folder in train" if name in ids else "is in train, not in wnids.txt"
        raise UserError(f"--source {root}: class {name} {where}")
    return ids


def val_files(root: Path, ids: list[str]) -> list[ImageFile]:
    """Each image of val has a line that begins with its name and its class."""
    labels = {name: label for label, name in enumerate(ids)}
    annotated: dict[str, int] = {}
    for line in text_lines(root / ANNOTATIONS):
        name, _, rest = line.partition("\t")
        class_id = rest.split("\t")[0].strip()
        if class_id not in labels or name in annotated:
            wrong = "is there twice" if name in annotated else f"has the unknown class {class_id!r}"
            raise UserError(f"{root / ANNOTATIONS}: {name!r} {wrong}")
        annotated[name] = labels[class_id]
    files = folder_files(root, "val/images", 0)
    for name in sorted({Path(file.name).name for file in files} ^ set(annotated)):
        where = "no file in val/images" if name in annotated else "no line"
        raise UserError(f"{root / ANNOTATIONS}: {name!r} has {where}")
    return [file._replace(label=annotated[Path(file.name).name]) for file in files]


@command
def main(argv: list[str] | None = None) -> None:
    parser = conversion_parser("tiny_imagenet", __doc__)
    parser.add_argument("--source", type=Path, required=True, help="tiny-imagenet-200, unpacked")
    arguments = parser.parse_args(argv)
    root: Path = arguments.source
    ids = class_ids(root)
    lines = text_lines(root / "words.txt") if (root / "words.txt").exists() else []
    words = dict(line.partition("\t")[::2] for line in lines)
    names = [words.get(name, name).split(",")[0] for name in ids]  # the first word of several
    train: list[ImageFile] = []
    for label, name in enumerate(ids):
        train += folder_files(root, f"train/{name}/images", label)
    sets = [
        SetSource(name, FolderImages(root, names, files), {"data": "Tiny ImageNet", "split": split})
        for name, split, files in (("train", "train", train), ("test", "val", val_files(root, ids)))
    ]
    run_conversions(sets, arguments)


if __name__ == "__main__":
    main()
