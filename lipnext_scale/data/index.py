"""The index beside a set's shards: where every sample lies, so that any can be read at once.

    train-000000.tar, train-000001.tar, …   the shards: uncompressed tars, KEY.cls and an image each
    train.index.json                        shards with samples, bytes and sha256; classes; source
    train.index.npy                         one RECORD a sample, in the order of the shards

The records are mapped, not read: all processes of a node share one copy in the page cache, and
memory does not grow with the set. An FFCV file set.beton has set.beton.index.json and .npy.
"""

import io
import json
import os
import re
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
from webdataset.tariterators import group_by_keys

from lipnext_scale.utils.errors import UserError
from lipnext_scale.utils.files import atomic_file, file_sha256, write_atomically

FORMAT = "lipnext_scale shards 1"


class Record(NamedTuple):
    """Where the encoded image lies in its shard, its class, and what it is (KINDS); a height, width
    or number of channels of 0 is not known. In Python's own numbers; stored as RECORD."""

    offset: int
    size: int
    label: int
    height: int
    width: int
    channels: int
    kind: int
    reserved: int


_STORED = ("<u8", "<u4", "<i4", "<u2", "<u2", "u1", "u1", "<u2")
RECORD = np.dtype(list(zip(Record._fields, _STORED, strict=True)))
KINDS = {"jpeg": 1, "png": 2, "raw": 3}  # raw: uint8 pixels [height, width, channels]
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
    """The content of index.json. `records` is the sha256 of the .npy; `source` and `converter` hold
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
    digest = file_sha256(npy_path)
    index = SetIndex(
        name, list(shards), list(classes), digest, source or {}, converter or {}, list(skipped)
    )
    text = json.dumps(asdict(index), indent=1, ensure_ascii=False) + "\n"
    write_atomically(json_path, text.encode())
    return index


def read_index(path: Path) -> SetIndex:
    """An index.json; a damaged one is refused by name."""
    try:
        values = json.loads(path.read_bytes())
        values["shards"] = [ShardEntry(**shard) for shard in values["shards"]]
        index = SetIndex(**values)
        # A shard lies beside its index, nowhere else.
        intact = isinstance(index.classes, list) and all(
            shard.file == Path(shard.file).name and shard.samples >= 0 <= shard.bytes
            for shard in index.shards
        )
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        intact = False
    if not intact:
        raise UserError(f"{path}: is not an index of shards; python -m data_prep.index writes one")
    if index.format != FORMAT:
        raise UserError(f"{path}: has the format {index.format!r}; this version reads {FORMAT!r}")
    return index


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
# pickles, links, directories) is ignored. Nothing is ever extracted.

# Suffix in lower case → kind; of several images in one sample the first of these is taken.
IMAGE_KINDS = {"png": "png", "jpg": "jpeg", "jpeg": "jpeg"}
_LONGEST_LABEL = 64  # bytes


def scan_tar(path: str | Path, name: str | None = None) -> tuple[np.ndarray, int]:
    """(a RECORD for each sample in the tar's order, the tar's size in bytes).

    name: the shard's in messages, where the path is not what the user knows it by.

    A sample is what WebDataset takes for one: consecutive members with the same path up to the
    first dot of the file name.
    """
    name = name or str(path)
    records: list[Record] = []
    try:
        with open(path, "rb", buffering=0) as file:
            for sample in group_by_keys(_members(file)):
                records.append(_record(sample, file, name))
            return np.array(records, dtype=RECORD), os.fstat(file.fileno()).st_size
    except UserError:
        raise
    except OSError as error:
        raise UserError(f"{name}: cannot be read: {error.strerror or error}") from None
    except Exception as error:  # whatever tarfile makes of bytes that are no tar
        reason = str(error.args[0] if error.args else error).split("\n")[0]
        raise UserError(f"{name}: is not a readable shard: {reason}") from None


def sample_key(path: str | Path, record: Record) -> str:
    """The key of a record's sample by the header before its image; "at byte N" where that header
    lacks it: a name too long for it stands in another one, and an FFCV file has none."""
    unknown = f"at byte {record.offset}"
    try:
        with open(path, "rb", buffering=0) as file:
            place = max(record.offset - tarfile.BLOCKSIZE, 0)
            block = os.pread(file.fileno(), tarfile.BLOCKSIZE, place)
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
    """A name that fits a line of any terminal and a JSON file, whatever bytes it is made of."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in name)


def tar_files(file: IO[bytes]) -> Iterator[tarfile.TarInfo]:
    """The regular files of the tar that begins here; a cut or damaged one is refused."""
    with tarfile.open(fileobj=file, mode="r:") as tar:
        before = -1
        while (entry := tar.next()) is not None:
            # A negative size would send tarfile back, to read the same members forever.
            if entry.size < 0 or entry.offset_data <= before:
                raise tarfile.ReadError(f"the header at byte {entry.offset} is damaged")
            before = entry.offset_data
            if entry.isreg():
                yield entry
            tar.members = []  # type: ignore[attr-defined]  # else it remembers every entry
        # tarfile takes a cut or a damaged header between two files for the end, which is two
        # empty blocks.
        file.seek(tar.offset)
        blocks = file.read(2 * tarfile.BLOCKSIZE)
        if any(blocks):
            raise tarfile.ReadError(f"the header at byte {tar.offset} is damaged")
        if len(blocks) < 2 * tarfile.BLOCKSIZE:
            raise tarfile.ReadError(f"it is cut off at byte {tar.offset + len(blocks)}")


def _members(file: io.FileIO) -> Iterator[dict[str, Any]]:
    """The files of a shard as `group_by_keys` takes them; their data is their TarInfo."""
    if os.pread(file.fileno(), 2, 0) == b"\x1f\x8b":
        raise tarfile.ReadError("it is compressed; unpack it")
    for entry in tar_files(file):
        first = entry.name.split("/")[0]
        own = len(first) >= 4 and first.startswith("__") and first.endswith("__")  # __meta__
        if not own:
            yield {"fname": entry.name, "data": entry, "__url__": file.name}
    while rest := file.read(1 << 20):  # a second tar there would be lost silently
        if rest.strip(b"\0"):
            raise tarfile.ReadError("there is more after its end")


def _record(sample: dict[str, Any], file: io.FileIO, shard: str) -> Record:
    name = f"{shard}: sample {printable(sample['__key__'])}"
    suffix = next((suffix for suffix in IMAGE_KINDS if suffix in sample), None)
    if suffix is None or "cls" not in sample:
        raise UserError(f"{name} needs a .cls and an image ({', '.join(IMAGE_KINDS)})")
    image, label = sample[suffix], _label(file, sample["cls"], name)
    return Record(image.offset_data, image.size, label, 0, 0, 0, KINDS[IMAGE_KINDS[suffix]], 0)


def _label(file: io.FileIO, entry: tarfile.TarInfo, name: str) -> int:
    text = os.pread(file.fileno(), min(entry.size, _LONGEST_LABEL), entry.offset_data)
    try:
        label = int(text)
    except ValueError:
        wrong = f"its class is {text[:20]!r}, not a number"
        raise UserError(f"{name} cannot be decoded: {wrong}") from None
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
_FFCV_RAW = 1  # in FFCV's IMAGE_MODES


def require_ffcv(problem: str, way_out: str = "") -> None:
    """Refuse, and say how to install FFCV, where it cannot be imported."""
    try:
        import ffcv  # noqa: F401
    except ImportError:
        raise UserError(f"{problem} needs FFCV: {INSTALL}{way_out}") from None


def beton_records(path: Path) -> np.ndarray:
    """A RECORD for each sample of an FFCV file, in its order, by FFCV's own reader."""
    require_ffcv(
        f"{path}: has no index and reading it",
        f"; or write its index where FFCV is installed: python -m data_prep.ffcv --index {path}",
    )
    from ffcv.fields import IntField, RGBImageField
    from ffcv.reader import Reader

    try:
        reader, size = Reader(str(path)), os.stat(path).st_size
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from None
    except Exception as error:  # FFCV believes what it reads: damage shows as any kind of error
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise UserError(f"{path}: is no FFCV file that can be read: {reason}") from None
    end, page = int(reader.header["alloc_table_ptr"]), int(reader.page_size)
    if not 0 < end < size or page == 0 or end % page:  # its table follows full pages
        raise UserError(f"{path}: is damaged: its last page is cut off")
    if not len(reader.metadata) or not len(reader.alloc_table):
        raise UserError(f"{path}: is damaged or holds no samples")
    kinds = [type(handler) for handler in reader.handlers.values()]
    if len(kinds) != 2 or set(kinds) != {RGBImageField, IntField}:
        names = zip(reader.handlers, kinds, strict=True)
        fields = ", ".join(f"{name} ({kind.__name__})" for name, kind in names)
        raise UserError(
            f"{path}: has the fields {fields}; training reads files with one RGBImageField, one "
            "IntField for the label, and nothing else"
        )
    # Columns are called f0, f1, … in the order of the fields.
    image, labels = (reader.metadata[f"f{kinds.index(kind)}"] for kind in (RGBImageField, IntField))
    # The bytes of each image, by FFCV's table of all that it allocated.
    table = np.sort(reader.alloc_table, order="ptr")
    rows = np.minimum(np.searchsorted(table["ptr"], image["data_ptr"]), len(table) - 1)
    sizes = table["size"][rows]
    inside = image["data_ptr"].astype(float) + sizes <= end  # a sum of unsigned numbers may wrap
    known = (table["ptr"][rows] == image["data_ptr"]) & (sizes < 2**32)
    sound = known & inside & (labels == labels.astype("<i4"))
    if not sound.all():
        first = int(np.argmin(sound))
        raise UserError(f"{path}: is damaged at sample {first}, or its class is beyond 32 bits")
    records = np.zeros(len(image), dtype=RECORD)
    records["offset"], records["size"], records["label"] = image["data_ptr"], sizes, labels
    records["height"], records["width"], records["channels"] = image["height"], image["width"], 3
    records["kind"] = np.where(image["mode"] == _FFCV_RAW, KINDS["raw"], KINDS["jpeg"])
    return records
