"""The newest checkpoint that is what was written; damaged ones are put aside, and told."""

import sys
from functools import partial
from pathlib import Path

from lipnext_scale.agreement import Group, first_alone
from lipnext_scale.checkpoint.directory import complete_checkpoints, point_latest, unused
from lipnext_scale.checkpoint.integrity import Damaged, verify_checkpoint
from lipnext_scale.errors import UserError

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
