"""Where the images of ImageNet lie: in class folders, or in the official tars."""

import io
import tarfile
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from data_prep.sources.listing import (
    Collection,
    FolderImages,
    ImageFile,
    Member,
    TarImages,
    folder_files,
    subfolders,
    tar_members,
    text_lines,
)
from lipnext_scale.errors import UserError

TARS = {"train": "ILSVRC2012_img_train.tar", "val": "ILSVRC2012_img_val.tar"}
DEVKIT = "ILSVRC2012_devkit_t12.tar.gz"
TRUTH, META = "ILSVRC2012_validation_ground_truth.txt", "meta.mat"
LARGEST_DEVKIT_FILE = 1 << 26  # bytes; the two that are read have less than one MB


class ImageSource(Protocol):
    """One of the forms; `splits` are of "train" and "val"."""

    form: str

    @property
    def splits(self) -> Mapping[str, Path]: ...

    def classes(self) -> list[str]:
        """The WordNet ids of the whole source, sorted, whichever split is converted: a label must
        not depend on that."""
        ...

    def collection(self, split: str, classes: list[str]) -> Collection:
        """The images of these classes; a label is a place in the list."""
        ...


class FolderSource:
    """A directory of class folders for each split."""

    form = "folders"

    def __init__(self, directories: dict[str, Path]) -> None:
        self.splits = directories

    def classes(self) -> list[str]:
        found = {split: subfolders(directory) for split, directory in self.splits.items()}
        all_classes = next(iter(found.values()))  # those of train, where there is a train
        if not all_classes:
            directory = next(iter(self.splits.values()))
            raise UserError(f"{directory}: has no class folders")
        for strange in sorted(set(found.get("val", [])) - set(all_classes)):
            raise UserError(f"{self.splits['val'] / strange}: is no class of train")
        return all_classes

    def collection(self, split: str, classes: list[str]) -> FolderImages:
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
class ValLabels:
    """Where the classes of val's images are written: in the development kit, or in a text file."""

    devkit: Path | None = None
    text: Path | None = None

    def ids(self, beside: Path) -> tuple[list[str], list[str]]:
        """(a WordNet id for each image of val in the order of their names, all ids sorted)"""
        if self.text:
            ids = [line.strip() for line in text_lines(self.text)]
            return ids, sorted(set(ids))
        devkit = self.devkit or beside / DEVKIT
        if not devkit.exists():
            raise UserError(
                f"{TARS['val']} has no labels in it: give --devkit {DEVKIT} or --val-labels FILE"
            )
        return _devkit_ids(devkit)


class TarSource:
    """The tar of class tars for training, the flat tar for validation."""

    form = "tars"

    def __init__(self, tars: dict[str, Path], val_labels: ValLabels) -> None:
        self.splits, self._val_labels = tars, val_labels

    @staticmethod
    def find(directory: Path) -> dict[str, Path]:
        return {s: directory / name for s, name in TARS.items() if (directory / name).is_file()}

    @staticmethod
    def split_of(tar: Path) -> str:
        for split, name in TARS.items():
            if tar.name == name:
                return split
        raise UserError(f"--source {tar}: say --split train or --split val, for its name does not")

    def classes(self) -> list[str]:
        if "train" in self.splits:
            return sorted(name for name, _ in self._class_tars())
        return self._val_ids()[1]

    def collection(self, split: str, classes: list[str]) -> TarImages:
        labels = {name: label for label, name in enumerate(classes)}
        files = self._train_files(labels) if split == "train" else self._val_files(labels)
        return TarImages(self.splits[split], classes, list(files))

    def _class_tars(self) -> list[tuple[str, Member]]:
        """(WordNet id, where its tar lies) in the order of the ids."""
        tar = self.splits["train"]
        found = [(Path(m.name).stem, m) for m in tar_members(tar) if m.name.endswith(".tar")]
        if not found or len({name for name, _ in found}) < len(found):
            raise UserError(f"{tar}: must hold one tar for each class")
        return sorted(found)

    def _train_files(self, labels: Mapping[str, int]) -> Iterator[ImageFile]:
        tar = self.splits["train"]
        for name, inner in self._class_tars():
            if name in labels:
                for image in sorted(tar_members(tar, inner.offset, inner.size)):
                    path = f"{name}/{Path(image.name).name}"
                    yield ImageFile(path, labels[name], image.size, image.offset)

    def _val_files(self, labels: Mapping[str, int]) -> Iterator[ImageFile]:
        tar = self.splits["val"]
        images = sorted(tar_members(tar))
        ids, _ = self._val_ids()
        if "train" in self.splits and (strange := sorted(set(ids) - set(self.classes()))):
            raise UserError(f"{tar}: its class {strange[0]} is none of {TARS['train']}")
        if len(images) != len(ids):
            raise UserError(f"{tar}: has {len(images)} images, but there are {len(ids)} labels")
        for image, name in zip(images, ids, strict=True):
            if name in labels:
                yield ImageFile(Path(image.name).name, labels[name], image.size, image.offset)

    def _val_ids(self) -> tuple[list[str], list[str]]:
        return self._val_labels.ids(self.splits["val"].parent)


def _devkit_ids(devkit: Path) -> tuple[list[str], list[str]]:
    """The ground truth is a list of the kit's own numbers, which its meta.mat tells the ids of."""
    files = _devkit_files(devkit)
    ids = _ids_by_number(files[META], devkit)
    try:
        truth = [ids[int(line)] for line in files[TRUTH].split()]
    except (ValueError, KeyError) as error:
        raise UserError(f"{devkit}: {TRUTH} has the unknown class {error}") from None
    return truth, sorted(ids.values())


def _devkit_files(devkit: Path) -> dict[str, bytes]:
    found = {}
    try:
        with tarfile.open(devkit, "r:*") as tar:
            for entry in tar:
                name = entry.name.rsplit("/", 1)[-1]
                if name in (TRUTH, META) and entry.isreg() and entry.size <= LARGEST_DEVKIT_FILE:
                    content = tar.extractfile(entry)
                    assert content is not None
                    found[name] = content.read()
    except OSError as error:
        raise UserError(f"{devkit}: cannot be read: {error.strerror or error}") from None
    except (tarfile.TarError, zlib.error, EOFError, ValueError) as error:
        raise UserError(f"{devkit}: is no readable archive: {error}") from None
    for name in {TRUTH, META} - found.keys():
        raise UserError(f"{devkit}: has no {name}; it is not {DEVKIT}")
    return found


def _ids_by_number(meta: bytes, devkit: Path) -> dict[int, str]:
    """Of the classes alone: the file has their parents in WordNet too, which have children."""
    try:
        from scipy.io import loadmat
    except ImportError:
        raise UserError(
            "--devkit: scipy reads its meta.mat and is not installed: "
            "pip install 'lipnext_scale[prep]'; or give --val-labels"
        ) from None
    try:
        rows = loadmat(io.BytesIO(meta), squeeze_me=True)["synsets"]
        leaves = [row for row in rows if int(row["num_children"]) == 0]
        return {int(row["ILSVRC2012_ID"]): str(row["WNID"]) for row in leaves}
    except Exception as error:  # a file that is none, or another one, may fail in any way
        raise UserError(f"{devkit}: its {META} cannot be read: {error}") from None
