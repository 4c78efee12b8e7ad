"""The directory of a run's checkpoints: names, checksums, which is the newest, which of them stay.

Beside `step-000000100` there may be, for a moment or after a kill:

    step-000000100.partial    being written
    step-000000100.deleting   being removed
    step-000000100.damaged-1  found damaged, and kept for its owner to look at
"""

import hashlib
import itertools
import os
import re
import shutil
import sys
from functools import partial
from pathlib import Path

from lipnext_scale.utils.collectives import Group, everywhere, on_rank0, rank_in, size_of
from lipnext_scale.utils.errors import UserError
from lipnext_scale.utils.files import PARTIAL, file_sha256

DELETING, DAMAGED, LATEST = ".deleting", ".damaged", "latest"
_STEP = re.compile("step-([0-9]{9,})")


def checkpoint_name(step: int) -> str:
    return f"step-{step:09d}"


def latest_checkpoint(directory: Path) -> Path | None:
    """The newest complete checkpoint. One that was cut off has never got its name."""
    found = complete_checkpoints(directory)
    return found[max(found)] if found else None


def complete_checkpoints(directory: Path, suffix: str = "") -> dict[int, Path]:
    """step → directory; with a suffix, those that are not complete."""
    found = {}
    for path in directory.iterdir() if directory.is_dir() else ():
        match = _STEP.fullmatch(path.name.removesuffix(suffix))
        if match is None or path.is_symlink() or not path.is_dir():
            continue  # the user's own
        if path.name == checkpoint_name(int(match[1])) + suffix:
            found[int(match[1])] = path
    return found


def tidy(directory: Path) -> None:
    """Remove what a kill left behind."""
    for suffix in (PARTIAL, DELETING):
        for path in complete_checkpoints(directory, suffix).values():
            shutil.rmtree(path)


def commit(partial: Path, path: Path) -> None:
    """Rename the written checkpoint to its name; an older one of the same step goes before."""
    if path.exists():
        remove(path)
    partial.rename(path)
    sync_directory(path.parent)


def point_latest(directory: Path) -> None:
    """Make the link `latest` show the newest checkpoint. It is for people: no code reads it."""
    newest = latest_checkpoint(directory)
    assert newest is not None
    link, temporary = directory / LATEST, directory / (LATEST + PARTIAL)
    if link.is_dir() and not link.is_symlink():  # a run that was copied without its links
        link.rename(unused(directory / f"{LATEST}.copy"))
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(newest.name)
    temporary.replace(link)


def unused(path: Path) -> Path:
    """The path with the first free number behind it."""
    names = (path.with_name(f"{path.name}-{number}") for number in itertools.count(1))
    return next(path for path in names if not path.exists())


def retain(directory: Path, written: int, keep_last: int, keep_every: int) -> None:
    """Remove all but the newest, those of round steps, and the one just written."""
    found = complete_checkpoints(directory)
    newest = sorted(found)[-keep_last:]
    for step, path in sorted(found.items()):
        is_round = keep_every > 0 and step % keep_every == 0
        if step not in newest and step != written and not is_round:
            remove(path)


def remove(path: Path) -> None:
    """Rename first: a kill in between never leaves half a checkpoint under its own name."""
    deleting = path.with_name(path.name + DELETING)
    path.rename(deleting)
    shutil.rmtree(deleting)


def sync_directory(path: Path) -> None:
    """Put the names in a directory on the disk, as fsync does with a file's content."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# --------------------------------------------------------------------------------------------------
# SHA256SUMS: the digests of a checkpoint's files, in the format of `sha256sum -c`. The last line is
# the digest of the lines above it, so that damage to SHA256SUMS itself is found too.

SUMS = "SHA256SUMS"


class Damaged(UserError):
    """The checkpoint is not what was written, and will not become so again."""


def verify_checkpoint(path: Path, group: Group = None) -> None:
    """Raise a Damaged that names the first damaged, missing or superfluous file.

    A file that cannot be read, perhaps only now or only by us, is another UserError.
    """
    digests = on_rank0(group, lambda: listed_files(path))

    def require_intact() -> None:
        for name in sorted(digests)[rank_in(group) :: size_of(group)]:
            try:
                found = digest_on_disk(path / name)
            except OSError as error:
                raise _unreadable(path / name, error) from None
            if found != digests[name]:
                raise Damaged(f"{path / name}: is damaged: its checksum is not the one in {SUMS}")

    everywhere(group, require_intact)


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


def _seal(lines: bytes) -> bytes:
    return f"# sha256 of the lines above: {hashlib.sha256(lines).hexdigest()}\n".encode()


def digest_on_disk(file: Path) -> str:
    """The SHA-256 of a file, read from the disk and not from the page cache."""
    with file.open("rb") as stream:
        os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return file_sha256(file)


def _unreadable(path: Path, error: OSError) -> UserError:
    """A file that does not exist, or is none, will not be one at another time either."""
    lasting = isinstance(error, FileNotFoundError | IsADirectoryError | NotADirectoryError)
    kind = Damaged if lasting else UserError
    return kind(f"{path}: cannot be read: {error.strerror}")


def newest_intact_checkpoint(directory: Path, group: Group = None) -> Path | None:
    """None where there has been none yet.

    A damaged one is renamed to `….damaged-1` if there is an intact one before it: a run that
    restarts by itself at night loses some more steps, not the night. If none is intact, the run is
    refused and nothing changes: the user decides whether to begin anew. The same holds where one
    cannot be read because of an error of the disk or the network: it may be intact.
    """
    found = on_rank0(group, lambda: complete_checkpoints(directory))
    damaged: dict[Path, Damaged] = {}
    for _, path in sorted(found.items(), reverse=True):
        try:
            verify_checkpoint(path, group)
        except Damaged as error:
            damaged[path] = error
            continue
        except UserError as error:
            right = f"try again, or rename {path.name} to continue without it"
            raise UserError(f"{error}; {right}") from None
        on_rank0(group, partial(_put_aside, directory, damaged, path))
        return path
    if damaged:
        newest = next(iter(damaged.values()))
        raise UserError(f"{newest}; no other is intact: remove {directory} to begin anew")
    return None


def _put_aside(directory: Path, damaged: dict[Path, Damaged], taken: Path) -> None:
    for path, error in damaged.items():
        aside = unused(path.with_name(path.name + DAMAGED))
        path.rename(aside)
        line = f"warning: {error}; it is {aside.name} now, the run continues from {taken.name}"
        print(line, file=sys.stderr, flush=True)
    if damaged:
        point_latest(directory)
