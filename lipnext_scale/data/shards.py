"""Which shards a pattern means.

Local paths, `builtin:` (those of the package), anything fsspec opens (s3://, https://, memory://)
and webdataset's `pipe:command`. Braces are expanded everywhere, wildcards where files can be
listed.
"""

import os
import re
from glob import glob, has_magic
from pathlib import Path

import fsspec
from braceexpand import braceexpand

from lipnext_scale.config import ConfigError

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
    return [shard for _, found in resolve_parts(pattern, key) for shard in found]


def resolve_parts(pattern: str, key: str) -> list[tuple[str, list[str]]]:
    """The parts that braces make of a pattern, each with the shards that it means."""
    try:
        parts = list(braceexpand(_expanded(pattern)))
    except ValueError as error:
        raise ConfigError(key, pattern, f"is not a pattern: {error}") from None
    resolved = []
    for part in parts:
        found = _matches(part, key, pattern)
        if not found:
            right = "a tar of images and .cls labels"
            if part and _is_directory(part):
                right = f"it is a directory; its shards are {part.rstrip('/')}/train-*.tar, say"
            raise ConfigError(key, pattern, f"no shard {part!r} ({right})")
        resolved.append((part, found))
    return resolved


def _expanded(pattern: str) -> str:
    if is_builtin(pattern):
        return str(BUILTIN / pattern.removeprefix(_BUILTIN))
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
