"""Which shards a pattern means, and bringing remote ones onto this machine.

Local paths, `builtin:` (those of the package), anything fsspec opens (s3://, https://, memory://)
and webdataset's `pipe:command`. Braces are expanded everywhere, wildcards where files can be
listed. Remote shards are staged: copied once into `data.cache_dir`, checked, and read from there,
because training reads samples in an order of its own.
"""

import fcntl
import hashlib
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from glob import glob, has_magic
from pathlib import Path
from typing import Any, BinaryIO

import fsspec
import webdataset
from braceexpand import braceexpand

from lipnext_scale.config import ConfigError
from lipnext_scale.errors import UserError
from lipnext_scale.files import PARTIAL

BUILTIN = Path(__file__).parent / "builtin"
_URL = re.compile(r"^([a-z][a-z0-9+.-]*::?//|[a-z0-9]+::|pipe:)")
_CHUNK = 1 << 20


def is_remote(shard: str) -> bool:
    return bool(_URL.match(shard))


def resolve_shards(pattern: str, key: str) -> list[str]:
    """The shards a pattern means; `key` is the configuration key to blame if there are none."""
    try:
        parts = list(braceexpand(_expanded(pattern)))
    except ValueError as error:
        raise ConfigError(key, pattern, f"is not a pattern: {error}") from None
    shards: list[str] = []
    for part in parts:
        found = _matches(part, key, pattern)
        if not found:
            right = "a tar of images and .cls labels"
            if part and _is_directory(part):
                right = f"it is a directory; its shards are {part.rstrip('/')}/train-*.tar, say"
            raise ConfigError(key, pattern, f"no shard {part!r} ({right})")
        shards += found
    return shards


def _expanded(pattern: str) -> str:
    if pattern.startswith("builtin:"):
        return str(BUILTIN / pattern.removeprefix("builtin:"))
    return pattern


def _matches(part: str, key: str, pattern: str) -> list[str]:
    """The files one part without braces means; none if one of them is not there."""
    if part.startswith("pipe:"):
        return [part]
    if is_remote(part):
        return _remote_matches(part, key, pattern)
    found = sorted(glob(part)) if has_magic(part) else [part]
    return found if all(_is_file(path) for path in found) else []


def _remote_matches(url: str, key: str, pattern: str) -> list[str]:
    try:
        system, path = fsspec.core.url_to_fs(url)
        if has_magic(path):
            return sorted(system.unstrip_protocol(found) for found in system.glob(path))
        return [url] if system.exists(path) else []
    except Exception as error:  # each protocol has its own: missing packages, hosts, credentials
        raise ConfigError(key, pattern, f"cannot be opened: {error}") from None


def _is_file(path: str) -> bool:
    try:
        return Path(path).is_file()
    except OSError:  # a name that is too long, say
        return False


def _is_directory(path: str) -> bool:
    try:
        return Path(path).is_dir()
    except OSError:
        return False


def default_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lipnext_scale"


def staged_path(shard: str, cache: Path) -> Path:
    """Where a remote shard is kept: its directory's hash keeps sets of one name apart."""
    if shard.startswith("pipe:"):
        return cache / f"pipe-{hashlib.sha256(shard.encode()).hexdigest()[:16]}.tar"
    directory, _, file = shard.rpartition("/")
    return cache / hashlib.sha256(directory.encode()).hexdigest()[:16] / file


def wildcards(pattern: str) -> list[str]:
    """The parts of a pattern that mean whatever is there."""
    return [part for part in braceexpand(_expanded(pattern)) if has_magic(part)]


def stage(
    shard: str, cache: Path | None, sha256: str | None = None, optional: bool = False
) -> Path | None:
    """Copy a remote file into the cache, once for all processes of the node.

    cache: the user's own if None. sha256: what the copy must have. optional: None where the file
    does not exist.
    """
    path = staged_path(shard, cache or default_cache())
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        where = f"data.cache_dir = {str(path.parent.parent)!r}"
        raise UserError(f"{where}: cannot be written: {error.strerror}") from None
    try:
        with _locked(path):
            if not path.exists():
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


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.with_name(f"{path.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _copy(shard: str, path: Path, sha256: str | None) -> None:
    aside, digest = path.with_name(path.name + PARTIAL), hashlib.sha256()
    with _open_remote(shard) as source, aside.open("wb") as copy:
        while chunk := source.read(_CHUNK):
            digest.update(chunk)
            copy.write(chunk)
        copy.flush()
        os.fsync(copy.fileno())
    if sha256 is not None and digest.hexdigest() != sha256:
        aside.unlink()
        raise UserError(
            f"{shard}: its sha256 is not that of its index: the shard is damaged, or the copy of "
            f"the index in {path.parent} is old: then remove that directory"
        )
    aside.replace(path)


def _open_remote(shard: str) -> Any | BinaryIO:
    if shard.startswith("pipe:"):
        return webdataset.gopen(shard, "rb")  # raises where the command fails
    return fsspec.open(shard, "rb").open()
