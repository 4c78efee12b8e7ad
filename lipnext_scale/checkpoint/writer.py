"""Writing checkpoints beside the training.

save()      in the training's thread: waits for the save before, settles which process writes
            which piece, copies these to the machine's memory
a thread    writes them aside, reads them back, gives the directory its name, removes old ones
wait()      until that is done; raises what went wrong
"""

import errno
import json
import os
import shutil
import sys
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import checkpoint as dcp

from lipnext_scale.agreement import Group, everywhere, first_alone, rank_in, reason_of
from lipnext_scale.checkpoint.directory import (
    checkpoint_name,
    give_name,
    point_latest,
    retain,
    sync_directory,
    tidy,
)
from lipnext_scale.checkpoint.integrity import SUMS, digest_on_disk, listed_files, sums_of
from lipnext_scale.checkpoint.pieces import Layout, Pieces, layout_of, share_out
from lipnext_scale.checkpoint.planner import PieceSavePlanner
from lipnext_scale.checkpoint.reader import FACTS, FORMAT
from lipnext_scale.checkpoint.storage import HashedFiles, HashedWriter, run_dcp
from lipnext_scale.errors import UserError
from lipnext_scale.files import PARTIAL, free_space


class CheckpointWriter:
    """Saves the pieces of all processes of a group; all of them make the same calls.

    keep_last, keep_every: the newest so many checkpoints stay, and those of steps that are a
        multiple of `keep_every` (0: none).
    group: of a CPU backend and for this writer alone: its thread talks over it. None: one process.
    """

    def __init__(
        self, directory: Path, keep_last: int, keep_every: int = 0, group: Group = None
    ) -> None:
        assert keep_last >= 1 and keep_every >= 0
        self.directory = directory
        self.keep_last = keep_last
        self.keep_every = keep_every
        self.group = group
        self._thread: threading.Thread | None = None
        self._errors: list[BaseException] = []
        weakref.finalize(self, _tell_what_nobody_waited_for, self._errors)
        self._layout: Layout | None = None  # of the last save, and what of it was ours to write
        self._ours: set[str] = set()
        self._facts = b""
        self._staged: Pieces = {}

    def save(
        self, step: int, pieces: Pieces, facts: dict[str, Any], asynchronous: bool = True
    ) -> None:
        """Save the pieces as they are now; they may change as soon as this returns."""
        self.wait()
        steps = set(everywhere(self.group, lambda: self._prepare(step, facts)))
        assert steps == {step}, f"the processes save different steps: {steps}"
        self._share_out(layout_of(pieces))
        everywhere(self.group, lambda: self._stage(pieces))
        self._thread = threading.Thread(
            target=self._run,
            args=(step,),
            name=f"checkpoint of step {step}",
            daemon=False,  # the interpreter does not end before the checkpoint is complete
        )
        self._thread.start()
        if not asynchronous:
            self.wait()

    def wait(self) -> None:
        """Until the save under way is complete; raises what went wrong in it."""
        self.join()
        if self._errors:
            raise self._errors.pop()

    def join(self) -> None:
        """Until the save under way is complete or has failed."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    @property
    def failure(self) -> BaseException | None:
        """What went wrong in the last save, until wait() or save() raises it."""
        return self._errors[0] if self._errors else None

    def _prepare(self, step: int, facts: dict[str, Any]) -> int:
        """Encode the facts, of which only the first process's are written, as they are now."""
        assert facts.keys().isdisjoint({"format", "step"}), "the writer adds these facts itself"
        own = {"format": FORMAT, "step": step}
        self._facts = json.dumps({**own, **facts}, indent=1, allow_nan=False).encode()
        return step

    def _share_out(self, layout: Layout) -> None:
        """Settle which of the pieces are ours to write; as at the last save if all are the same."""
        if not all(everywhere(self.group, lambda: layout == self._layout)):
            layouts = everywhere(self.group, lambda: layout)
            self._layout, self._ours = layout, share_out(layouts)[rank_in(self.group)]

    def _stage(self, pieces: Pieces) -> None:
        """Copy what is ours to write, into the memory of the last save where that fits."""
        kept = {name: piece.tensor for name, piece in self._staged.items()}
        self._staged = {}
        for name in sorted(self._ours):
            tensor = pieces[name].tensor.detach()
            copy = _memory_for(tensor, kept.pop(name, None))
            copy.copy_(tensor, non_blocking=True)
            self._staged[name] = replace(pieces[name], tensor=copy)
        if any(pieces[name].tensor.is_cuda for name in self._ours):
            torch.cuda.synchronize()

    def _run(self, step: int) -> None:
        try:
            self._write(self.directory / checkpoint_name(step))
            first_alone(self.group, lambda: self._retain(step))
        except UserError as error:
            self._errors.append(_with_free_space(error, self.directory))
        except BaseException as error:
            self._errors.append(error)

    def _write(self, path: Path) -> None:
        """Everything of the checkpoint, up to its name; of a failure, nothing stays."""
        partial, files = path.with_name(path.name + PARTIAL), HashedFiles()
        try:
            first_alone(self.group, lambda: _begin(path, partial, files, self._facts))
            run_dcp(
                dcp.save,
                self._staged,
                self.group,
                expected=(OSError,),
                complaint=_complaint(path),
                storage_writer=HashedWriter(partial, files),
                planner=PieceSavePlanner(),
            )
            digests = everywhere(self.group, lambda: _read_back(path, partial, files))
            first_alone(self.group, lambda: _finish(path, partial, files, digests))
        except BaseException:
            if rank_in(self.group) == 0:  # what cannot be removed now is at the next save's begin
                shutil.rmtree(partial, ignore_errors=True)
            raise

    def _retain(self, step: int) -> None:
        try:
            retain(self.directory, step, self.keep_last, self.keep_every)
        except OSError as error:
            what = f"{error.filename or self.directory}: the old checkpoint cannot be removed"
            raise UserError(f"{what}: {reason_of(error)}") from None


def _tell_what_nobody_waited_for(errors: list[BaseException]) -> None:
    """When the writer or the program ends: too late to raise, but not to say."""
    for error in errors:
        print(f"error: {error}", file=sys.stderr)


def _memory_for(tensor: Tensor, kept: Tensor | None) -> Tensor:
    if kept is not None and kept.shape == tensor.shape and kept.dtype == tensor.dtype:
        return kept
    # Copies from a GPU are several times faster into pinned memory.
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)


def _begin(path: Path, partial: Path, files: HashedFiles, facts: bytes) -> None:
    with _told(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        tidy(path.parent)
        partial.mkdir()
        with files.create_stream(partial / FACTS, "wb") as stream:
            stream.write(facts)


def _read_back(path: Path, partial: Path, files: HashedFiles) -> dict[str, str]:
    """The digests of the files of this process, which hold on the disk what was written to them."""
    with _told(path):
        for name, digest in files.digests.items():
            if digest_on_disk(partial / name) != digest:
                raise UserError(f"{_complaint(path)}: {name} does not read back as it was written")
    return files.digests


def _finish(path: Path, partial: Path, files: HashedFiles, digests: list[dict[str, str]]) -> None:
    every = {name: digest for part in digests for name, digest in part.items()}
    with _told(path):
        for name in sorted(every.keys() - {file.name for file in partial.iterdir()}):
            raise UserError(
                f"{_complaint(path)}: {name} of another process is not to be seen from the first: "
                "all processes need the same directory"
            )
        with files.create_stream(partial / SUMS, "wb") as stream:
            stream.write(sums_of(every))
        listed_files(partial)  # it reads back, and there is nothing else
        sync_directory(partial)
        give_name(partial, path)
        point_latest(path.parent)


def _with_free_space(error: UserError, directory: Path) -> UserError:
    """For a full disk, how much it has left without the part that was written and removed."""
    full = (os.strerror(errno.ENOSPC), os.strerror(errno.EDQUOT))
    if not str(error).endswith(full):
        return error
    return UserError(f"{error}, {free_space(directory)} are free there")


def _complaint(path: Path) -> str:
    return f"{path}: the checkpoint cannot be written"


@contextmanager
def _told(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(f"{_complaint(path)}: {reason_of(error)}") from None
