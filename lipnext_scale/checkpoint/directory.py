"""The directory of a run's checkpoints: their names, which is the newest, which of them stay.

Beside `step-000000100` there may be, for a moment or after a kill:

    step-000000100.partial    being written
    step-000000100.replaced   complete, about to be replaced by a new one of the same step
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

from lipnext_scale.agreement import Group, everywhere, first_alone, rank_in, size_of
from lipnext_scale.errors import UserError
from lipnext_scale.files import PARTIAL

REPLACED, DELETING = ".replaced", ".deleting"
LATEST = "latest"
_STEP = re.compile("step-([0-9]{9,})")


def checkpoint_name(step: int) -> str:
    return f"step-{step:09d}"


def step_of(path: Path) -> int:
    """Of a checkpoint that `latest_checkpoint` has found."""
    match = _STEP.match(path.name)
    assert match is not None
    return int(match[1])


def latest_checkpoint(directory: Path) -> Path | None:
    """The newest complete checkpoint. One that was cut off has never got its name."""
    found = complete_checkpoints(directory)
    return found[max(found)] if found else None


def complete_checkpoints(directory: Path) -> dict[int, Path]:
    """step → directory. One that a kill left `.replaced` counts while nothing replaces it."""
    return {**_with_suffix(directory, REPLACED), **_with_suffix(directory, "")}


def tidy(directory: Path) -> None:
    """Remove what a kill left behind."""
    for suffix in (PARTIAL, DELETING):
        for path in _with_suffix(directory, suffix).values():
            shutil.rmtree(path)
    for step, path in _with_suffix(directory, REPLACED).items():
        if (directory / checkpoint_name(step)).exists():
            remove(path)
        else:
            path.rename(directory / checkpoint_name(step))


def commit(partial: Path, path: Path) -> None:
    """Make the written checkpoint the one of its name, in place of an older one of this step."""
    replaced = path.with_name(path.name + REPLACED)
    again = path.exists()
    if again:
        path.rename(replaced)
    partial.rename(path)
    sync_directory(path.parent)
    if again:
        remove(replaced)


def point_latest(directory: Path) -> None:
    """Let the link `latest` show the newest checkpoint. It is for people: nothing reads it."""
    newest = latest_checkpoint(directory)
    assert newest is not None
    link, aside = directory / LATEST, directory / (LATEST + PARTIAL)
    if link.is_dir() and not link.is_symlink():  # a run that was copied without its links
        link.rename(unused(directory / f"{LATEST}.copy"))
    aside.unlink(missing_ok=True)
    aside.symlink_to(newest.name)
    aside.replace(link)


def unused(path: Path) -> Path:
    """The path with the first number behind it that nothing has yet."""
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
    """By way of another name: a kill in between never leaves half a checkpoint under its own."""
    deleting = path.with_name(path.name.removesuffix(REPLACED) + DELETING)
    path.rename(deleting)
    shutil.rmtree(deleting)


def sync_directory(path: Path) -> None:
    """Put the names in a directory on the disk, as fsync does with a file's content."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _with_suffix(directory: Path, suffix: str) -> dict[int, Path]:
    found = {}
    for path in directory.iterdir() if directory.is_dir() else ():
        match = _STEP.fullmatch(path.name.removesuffix(suffix))
        if match is None or path.is_symlink() or not path.is_dir():
            continue  # somebody's own
        step = int(match[1])
        if path.name == checkpoint_name(step) + suffix:
            found[step] = path
    return found


# --------------------------------------------------------------------------------------------------
# SHA256SUMS: what every file of a checkpoint holds, as `sha256sum -c` reads it, and sealed.
#
# The last line is the sum of the lines above it, so that damage to SHA256SUMS itself is found
# too.

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


# --------------------------------------------------------------------------------------------------
# The newest checkpoint that is what was written; damaged ones are put aside, and told.

DAMAGED = ".damaged"


def newest_whole_checkpoint(directory: Path, group: Group = None) -> Path | None:
    """None where there has been none yet.

    A damaged one is renamed to `….damaged`, if there is a whole one before it: a run that restarts
    by itself at night loses some more steps, not the night. If none is whole the run is refused,
    and everything stays as it is: to begin anew is the user's decision. So it is where one cannot
    be read, by an error of the disk or the network: it may be whole.
    """
    found = first_alone(group, lambda: complete_checkpoints(directory))
    complaints: dict[Path, Damaged] = {}
    for _, path in sorted(found.items(), reverse=True):
        try:
            verify_checkpoint(path, group)
        except Damaged as error:
            complaints[path] = error
            continue
        except UserError as error:
            raise UserError(
                f"{error}; try again, or rename {path.name} to go on without it"
            ) from None
        first_alone(group, partial(_put_aside, directory, complaints, path))
        return path
    for complaint in complaints.values():
        raise UserError(f"{complaint}; no other is whole: remove {directory} to begin anew")
    return None


def _put_aside(directory: Path, complaints: dict[Path, Damaged], taken: Path) -> None:
    try:
        for path, error in complaints.items():
            aside = unused(path.with_name(path.name + DAMAGED))
            path.rename(aside)
            print(
                f"warning: {error}; it is {aside.name} now, the run goes on from {taken.name}",
                file=sys.stderr,
                flush=True,
            )
        if complaints:
            point_latest(directory)
    except OSError as error:
        raise UserError(
            f"{directory}: its damaged checkpoints cannot be renamed: {error.strerror}"
        ) from None
