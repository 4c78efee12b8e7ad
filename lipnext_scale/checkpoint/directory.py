"""The directory of a run's checkpoints: their names, which is the newest, which of them stay.

Beside `step-000000100` there may be, for a moment or after a kill:

    step-000000100.partial    being written
    step-000000100.replaced   complete, about to be replaced by a new one of the same step
    step-000000100.deleting   being removed
    step-000000100.damaged-1  found damaged, and kept for its owner to look at
"""

import itertools
import os
import re
import shutil
from pathlib import Path

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


def give_name(partial: Path, path: Path) -> None:
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
