"""Where the samples of an FFCV file (.beton) lie, so that they are read as those of a shard are.

With an index beside the file this takes no FFCV; python -m data_prep.ffcv writes file and index.
"""

import os
from pathlib import Path
from typing import Any

import numpy as np

from lipnext_scale.data.index import KINDS, RECORD
from lipnext_scale.errors import UserError

INSTALL = (
    "apt-get install libopencv-dev libturbojpeg0-dev pkg-config; pip install 'lipnext_scale[ffcv]'"
)
_KINDS = {0: KINDS["jpeg"], 1: KINDS["raw"]}  # by FFCV's own numbers, its IMAGE_MODES


def require_ffcv(problem: str, way_out: str = "") -> None:
    """Refuse, and say how to install FFCV, where it cannot be imported."""
    try:
        import ffcv  # noqa: F401
    except ImportError as error:
        absent = isinstance(error, ModuleNotFoundError) and error.name == "ffcv"
        reason = "" if absent else f" ({str(error).splitlines()[0]})"
        raise UserError(f"{problem} needs FFCV{reason}: {INSTALL}{way_out}") from None


def beton_records(path: Path) -> np.ndarray:
    """A RECORD for each sample of an FFCV file, in its order, by FFCV's own reader."""
    require_ffcv(
        f"{path}: has no index and reading it",
        f"; or write its index where FFCV is installed: python -m data_prep.ffcv --index {path}",
    )
    reader = _read(path)
    image, labels = _image_and_label(path, reader)
    sizes = _sizes(path, reader, image["data_ptr"])
    _require_sound(path, image, labels, sizes, int(reader.header["alloc_table_ptr"]))
    records = np.zeros(len(image), dtype=RECORD)
    records["offset"], records["size"], records["label"] = image["data_ptr"], sizes, labels
    records["height"], records["width"], records["channels"] = image["height"], image["width"], 3
    for mode, kind in _KINDS.items():
        records["kind"][image["mode"] == mode] = kind
    return records


def _read(path: Path) -> Any:
    from ffcv.reader import Reader

    try:
        reader, size = Reader(str(path)), os.stat(path).st_size
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from None
    except Exception as error:  # FFCV believes what it reads: damage shows as any kind of error
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise UserError(f"{path}: is no FFCV file that can be read: {reason}") from None
    end, page = int(reader.header["alloc_table_ptr"]), int(reader.page_size)
    if not 0 < int(reader.num_samples) == len(reader.metadata) or not len(reader.alloc_table):
        raise UserError(f"{path}: is damaged: it does not have the samples that it says")
    if not 0 < end < size or page == 0 or end % page:  # its table follows whole pages
        raise UserError(f"{path}: is damaged: its last page is cut off")
    return reader


def _image_and_label(path: Path, reader: Any) -> tuple[np.ndarray, np.ndarray]:
    """What FFCV keeps of the one image and the one number of each sample."""
    from ffcv.fields import IntField, RGBImageField

    kinds = [type(handler) for handler in reader.handlers.values()]
    if len(kinds) != 2 or set(kinds) != {RGBImageField, IntField}:
        names = zip(reader.handlers, kinds, strict=True)
        fields = ", ".join(f"{name} ({kind.__name__})" for name, kind in names)
        raise UserError(
            f"{path}: has the fields {fields}; training reads files with one RGBImageField, one "
            "IntField for the label, and nothing else"
        )
    # Columns are called f0, f1, … in the order of the fields.
    column = {kind: reader.metadata[f"f{number}"] for number, kind in enumerate(kinds)}
    return column[RGBImageField], column[IntField]


def _sizes(path: Path, reader: Any, places: np.ndarray) -> np.ndarray:
    """The bytes of the images at `places`, by FFCV's table of all that it allocated."""
    table = np.sort(reader.alloc_table, order="ptr")
    rows = np.minimum(np.searchsorted(table["ptr"], places), len(table) - 1)
    known = table["ptr"][rows] == places
    if not known.all():
        raise UserError(f"{path}: is damaged: sample {int(np.argmin(known))} is not in its table")
    return table["size"][rows]


def _require_sound(
    path: Path, image: np.ndarray, labels: np.ndarray, sizes: np.ndarray, end: int
) -> None:
    """The images lie before the table at `end`, and raw ones have as many bytes as pixels."""
    pixels = image["height"].astype(np.uint64) * image["width"] * 3
    room = np.minimum(sizes, end)  # unsigned numbers have no sums that are too large
    inside = (0 < sizes) & (sizes < 2**32) & (sizes == room) & (image["data_ptr"] <= end - room)
    whole = np.where(image["mode"] == 1, sizes == pixels, (image["mode"] == 0) & (pixels > 0))
    sound = inside & whole
    if not sound.all():
        raise UserError(f"{path}: is damaged: sample {int(np.argmin(sound))} is no image")
    narrow = (-(2**31) <= labels) & (labels < 2**31)
    if not narrow.all():
        first = int(np.argmin(narrow))
        raise UserError(f"{path}: sample {first} has a class beyond 32 bits: {labels[first]}")
