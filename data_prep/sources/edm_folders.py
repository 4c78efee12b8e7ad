"""Generated images in folders: one of each class, EDM's with its dataset.json, or a flat one with
the labels in a file."""

import csv
import os
from collections.abc import Sequence
from pathlib import Path

from data_prep.sources.edm_zip import LABELS, dataset_labels, is_image, require_all_labelled
from data_prep.sources.listing import ImageFile, folder_files, subfolders, text_lines
from lipnext_scale.errors import UserError

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
