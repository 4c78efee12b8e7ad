"""Bringing shards onto this machine before they are read.

Remote shards are copied once into `data.cache_dir`, compared with their index if they have one, and
read from there, because training reads samples in an order of its own. With `data.stage_dir` those
of a shared file system are too, as file:// URLs.

One process of a node copies a file, the others wait for its lock. A directory may be shared by
nodes that do not see each other's locks: then each writes a file of its own aside, and the last to
be renamed stays.
"""

import fcntl
import hashlib
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import fsspec
import webdataset

from lipnext_scale.data.shards import FILE
from lipnext_scale.errors import UserError
from lipnext_scale.files import PARTIAL, atomic_file

_CHUNK = 1 << 20
# Copies at a time: one stream seldom fills a network file system.
_STREAMS = 4
# Seconds after which a copy that another node began and does not write to will never be finished.
_ABANDONED = 3600


def default_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lipnext_scale"


@dataclass(frozen=True)
class Cache:
    """Where copies are kept, and the configuration key that says so."""

    directory: Path
    key: str = "data.cache_dir"


def staged_path(shard: str, cache: Cache) -> Path:
    """Where a remote shard is kept: its directory's hash keeps sets of one name apart."""
    if shard.startswith("pipe:"):
        return cache.directory / f"pipe-{hashlib.sha256(shard.encode()).hexdigest()[:16]}.tar"
    directory, _, file = shard.rpartition("/")
    return cache.directory / hashlib.sha256(directory.encode()).hexdigest()[:16] / file


def stage(
    shard: str, cache: Cache, sha256: str | None = None, optional: bool = False
) -> Path | None:
    """Copy a remote file into the cache, once for all processes of the node.

    sha256: what the copy must have. optional: None where the file does not exist.
    """
    path = staged_path(shard, cache)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        where = f"{cache.key} = {str(cache.directory)!r}"
        raise UserError(f"{where}: cannot be written: {error.strerror}") from None
    try:
        with _locked(path):
            if not path.exists() or _is_outdated(shard, path):
                _copy(shard, path, sha256)
    except FileNotFoundError:
        if optional:
            return None
        raise UserError(f"{shard}: no such file") from None
    except UserError:
        raise
    except Exception as error:  # each protocol has its own
        raise UserError(f"{shard}: cannot be copied to {path.parent}: {error}") from None
    return path


def stage_all(shards: list[str], cache: Cache, digests: list[str | None]) -> list[Path]:
    """Several at a time; digests: the sha256 that each must have, if known."""
    for directory in {staged_path(shard, cache).parent for shard in shards}:
        _remove_abandoned(directory)

    def copied(shard: str, sha256: str | None) -> Path:
        path = stage(shard, cache, sha256)
        assert path is not None, "it is not optional"
        return path

    with ThreadPoolExecutor(_STREAMS) as pool:
        return list(pool.map(copied, shards, digests))


def is_staged(shard: str, cache: Cache) -> bool:
    """Whether a copy is there that would not be made again."""
    path = staged_path(shard, cache)
    return path.exists() and not _is_outdated(shard, path)


def size_of(shard: str) -> int | None:
    """The bytes of a remote shard; None where nobody tells: a pipe, some servers."""
    if shard.startswith("pipe:"):
        return None
    try:
        system, path = fsspec.core.url_to_fs(shard)
        size = system.size(path)
    except Exception:  # each protocol has its own
        return None
    return None if size is None else int(size)


def _remove_abandoned(directory: Path) -> None:
    """What nodes that were killed left half done; our own node writes over its part."""
    with suppress(OSError):
        for path in directory.glob(f"*{PARTIAL}"):
            if path.stat().st_mtime < time.time() - _ABANDONED:
                path.unlink()


def _is_outdated(shard: str, copy: Path) -> bool:
    """Whether a file has changed since it was copied; of what is far away nobody knows."""
    if not shard.startswith(FILE):
        return False
    now, then = os.stat(shard.removeprefix(FILE)), copy.stat()
    return now.st_size != then.st_size or not _is_time_of(now.st_mtime_ns, then.st_mtime_ns)


def _is_time_of(source: int, copy: int) -> bool:
    """Whether a copy's time was set to its source's; some file systems keep whole seconds only."""
    return any(copy == source // unit * unit for unit in (1, 100, 10**3, 10**6, 10**9))


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.with_name(f"{path.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _copy(shard: str, path: Path, sha256: str | None) -> None:
    digest = hashlib.sha256()
    there = os.stat(shard.removeprefix(FILE)) if shard.startswith(FILE) else None
    with atomic_file(path, os.uname().nodename) as copy, _open_remote(shard) as source:
        while chunk := source.read(_CHUNK):
            digest.update(chunk)
            copy.write(chunk)
        if sha256 is not None and digest.hexdigest() != sha256:
            raise UserError(
                f"{shard}: its sha256 is not that of its index: the shard is damaged, or the copy "
                f"of the index in {path.parent} is old: then remove that directory"
            )
    if there is not None:  # by which a change is noticed
        os.utime(path, ns=(there.st_atime_ns, there.st_mtime_ns))


def _open_remote(shard: str) -> Any | BinaryIO:
    if shard.startswith("pipe:"):
        return webdataset.gopen(shard, "rb")  # raises where the command fails
    return fsspec.open(shard, "rb").open()
