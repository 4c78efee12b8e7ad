"""A set of shards opened: every sample's record, shard and name, without reading the images."""

import gzip
import hashlib
import os
import weakref
import zlib
from bisect import bisect_right
from collections.abc import Set
from dataclasses import dataclass
from fnmatch import fnmatch
from itertools import accumulate
from pathlib import Path

import numpy as np

from lipnext_scale.config import ConfigError
from lipnext_scale.data.beton import beton_records
from lipnext_scale.data.index import Record, index_paths, map_records, read_index, set_name
from lipnext_scale.data.shards import is_remote, resolve_shards, stage, wildcards
from lipnext_scale.data.tar_scan import scan_tar
from lipnext_scale.errors import UserError
from lipnext_scale.files import file_sha256

_MEMORY = "/proc/self/fd/"
_SAMPLED = 256  # contents that the fingerprint of shards without an index looks at


@dataclass(frozen=True)
class Shard:
    """name: as the user knows it. path: what is opened. sha256: as its index says."""

    name: str
    path: str
    records: np.ndarray
    bytes: int
    sha256: str | None = None

    @property
    def in_memory(self) -> bool:
        return self.path.startswith(_MEMORY)


class Catalog:
    """Samples are numbered through all shards; `key` and `pattern` name the set in messages."""

    def __init__(self, key: str, pattern: str, shards: list[Shard]) -> None:
        self.key, self.pattern, self.shards = key, pattern, shards
        self.starts = list(accumulate((len(shard.records) for shard in shards), initial=0))
        unpacked = [int(s.path.removeprefix(_MEMORY)) for s in shards if s.in_memory]
        weakref.finalize(self, _close_all, unpacked)
        if not len(self):
            raise ConfigError(key, pattern, "the shards hold no samples")

    def __len__(self) -> int:
        return self.starts[-1]

    @property
    def image_bytes(self) -> int:
        return sum(int(shard.records["size"].sum()) for shard in self.shards)

    def locate(self, sample: int) -> tuple[Shard, Record]:
        number = bisect_right(self.starts, sample) - 1
        shard = self.shards[number]
        return shard, Record(*shard.records[sample - self.starts[number]].item())

    def number_in_shard(self, sample: int) -> int:
        return sample - self.starts[bisect_right(self.starts, sample) - 1]

    def label_range(self) -> tuple[int, int]:
        labels = [s.records["label"] for s in self.shards if len(s.records)]
        return min(int(x.min()) for x in labels), max(int(x.max()) for x in labels)

    def fingerprint(self) -> str:
        """What makes the set what it is: records, and of an indexed shard its sha256, of others a
        sample of their contents."""
        digest = hashlib.blake2b(digest_size=16)
        for shard in self.shards:
            digest.update(shard.records.view(np.uint8).data)
            if shard.sha256 is not None:
                digest.update(shard.sha256.encode())
            else:
                digest.update(_sampled_contents(shard))
        return digest.hexdigest()


def _close_all(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def open_catalog(
    pattern: str,
    key: str,
    cache: Path | None = None,
    memory_limit_gb: float = 8.0,
) -> Catalog:
    """Open the shards of a pattern; `key` is the configuration key that it comes from."""
    names = resolve_shards(pattern, key)
    indexed = _indexed_shards(names, wildcards(pattern), cache)
    room = int(memory_limit_gb * 1e9)
    shards = []
    for name in names:
        try:
            shard = indexed.get(name) or _open_alone(name, cache, room)
        except _TooLarge:
            right = f"takes more than data.memory_limit_gb = {memory_limit_gb:g}"
            right = f"{right}: compressed shards are kept unpacked"
            raise ConfigError(key, pattern, right) from None
        except OSError as error:
            raise UserError(f"{name}: cannot be read: {error.strerror}") from None
        room -= shard.bytes if shard.in_memory else 0
        shards.append(shard)
    return Catalog(key, pattern, shards)


class _TooLarge(Exception):
    """A compressed shard has no room in memory."""


def _indexed_shards(names: list[str], patterns: list[str], cache: Path | None) -> dict[str, Shard]:
    """The shards that have an index beside them; what a wildcard would find must all be there."""
    found: dict[str, Shard] = {}
    by_set: dict[tuple[str, str], list[str]] = {}
    for name in names:
        if not name.startswith("pipe:") and not name.endswith(".gz"):
            by_set.setdefault((os.path.dirname(name), set_name(name)), []).append(name)
    for (directory, name), members in by_set.items():
        if is_remote(members[0]):
            found.update(_staged_set(directory, name, members, cache, patterns))
        else:
            found.update(_local_set(directory, name, members, patterns))
    return found


def _local_set(
    directory: str, name: str, members: list[str], patterns: list[str]
) -> dict[str, Shard]:
    json_path, npy_path = index_paths(Path(directory), name)
    if not json_path.exists():
        return {}
    wanted = {Path(member).name: (member, member) for member in members}
    _require_all(json_path, directory, wanted.keys(), patterns)
    return _shards_of_index(json_path, npy_path, wanted)


def _require_all(json_path: Path, directory: str, found: Set[str], patterns: list[str]) -> None:
    """Shards that the index lists and a wildcard means, but that are not there, are missing."""
    for entry in read_index(json_path).shards:
        name = os.path.join(directory, entry.file)
        if entry.file not in found and any(fnmatch(name, pattern) for pattern in patterns):
            raise UserError(f"{name}: is missing; {json_path.name} lists it")


def _staged_set(
    directory: str, name: str, members: list[str], cache: Path | None, patterns: list[str]
) -> dict[str, Shard]:
    """Index and shards of a remote set, copied into the cache."""
    json_name, npy_name = (path.name for path in index_paths(Path(), name))
    json_path = stage(f"{directory}/{json_name}", cache, optional=True)
    if json_path is None:
        return {}
    index = read_index(json_path)
    npy_path = stage(f"{directory}/{npy_name}", cache, index.records)
    assert npy_path is not None
    digests = {entry.file: entry.sha256 for entry in index.shards}
    local = {}
    for member in members:
        file = member.rpartition("/")[2]
        local[file] = (member, str(stage(member, cache, digests.get(file))))
    _require_all(json_path, directory, local.keys(), patterns)
    return _shards_of_index(json_path, npy_path, local)


def _shards_of_index(
    json_path: Path, npy_path: Path, wanted: dict[str, tuple[str, str]]
) -> dict[str, Shard]:
    """wanted: file → (name, path). The files must be there with the index's sizes."""
    index = read_index(json_path)
    records = map_records(npy_path, index.samples)
    if file_sha256(npy_path) != index.records:
        raise UserError(
            f"{npy_path}: is not the file that {json_path.name} was written with; "
            "python -m data_prep.index --force writes both anew"
        )
    unknown = wanted.keys() - {entry.file for entry in index.shards}
    if unknown:
        raise UserError(f"{json_path}: does not know {min(unknown)}, which lies beside it")
    shards, first = {}, 0
    for entry in index.shards:
        if entry.file in wanted:
            name, path = wanted[entry.file]
            size = os.stat(path).st_size
            if size != entry.bytes:
                raise UserError(f"{name}: has {size} bytes, its index says {entry.bytes}")
            own = records[first : first + entry.samples]
            shards[name] = Shard(name, path, own, size, entry.sha256)
        first += entry.samples
    return shards


def _open_alone(name: str, cache: Path | None, room: int) -> Shard:
    """A shard without an index: its headers are read."""
    path = str(stage(name, cache)) if is_remote(name) else name
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
            while chunk := packed.read(1 << 20):
                unpacked.write(chunk)
                if unpacked.tell() > room:
                    raise _TooLarge
    except _TooLarge:
        os.close(descriptor)
        raise
    except (OSError, EOFError, zlib.error) as error:
        os.close(descriptor)
        raise UserError(f"{name}: is not a readable shard: {error}") from None
    return f"{_MEMORY}{descriptor}"


def _sampled_contents(shard: Shard) -> bytes:
    """A digest of evenly spaced images of a shard."""
    digest = hashlib.blake2b(digest_size=16)
    step = max(1, len(shard.records) // _SAMPLED)
    with open(shard.path, "rb") as file:
        for record in shard.records[::step]:
            digest.update(os.pread(file.fileno(), int(record["size"]), int(record["offset"])))
    return digest.digest()
