"""The index beside a set's shards: where every sample lies, so that any can be read at once.

    train-000000.tar, train-000001.tar, …   the shards: uncompressed tars, KEY.cls and an image each
    train.index.json                        shards with samples, bytes and sha256; classes; source
    train.index.npy                         one RECORD a sample, in the order of the shards

The records are mapped, not read: all processes of a node share one copy in the page cache, and
memory does not grow with the set. An FFCV file set.beton has set.beton.index.json and .npy.
"""

import hashlib
import io
import json
import os
import re
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from webdataset.tariterators import group_by_keys

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


# --------------------------------------------------------------------------------------------------
# Where the samples of a tar lie, found by walking its headers: for shards that have no index.
#
# Of the members only the short .cls files are read; images are stepped over, and all else (.json,
# pickles, links, directories) is left alone. Nothing is ever extracted.

# Suffix in lower case → kind; of several images in one sample the first of these is taken.
IMAGE_KINDS = {"png": "png", "jpg": "jpeg", "jpeg": "jpeg"}
# Bytes. Long names and pax headers are shorter; one that claims more is not read into memory.
LONGEST_HEADER = 1 << 20
LONGEST_LABEL = 64
LARGEST_IMAGE = 2**32 - 1  # what RECORD can say
_META = "__"  # WebDataset's own members, __meta__ and __meta__/…, belong to no sample
_PACKED = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd"}


def scan_tar(path: str | Path, name: str | None = None) -> tuple[np.ndarray, int]:
    """(a RECORD for each sample in the tar's order, the tar's size in bytes).

    name: the shard's in messages, where the path is not what the user knows it by.

    A sample is what WebDataset takes for one: consecutive members with the same path up to the
    first dot of the file name. A key that comes again after others is a sample of its own, as
    there; a member given twice in one sample is refused, as there.
    """
    name = name or str(path)
    records: list[Record] = []
    try:
        with _HeaderFile(path) as file:
            samples = group_by_keys(_members(file))
            while (sample := _next_sample(samples, name)) is not None:
                records.append(_record(sample, file, name))
            return np.array(records, dtype=RECORD), os.fstat(file.fileno()).st_size
    except OSError as error:
        raise UserError(f"{name}: cannot be read: {error.strerror or error}") from None


def sample_key(path: str | Path, record: Record) -> str:
    """The key of a record's sample by the header before its image; "at byte N" where that header
    does not tell: a name too long for it stands in another one, and an FFCV file has none."""
    offset, unknown = record.offset, f"at byte {record.offset}"
    try:
        with open(path, "rb", buffering=0) as file:
            block = os.pread(file.fileno(), tarfile.BLOCKSIZE, max(offset - tarfile.BLOCKSIZE, 0))
        entry = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
    except (OSError, tarfile.HeaderError):
        return unknown
    cut_off = len(block[:100].rstrip(b"\0")) >= 99 and not block[345:500].strip(b"\0")
    # Where a name has letters beyond ASCII some writers put "?" here and the name elsewhere.
    if cut_off or "?" in entry.name or not entry.isreg() or entry.size != record.size:
        return unknown
    directory, slash, file_name = entry.name.rpartition("/")
    return printable(directory + slash + file_name.split(".")[0])


def printable(name: str) -> str:
    """A name from a tar as it can be shown in one line of any terminal."""
    return name if name.isprintable() else repr(name)


class _HeaderFile(io.FileIO):
    """A tar that lets only headers be read; all of the rest is out of reach of `tarfile`."""

    def read(self, size: int | None = -1, /) -> bytes:
        if size is None or not 0 <= size <= LONGEST_HEADER:
            raise tarfile.ReadError(f"a header claims to be {size} bytes long")
        return super().read(size) or b""


def _members(file: _HeaderFile) -> Iterator[dict[str, Any]]:
    """The regular files of the tar as `group_by_keys` takes them; their data is their TarInfo."""
    _refuse_compressed(file)
    with tarfile.open(fileobj=file, mode="r:") as tar:
        before = -1
        while (entry := tar.next()) is not None:
            # A negative size would send tarfile back, to read the same members for ever.
            if entry.size < 0 or entry.offset_data <= before:
                raise tarfile.ReadError(f"the header at byte {entry.offset} is damaged")
            before = entry.offset_data
            if entry.isreg() and not _is_meta(entry.name):
                yield {"fname": entry.name, "data": entry, "__url__": file.name}
            tar.members = []  # type: ignore[attr-defined]  # else it remembers every entry
        _require_end(file, tar.offset)


def _refuse_compressed(file: _HeaderFile) -> None:
    start = os.pread(file.fileno(), 8, 0)
    for magic, method in _PACKED.items():
        if start.startswith(magic):
            raise tarfile.ReadError(f"it is compressed by {method}; unpack it")


def _is_meta(name: str) -> bool:
    first = name.split("/")[0]
    return len(first) >= 2 * len(_META) and first.startswith(_META) and first.endswith(_META)


def _require_end(file: _HeaderFile, end: int) -> None:
    """tarfile takes a cut or a damaged header between two files for the end. The end is two empty
    blocks, and nothing but zeros after them: a second tar there would be lost silently."""
    blocks = os.pread(file.fileno(), 2 * tarfile.BLOCKSIZE, end)
    if any(blocks):
        raise tarfile.ReadError(f"the header at byte {end} is damaged")
    if len(blocks) < 2 * tarfile.BLOCKSIZE:
        raise tarfile.ReadError(f"it is cut off at byte {end + len(blocks)}")
    place = end + len(blocks)
    while rest := os.pread(file.fileno(), LONGEST_HEADER, place):
        if rest.strip(b"\0"):
            raise tarfile.ReadError(f"there is more after its end at byte {end}")
        place += len(rest)


def _next_sample(samples: Iterator[dict[str, Any]], shard: str) -> dict[str, Any] | None:
    try:
        return next(samples, None)
    except Exception as error:  # whatever tarfile makes of bytes that are no tar
        reason = str(error.args[0] if error.args else error).split("\n")[0]
        raise UserError(f"{shard}: is not a readable shard: {reason}") from None


def _record(sample: dict[str, Any], file: _HeaderFile, shard: str) -> Record:
    name = f"{shard}: sample {printable(sample['__key__'])}"
    suffix = next((suffix for suffix in IMAGE_KINDS if suffix in sample), None)
    if suffix is None or "cls" not in sample:
        raise UserError(f"{name} needs a .cls and an image ({', '.join(IMAGE_KINDS)})")
    image: tarfile.TarInfo = sample[suffix]
    for entry in (image, sample["cls"]):
        if entry.issparse():
            raise UserError(f"{name} has a sparse member, whose bytes do not lie together")
    if image.size > LARGEST_IMAGE:
        raise UserError(f"{name} has an image of {image.size} bytes; at most {LARGEST_IMAGE}")
    label = _label(file, sample["cls"], name)
    return Record(image.offset_data, image.size, label, 0, 0, 0, KINDS[IMAGE_KINDS[suffix]], 0)


def _label(file: _HeaderFile, entry: tarfile.TarInfo, name: str) -> int:
    text = os.pread(file.fileno(), min(entry.size, LONGEST_LABEL + 1), entry.offset_data)
    try:
        label = int(text) if entry.size <= LONGEST_LABEL else None
    except ValueError:
        label = None
    if label is None:
        shown = repr(text[:20])[1:] + ("…" if len(text) > 20 else "")
        raise UserError(f"{name} cannot be decoded: its class is {shown}, not a number")
    if not -(2**31) <= label < 2**31:
        raise UserError(f"{name} has a class beyond 32 bits: {label}")
    return label


# --------------------------------------------------------------------------------------------------
# Where the samples of an FFCV file (.beton) lie, so that they are read as those of a shard are.
#
# With an index beside the file this takes no FFCV; python -m data_prep.ffcv writes file and
# index.

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
