"""A set of shards opened: every sample's record, shard and name, without reading the images."""

import fcntl
import gzip
import hashlib
import os
import re
import weakref
import zlib
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cached_property
from glob import escape, glob, has_magic
from itertools import accumulate, repeat
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import webdataset
from braceexpand import braceexpand

from lipnext_scale.data.index import (
    Record,
    beton_records,
    index_paths,
    map_records,
    read_index,
    scan_tar,
    set_name,
)
from lipnext_scale.utils.config import ConfigError
from lipnext_scale.utils.errors import UserError
from lipnext_scale.utils.files import atomic_file, file_sha256, file_stamp

# --------------------------------------------------------------------------------------------------
# Which shards a pattern means.
#
# Local paths, `builtin:` (those of the package), anything fsspec opens (s3://, https://,
# memory://) and webdataset's `pipe:command`. Braces are expanded everywhere, wildcards where
# files can be listed.

BUILTIN = Path(__file__).parent / "builtin"
_URL = re.compile(r"^([a-z][a-z0-9+.-]*::?//|[a-z0-9]+::|pipe:)")
_BUILTIN = "builtin:"
FILE = "file://"


def is_remote(shard: str) -> bool:
    return bool(_URL.match(shard))


def is_builtin(pattern: str) -> bool:
    return pattern.startswith(_BUILTIN)


def as_url(shard: str) -> str:
    """A local path as what fsspec opens; a remote shard as it is."""
    return shard if is_remote(shard) else FILE + os.path.abspath(shard)


def resolve_shards(pattern: str, key: str) -> list[str]:
    """The shards a pattern means; `key` is the configuration key to blame if there are none."""
    return [shard for _, found in _resolve_parts(pattern, key) for shard in found]


def _resolve_parts(pattern: str, key: str) -> list[tuple[str, list[str]]]:
    """The parts that braces make of a pattern, each with the shards that it means."""
    full = pattern
    if is_builtin(pattern):
        full = str(BUILTIN / pattern.removeprefix(_BUILTIN))
    try:
        parts = list(braceexpand(full))
    except ValueError as error:
        raise ConfigError(key, pattern, f"is not a pattern: {error}") from None
    resolved = []
    for part in parts:
        try:
            found = _matches(part)
        except (
            Exception
        ) as error:  # each protocol has its own: missing packages, hosts, credentials
            raise ConfigError(key, pattern, f"cannot be opened: {error}") from None
        if not found:
            raise ConfigError(key, pattern, f"no shard {part!r} ({_instead(part)})")
        resolved.append((part, found))
    return resolved


def _instead(part: str) -> str:
    """What would be right in place of a part that means no shard."""
    inside = [path for depth in ("*", "*/*") for path in glob(os.path.join(escape(part), depth))]
    shards = {re.sub(r"-\d+\.tar", "-*.tar", p) for p in inside if p.endswith((".tar", ".gz"))}
    if shards:
        return f"a directory of shards: say {' or '.join(map(repr, sorted(shards)[:3]))}"
    if any(map(os.path.isdir, inside)):
        return f"for class folders: python -m data_prep.folders {part} --out DIR converts them"
    return "a tar of images and .cls labels; python -m data_prep.NAME makes them, see docs/data.md"


def _matches(part: str) -> list[str]:
    """The files one part without braces means; none if one of them is not there."""
    if part.startswith("pipe:"):
        return [part]
    if not is_remote(part):
        found = sorted(glob(part)) if has_magic(part) else [part]
        return found if all(os.path.isfile(path) for path in found) else []
    system, path = fsspec.core.url_to_fs(part)
    if has_magic(path):
        return sorted(system.unstrip_protocol(found) for found in system.glob(path))
    return [part] if system.exists(path) else []


# --------------------------------------------------------------------------------------------------
# Bringing shards onto this machine before they are read.
#
# Remote shards are copied once into `data.cache_dir`, compared with their index if they have one,
# and read from there, because training reads samples in an order of its own. With
# `data.stage_dir` those of a shared file system are too, as file:// URLs.
#
# One process of a node copies a file, the others wait for its lock. Nodes that share a directory
# may not see each other's locks: each writes a file of its own aside and renames it.

_CHUNK = 1 << 20
_STREAMS = 4  # copies at a time: one stream seldom fills a network file system


def default_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lipnext_scale"


def staged_path(shard: str, cache: Path) -> Path:
    """Where a remote shard is kept: its directory's hash keeps sets of one name apart."""
    if shard.startswith("pipe:"):
        return cache / f"pipe-{hashlib.sha256(shard.encode()).hexdigest()[:16]}.tar"
    directory, _, file = shard.rpartition("/")
    return cache / hashlib.sha256(directory.encode()).hexdigest()[:16] / file


def stage(shard: str, cache: Path, sha256: str | None = None) -> Path:
    """Copy a remote file into the cache, once for all processes of the node; sha256: what it must
    have."""
    path = staged_path(shard, cache)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.with_name(f"{path.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not is_staged(shard, cache):
                _copy(shard, path, sha256)
    except UserError:
        raise
    except Exception as error:  # each protocol has its own
        raise UserError(f"{shard}: cannot be copied to {path.parent}: {error}") from None
    return path


def stage_all(shards: list[str], cache: Path, digests: list[str | None]) -> list[Path]:
    """Several at a time; digests: the sha256 that each must have, if known."""
    with ThreadPoolExecutor(_STREAMS) as pool:
        return list(pool.map(stage, shards, repeat(cache), digests))


def is_staged(shard: str, cache: Path) -> bool:
    """Whether a copy is there. Only of file:// shards it is known whether they changed since."""
    path = staged_path(shard, cache)
    if not path.exists() or not shard.startswith(FILE):
        return path.exists()
    now, then = os.stat(shard.removeprefix(FILE)), path.stat()
    seconds = now.st_mtime_ns // 10**9 * 10**9  # all that some file systems keep of a time
    return now.st_size == then.st_size and then.st_mtime_ns in (now.st_mtime_ns, seconds)


def _copy(shard: str, path: Path, sha256: str | None) -> None:
    digest = hashlib.sha256()
    source_time = os.stat(shard.removeprefix(FILE)).st_mtime_ns if shard.startswith(FILE) else None
    with atomic_file(path, os.uname().nodename) as copy, _open_remote(shard) as source:
        while chunk := source.read(_CHUNK):
            digest.update(chunk)
            copy.write(chunk)
        if sha256 is not None and digest.hexdigest() != sha256:
            raise UserError(
                f"{shard}: its sha256 is not that of its index: the shard is damaged, or the copy "
                f"of the index in {path.parent} is old: then remove that directory"
            )
    if source_time is not None:  # by which a change is noticed
        os.utime(path, ns=(source_time, source_time))


def _open_remote(shard: str) -> Any:
    if shard.startswith("pipe:"):
        return webdataset.gopen(shard, "rb")  # raises where the command fails
    return fsspec.open(shard, "rb").open()


# --------------------------------------------------------------------------------------------------
# Opened shards.

_MEMORY = "/proc/self/fd/"
_SAMPLED = 256  # images of a set that the fingerprint of shards without an index looks at


@dataclass(frozen=True)
class Shard:
    """name: as the user knows it. path: what is opened. The rest is empty without an index:

    sha256: of the shard. recorded: identifies its records, by the index and their place in it.
    index_stamp: identifies the intact file of its records. classes: the names of its labels.
    """

    name: str
    path: str
    records: np.ndarray
    bytes: int
    sha256: str | None = None
    recorded: str = ""
    index_stamp: str = ""
    classes: tuple[str, ...] = ()


class Catalog:
    """Samples are numbered through all shards; `key` and `pattern` name the set in messages."""

    def __init__(self, key: str, pattern: str, shards: list[Shard]) -> None:
        self.key, self.pattern, self.shards = key, pattern, shards
        self.starts = list(accumulate((len(shard.records) for shard in shards), initial=0))
        for shard in shards:
            if shard.path.startswith(_MEMORY):
                weakref.finalize(self, os.close, int(shard.path.removeprefix(_MEMORY)))
        if not len(self):
            raise ConfigError(key, pattern, "the shards hold no samples")

    def __len__(self) -> int:
        return self.starts[-1]

    @property
    def image_bytes(self) -> int:
        return sum(int(shard.records["size"].sum()) for shard in self.shards)

    def place_of(self, sample: int) -> tuple[Shard, int]:
        """The shard of a sample, and its number there."""
        number = bisect_right(self.starts, sample) - 1
        return self.shards[number], sample - self.starts[number]

    def locate(self, sample: int) -> tuple[Shard, Record]:
        shard, number = self.place_of(sample)
        return shard, Record(*shard.records[number].item())

    def label_range(self) -> tuple[int, int]:
        labels = [s.records["label"] for s in self.shards if len(s.records)]
        return min(int(x.min()) for x in labels), max(int(x.max()) for x in labels)

    @property
    def class_names(self) -> set[tuple[str, ...]]:
        """As the indexes have them; numbers that repeat the label are no names."""
        found = {id(shard.classes): shard.classes for shard in self.shards}  # few, and long
        return {
            names for names in found.values() if any(str(i) != name for i, name in enumerate(names))
        }

    @property
    def index_stamps(self) -> set[str]:
        """Of the intact files of records, for `known` of `open_catalog`."""
        return {shard.index_stamp for shard in self.shards if shard.index_stamp}

    def fingerprint(self) -> str:
        """What makes the set what it is: of an indexed shard its sha256 and that of its records, of
        others the records and a sample of their contents."""
        return self._fingerprint

    @cached_property
    def _fingerprint(self) -> str:
        digest = hashlib.blake2b(digest_size=16)
        alone = sum(shard.sha256 is None for shard in self.shards)
        for shard in self.shards:
            if shard.sha256 is not None:
                # Not the records themselves: of many millions that would take seconds.
                digest.update(f"{shard.recorded} {shard.sha256}".encode())
            else:
                digest.update(shard.records.view(np.uint8).data)
                digest.update(_sampled_contents(shard, max(1, _SAMPLED // alone)))
        return digest.hexdigest()


def open_catalog(
    pattern: str,
    key: str,
    cache: Path | None = None,
    memory_limit_gb: float = 8.0,
    copy_local: bool = False,
    known: Set[str] = frozenset(),
) -> Catalog:
    """Open the shards of a pattern; `key` is the configuration key that it comes from.

    cache: where copies are kept, the user's own if None. copy_local: data.stage_dir: shards of this
    machine's file systems are copied there like remote ones. known: stamps of files that are known
    to be intact and are not hashed again.
    """
    parts = _resolve_parts(pattern, key)
    if copy_local and not is_builtin(pattern):
        parts = [(part, [as_url(name) for name in found]) for part, found in parts]
    names = [name for _, found in parts for name in found]
    cache = cache or default_cache()
    if any(map(is_remote, names)):
        try:
            cache.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            where = "data.stage_dir" if copy_local else "data.cache_dir"
            raise UserError(f"{where} = '{cache}': cannot be written: {error.strerror}") from None
    indexed = _indexed_shards(parts, cache, known)
    alone = [name for name in names if name not in indexed and is_remote(name)]
    paths = dict(zip(alone, stage_all(alone, cache, [None] * len(alone)), strict=True))
    room = int(memory_limit_gb * 1e9)
    shards = []
    for name in names:
        try:
            shard = indexed.get(name) or _open_alone(name, str(paths.get(name, name)), room)
        except MemoryError:
            right = f"takes more than data.memory_limit_gb = {memory_limit_gb:g}"
            right = f"{right}: compressed shards are kept unpacked"
            raise ConfigError(key, pattern, right) from None
        except OSError as error:
            raise UserError(f"{name}: cannot be read: {error.strerror}") from None
        room -= shard.bytes if shard.path.startswith(_MEMORY) else 0
        shards.append(shard)
    return Catalog(key, pattern, shards)


def _indexed_shards(
    parts: list[tuple[str, list[str]]], cache: Path, known: Set[str]
) -> dict[str, Shard]:
    """The shards that have an index beside them."""
    by_set: dict[tuple[str, str], list[str]] = {}
    # By directory, the files that a pattern which found something there means. (The pattern may be
    # spelled otherwise than what it finds: //, memory:///.)
    sought: dict[str, set[str]] = {}
    for part, names in parts:
        for name in names:
            if not name.startswith("pipe:") and not name.endswith(".gz"):
                directory = os.path.dirname(name)
                by_set.setdefault((directory, set_name(name)), []).append(name)
                sought.setdefault(directory, set()).add(part.rpartition("/")[2])
    found: dict[str, Shard] = {}
    for (directory, name), members in by_set.items():
        found.update(_open_set(directory, name, members, sought[directory], cache, known))
    return found


def _open_set(
    directory: str,
    name: str,
    members: list[str],
    sought: Set[str],
    cache: Path,
    known: Set[str],
) -> Iterator[tuple[str, Shard]]:
    """(name, shard) of the members, nothing without an index. A remote set is copied into the
    cache. Files and records must be those that the index was written with, and every shard of the
    index that matches `sought` must be there."""
    json_path, npy_path = index_paths(Path(directory), name)
    files, paths = [os.path.basename(member) for member in members], members
    if is_remote(directory):
        url = f"{directory}/{json_path.name}"
        system, path = fsspec.core.url_to_fs(url)
        if not system.exists(path):
            return
        json_path = stage(url, cache)
    elif not json_path.exists():
        return
    index = read_index(json_path)
    if is_remote(directory):
        (npy_path,) = stage_all([f"{directory}/{npy_path.name}"], cache, [index.records])
        digests = {entry.file: entry.sha256 for entry in index.shards}
        copies = stage_all(members, cache, [digests.get(file) for file in files])
        paths = [str(path) for path in copies]
    if unknown := set(files) - {entry.file for entry in index.shards}:
        raise UserError(f"{json_path}: does not know {min(unknown)}, which lies beside it")
    records = map_records(npy_path, index.samples)
    stamp, classes = file_stamp(npy_path, index.records), tuple(index.classes)
    if stamp not in known and file_sha256(npy_path) != index.records:
        raise UserError(
            f"{npy_path}: is not the file that {json_path.name} was written with; "
            "python -m data_prep.index --force writes both anew"
        )
    places, first = dict(zip(files, zip(members, paths, strict=True), strict=True)), 0
    for entry in index.shards:
        if entry.file in places:
            shard, path = places[entry.file]
            size = os.stat(path).st_size
            if size != entry.bytes:
                raise UserError(f"{shard}: has {size} bytes, its index says {entry.bytes}")
            own, recorded = records[first : first + entry.samples], f"{index.records} {first}"
            yield shard, Shard(shard, path, own, size, entry.sha256, recorded, stamp, classes)
        elif any(fnmatch(entry.file, pattern) for pattern in sought):
            missing = os.path.join(directory, entry.file)
            raise UserError(f"{missing}: is missing; {json_path.name} lists it")
        first += entry.samples


def _open_alone(name: str, path: str, room: int) -> Shard:
    """A shard without an index: its headers are read. MemoryError: unpacked it exceeds `room`."""
    if name.endswith(".beton"):
        return Shard(name, path, beton_records(Path(path)), os.stat(path).st_size)
    with open(path, "rb") as file:
        compressed = file.read(2) == b"\x1f\x8b"
    if compressed:
        path = _unpacked(name, path, room)
    records, size = scan_tar(path, name)
    return Shard(name, path, records, size)


def _unpacked(name: str, path: str, room: int) -> str:
    """A compressed tar, unpacked into memory that has a path while this process and its children
    live."""
    descriptor = os.memfd_create(Path(name).name)
    try:
        with gzip.open(path) as packed, open(descriptor, "wb", closefd=False) as unpacked:
            while chunk := packed.read(_CHUNK):
                unpacked.write(chunk)
                if unpacked.tell() > room:
                    raise MemoryError
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{name}: is not a readable shard: {error}") from None
    return f"{_MEMORY}{descriptor}"


def _sampled_contents(shard: Shard, images: int) -> bytes:
    """A digest of about so many evenly spaced images of a shard."""
    digest = hashlib.blake2b(digest_size=16)
    step = max(1, len(shard.records) // images)
    with open(shard.path, "rb") as file:
        for record in shard.records[::step]:
            digest.update(os.pread(file.fileno(), int(record["size"]), int(record["offset"])))
    return digest.digest()


# --------------------------------------------------------------------------------------------------
# Comparing shards with the sha256 of their index, before a run trains on them.


def stamp(shard: Shard) -> str:
    assert shard.sha256 is not None
    return file_stamp(shard.path, shard.sha256)


def unchecked_shards(catalogs: Iterable[Catalog], known: Set[str]) -> list[Shard]:
    """The shards with an index whose stamp is not among the known ones."""
    shards = [shard for catalog in catalogs for shard in catalog.shards]
    return [shard for shard in shards if shard.sha256 is not None and stamp(shard) not in known]


def check_shards(
    shards: list[Shard], advance: Callable[[int], None] = lambda _bytes: None
) -> list[str]:
    """Hash the shards; their stamps, or an error that names the first that is damaged."""
    stamps = []
    for shard in shards:
        before = stamp(shard)
        try:
            found = file_sha256(shard.path, advance)
        except OSError as error:
            raise UserError(f"{shard.name}: cannot be read: {error.strerror}") from None
        if found != shard.sha256:
            raise UserError(
                f"{shard.name}: its sha256 is not that of its index: the shard is damaged or was "
                "exchanged; python -m data_prep.verify shows more, data.verify=false trains anyway"
            )
        stamps.append(before)
    return stamps
