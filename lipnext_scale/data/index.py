"""The index beside a set's shards: where every sample lies, so that any can be read at once.

    train-000000.tar, train-000001.tar, …   the shards: uncompressed tars, KEY.cls and an image each
    train.index.json                        shards with samples, bytes and sha256; classes; source
    train.index.npy                         one RECORD a sample, in the order of the shards

The records are mapped, not read: all processes of a node share one copy in the page cache, and
memory does not grow with the set. An FFCV file set.beton has set.beton.index.json and .npy.
"""

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lipnext_scale.errors import UserError
from lipnext_scale.files import atomic_file, write_atomically

FORMAT = "lipnext_scale shards 1"
# Where the encoded image lies in its shard, its class, and what it is; a height, width or number of
# channels of 0 is not known. KINDS says what `kind` means.
RECORD = np.dtype(
    [
        ("offset", "<u8"),
        ("size", "<u4"),
        ("label", "<i4"),
        ("height", "<u2"),
        ("width", "<u2"),
        ("channels", "u1"),
        ("kind", "u1"),
        ("reserved", "<u2"),
    ]
)


class Record(NamedTuple):
    """A RECORD in Python's own numbers."""

    offset: int
    size: int
    label: int
    height: int
    width: int
    channels: int
    kind: int
    reserved: int


KINDS = {"jpeg": 1, "png": 2, "raw": 3}  # raw: uint8 pixels [height, width, channels]
# As it is written; in a name that looks like it every " has a backslash before it.
_COUNTS = b'"class_counts": {'
_NUMBERED = re.compile(r"^(?P<name>.+)-\d+\.tar$")


@dataclass(frozen=True)
class ShardEntry:
    """A shard as its index describes it; `file` is its name in the directory of the index."""

    file: str
    samples: int
    bytes: int
    sha256: str
    class_counts: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class SetIndex:
    """All that index.json says. `records` is the sha256 of the .npy; `source` and `converter` are
    whatever the converter wants to remember: settings, versions, digests of what it read."""

    name: str
    shards: list[ShardEntry]
    classes: list[str]
    records: str
    source: dict[str, Any] = field(default_factory=dict)
    converter: dict[str, Any] = field(default_factory=dict)
    skipped: list[dict[str, str]] = field(default_factory=list)
    format: str = FORMAT

    @property
    def samples(self) -> int:
        return sum(shard.samples for shard in self.shards)


def set_name(shard: str) -> str:
    """The name that a shard's index goes by: train-000012.tar → train, set.beton → set.beton."""
    file = shard.rsplit("/", 1)[-1]
    numbered = _NUMBERED.match(file)
    return numbered["name"] if numbered else file


def index_paths(directory: Path, name: str) -> tuple[Path, Path]:
    return directory / f"{name}.index.json", directory / f"{name}.index.npy"


def write_index(
    directory: Path,
    name: str,
    shards: Sequence[ShardEntry],
    records: np.ndarray,
    classes: Sequence[str] = (),
    source: dict[str, Any] | None = None,
    converter: dict[str, Any] | None = None,
    skipped: Sequence[dict[str, str]] = (),
) -> SetIndex:
    """Write both files; the .json last, so that an index that can be found is complete."""
    assert records.dtype == RECORD and len(records) == sum(shard.samples for shard in shards)
    json_path, npy_path = index_paths(directory, name)
    with atomic_file(npy_path) as file:
        np.save(file, records, allow_pickle=False)
    digest = hashlib.sha256(npy_path.read_bytes()).hexdigest()
    index = SetIndex(
        name, list(shards), list(classes), digest, source or {}, converter or {}, list(skipped)
    )
    text = json.dumps(asdict(index), indent=1, ensure_ascii=False) + "\n"
    write_atomically(json_path, text.encode())
    return index


def read_index(path: Path, counts: bool = True) -> SetIndex:
    """An index.json; a damaged one is refused by name.

    counts: with class_counts. They are nearly all that a large index is, and take their time.
    """
    try:
        content = path.read_bytes()
        values = json.loads(content if counts else _without_counts(content))
        values["shards"] = [ShardEntry(**shard) for shard in values["shards"]]
        index = SetIndex(**values)
        sound = all(_is_sound(shard) for shard in index.shards) and (
            isinstance(index.classes, list)
            and isinstance(index.skipped, list)
            and all(isinstance(entry, dict) for entry in index.skipped)
        )
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise _not_an_index(path) from None
    if not sound:
        raise _not_an_index(path)
    if index.format != FORMAT:
        raise UserError(f"{path}: has the format {index.format!r}; this version reads {FORMAT!r}")
    return index


def _without_counts(content: bytes) -> bytes:
    """Each class_counts is empty. A regular expression took a third of a second for 25 MB."""
    before, *others = content.split(_COUNTS)
    return _COUNTS.join([before, *(other[other.index(b"}") :] for other in others)])


def _is_sound(shard: ShardEntry) -> bool:
    """The file lies beside its index, nowhere else."""
    return (
        shard.samples >= 0 <= shard.bytes
        and shard.file == Path(shard.file).name
        and isinstance(shard.sha256, str)
        and isinstance(shard.class_counts, dict)
    )


def _not_an_index(path: Path) -> UserError:
    return UserError(f"{path}: is not an index of shards; python -m data_prep.index writes one")


def map_records(path: Path, samples: int) -> np.ndarray:
    """The records of an index.npy, mapped; their number must be that of the index."""
    try:
        records = np.load(path, mmap_mode="r", allow_pickle=False)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from None
    except Exception:  # what numpy and Python's parser make of a damaged header
        raise UserError(f"{path}: is not an array of records: it is damaged") from None
    if records.dtype != RECORD or records.shape != (samples,):
        raise UserError(
            f"{path}: holds {records.shape} of {records.dtype}, its index says {samples} samples"
        )
    return records.view(np.ndarray)  # still mapped, without what a memmap does on every access
