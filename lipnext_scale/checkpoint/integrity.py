"""SHA256SUMS: what every file of a checkpoint holds, as `sha256sum -c` reads it, and sealed.

The last line is the sum of the lines above it, so that damage to SHA256SUMS itself is found too.
"""

import hashlib
import os
from pathlib import Path

from lipnext_scale.agreement import Group, everywhere, first_alone, rank_in, size_of
from lipnext_scale.errors import UserError

SUMS = "SHA256SUMS"
_BLOCK = 4 << 20


class Damaged(UserError):
    """The checkpoint is not what was written, whoever reads it and when."""


def verify_checkpoint(path: Path, group: Group = None) -> None:
    """Raise a Damaged that names the first damaged, missing or superfluous file.

    One that cannot be read, perhaps only now or only by us, is another UserError.
    """
    digests = first_alone(group, lambda: listed_files(path))
    mine = sorted(digests)[rank_in(group) :: size_of(group)]
    everywhere(group, lambda: _require_intact(path, {name: digests[name] for name in mine}))


def listed_files(path: Path) -> dict[str, str]:
    """name → digest of the checkpoint's files, which are exactly those in its directory."""
    digests = read_sums(path / SUMS)
    try:
        present = {entry.name for entry in path.iterdir()} - {SUMS}
    except OSError as error:
        raise _unreadable(path, error) from None
    for name in sorted(digests.keys() - present):
        raise Damaged(f"{path / name}: is missing from the checkpoint")
    for name in sorted(present - digests.keys()):
        raise Damaged(f"{path / name}: does not belong to the checkpoint: {SUMS} has no such file")
    return digests


def sums_of(digests: dict[str, str]) -> bytes:
    """The content of SHA256SUMS."""
    lines = "".join(f"{digest}  {name}\n" for name, digest in sorted(digests.items())).encode()
    return lines + _seal(lines)


def read_sums(file: Path) -> dict[str, str]:
    """name → digest. Not one byte of the file may differ from what was written."""
    try:
        content = file.read_bytes()
    except OSError as error:
        raise _unreadable(file, error) from None
    lines = content[: content.rstrip(b"\n").rfind(b"\n") + 1]
    if content != lines + _seal(lines):
        raise Damaged(f"{file}: is damaged: its last line is not the sum of the others")
    pairs = (line.split("  ", 1) for line in lines.decode().splitlines())
    return {name: digest for digest, name in pairs}


def digest_on_disk(file: Path) -> str:
    """The SHA-256 of a file, read from the disk where the system lets us ask for that."""
    digest, block = hashlib.sha256(), memoryview(bytearray(_BLOCK))
    with file.open("rb", buffering=0) as stream:
        if hasattr(os, "posix_fadvise"):  # else it might come from memory, where it is right
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        while count := stream.readinto(block):
            digest.update(block[:count])
    return digest.hexdigest()


def _require_intact(path: Path, digests: dict[str, str]) -> None:
    for name, digest in digests.items():
        try:
            found = digest_on_disk(path / name)
        except OSError as error:
            raise _unreadable(path / name, error) from None
        if found != digest:
            raise Damaged(f"{path / name}: is damaged: its checksum is not the one in {SUMS}")


def _unreadable(path: Path, error: OSError) -> UserError:
    """What is not there, or no file, will not be one at another time either."""
    lasting = isinstance(error, FileNotFoundError | IsADirectoryError | NotADirectoryError)
    kind = Damaged if lasting else UserError
    return kind(f"{path}: cannot be read: {error.strerror}")


def _seal(lines: bytes) -> bytes:
    return f"# sha256 of the lines above: {hashlib.sha256(lines).hexdigest()}\n".encode()
