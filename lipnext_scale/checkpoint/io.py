"""DCP's files: hashed while they are written, and read without running what they might contain."""

import errno
import hashlib
import io
import json
import os
import pickle
import re
import shutil
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)

from lipnext_scale.agreement import Group, everywhere, first_alone, rank_in, reason_of
from lipnext_scale.checkpoint.directory import (
    SUMS,
    checkpoint_name,
    commit,
    digest_on_disk,
    listed_files,
    point_latest,
    retain,
    sums_of,
    sync_directory,
    tidy,
)
from lipnext_scale.checkpoint.shards import (
    Layout,
    PieceLoadPlanner,
    PieceSavePlanner,
    StateShards,
    layout_of,
    share_out,
)
from lipnext_scale.errors import UserError
from lipnext_scale.files import PARTIAL, free_space
from lipnext_scale.heartbeat import beat

METADATA = ".metadata"
_DATA_FILE = re.compile(r"__[0-9]+_[0-9]+\.distcp")


def run_dcp(
    operation: Callable[..., Any],
    pieces: StateShards,
    group: Group,
    expected: tuple[type[Exception], ...],
    complaint: str,
    **parts: Any,
) -> None:
    """dcp.save or dcp.load: a failure anywhere becomes the same UserError on all processes.

    One that is not expected is a bug: the error then has the tracebacks of all.
    """
    # DCP warns of what is meant: no group, so one process.
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    try:
        operation(pieces, process_group=group, no_dist=group is None, **parts)
    except CheckpointException as failed:
        failures = [failure for _, (failure, _) in sorted(failed.failures.items())]
        for failure in failures:
            if isinstance(failure, expected):
                raise UserError(f"{complaint}: {reason_of(failure)}") from failure
        raise RuntimeError(str(failed)) from failures[0]


class HashedStream(io.BufferedIOBase):
    """A file that is written, with the SHA-256 of what it is to hold."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.digest = hashlib.sha256()
        self.failure: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            self.file.write(data)
        except OSError as error:
            self.failure = error
            raise
        self.digest.update(data)
        beat()
        return len(data)

    def flush(self) -> None:
        if not self.file.closed:  # of a stream that failed, nothing more is to be said at its end
            self.file.flush()

    def tell(self) -> int:
        return self.file.tell()


class HashedFiles(FileSystem):
    """Writes files, on the disk when their stream ends, and knows the digest of each by name."""

    def __init__(self) -> None:
        self.digests: dict[str, str] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[HashedStream]:
        assert mode == "wb"
        with open(path, "wb") as file:
            stream = HashedStream(file)
            try:
                yield stream
            except RuntimeError:  # torch.save makes one of an OSError, and drops the reason
                if stream.failure is not None:
                    raise stream.failure from None
                raise
            file.flush()
            os.fsync(file.fileno())
        self.digests[Path(path).name] = stream.digest.hexdigest()

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        self.digests[Path(new_path).name] = self.digests.pop(Path(path).name)


class HashedWriter(FileSystemWriter):
    """DCP's writer on HashedFiles: one file per process, and no path or time in its metadata."""

    def __init__(self, path: Path, files: HashedFiles) -> None:
        # HashedFiles does the syncing: DCP's own leaves out what is still in a buffer. The tensors
        # are in this machine's memory already: nothing is to be copied ahead.
        super().__init__(path, sync_files=False, per_thread_copy_ahead=0, overwrite=False)
        self.fs = files

    def storage_meta(self) -> StorageMeta | None:
        return None


class SafeReader(FileSystemReader):
    """DCP's reader, given the metadata. Tensors it reads as `weights_only`."""

    def __init__(self, path: Path, known: Metadata) -> None:
        super().__init__(path)
        self.known = known

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self.known


def read_metadata(path: Path) -> Metadata:
    """DCP's description of a checkpoint. It is a pickle: of it only the data is accepted."""
    file = path / METADATA
    try:
        with file.open("rb") as stream:
            found = _MetadataUnpickler(stream).load()
        _require_sound(found)
    except OSError as error:
        raise UserError(f"{file}: cannot be read: {error.strerror}") from None
    except Exception as error:  # there is none that a damaged pickle could not cause
        raise UserError(f"{file}: is not a readable checkpoint: {reason_of(error)}") from None
    return found


class _MetadataUnpickler(pickle.Unpickler):
    """Builds what DCP's metadata consists of, and refuses every other name."""

    ALLOWED = {
        (kind.__module__, kind.__name__): kind
        for kind in (
            metadata.ChunkStorageMetadata,
            metadata.Metadata,
            metadata.MetadataIndex,
            metadata.TensorProperties,
            metadata.TensorStorageMetadata,
            metadata._MEM_FORMAT_ENCODING,
            filesystem._StorageInfo,
        )
    }

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in self.ALLOWED:
            return self.ALLOWED[module, name]
        if (module, name) == ("torch", "Size"):
            return torch.Size
        if (module, name) == ("torch.serialization", "_get_layout"):
            return {"torch.strided": torch.strided}.__getitem__
        if module == "torch" and isinstance(vars(torch).get(name), torch.dtype):
            return vars(torch)[name]
        raise pickle.UnpicklingError(f"it holds {module}.{name}, which is not data")


def _require_sound(found: Any) -> None:
    """Its parts are what they should be, and its data is in its own directory."""
    if not isinstance(found, Metadata):
        raise ValueError("it does not describe tensors")
    for name, stored in found.state_dict_metadata.items():
        if not (
            isinstance(name, str)
            and isinstance(stored, TensorStorageMetadata)
            and isinstance(stored.size, torch.Size)
            and isinstance(stored.properties.dtype, torch.dtype)
            and all(
                isinstance(corner, torch.Size) and len(corner) == len(stored.size)
                for chunk in stored.chunks
                for corner in (chunk.offsets, chunk.sizes)
            )
        ):
            raise ValueError(f"it does not describe a tensor {name!r}")
    for index, place in found.storage_data.items():
        if not (
            isinstance(index, MetadataIndex)
            and isinstance(place, filesystem._StorageInfo)
            and _DATA_FILE.fullmatch(place.relative_path)
            and isinstance(place.offset, int)
            and isinstance(place.length, int)
            and not getattr(place, "transform_descriptors", None)  # not in every torch
        ):
            raise ValueError("it places a tensor where none can be")


# --------------------------------------------------------------------------------------------------
# Reading checkpoints: their facts, what is in them, and pieces of it.

FACTS = "facts.json"
FORMAT = 2
# What DCP and torch.load raise for files that are not what they should be.
_UNREADABLE = (
    OSError,
    RuntimeError,
    EOFError,
    ValueError,
    LookupError,
    AssertionError,
    pickle.UnpicklingError,
)


def read_facts(path: Path) -> dict[str, Any]:
    """What the writer was told of the run, with the "step" and the "format"."""
    file = path / FACTS
    try:
        facts = json.loads(file.read_bytes())
    except OSError as error:
        raise UserError(f"{file}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file}: is not readable JSON: {error}") from None
    if not isinstance(facts, dict) or facts.get("format") != FORMAT:
        raise UserError(f"{file}: is not of a checkpoint of format {FORMAT}")
    return facts


def stored_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """The names of the tensors in a checkpoint, and their whole shapes."""
    tensors = read_metadata(path).state_dict_metadata
    return {
        name: tuple(stored.size)
        for name, stored in tensors.items()
        if isinstance(stored, TensorStorageMetadata)
    }


def load_pieces(path: Path, pieces: StateShards, group: Group = None) -> None:
    """Read into the pieces' tensors, in place. That the files are intact is verified before."""
    found: list[Metadata] = []

    def look() -> None:
        found.append(read_metadata(path))
        _require_fit(path, pieces, found[0])

    everywhere(group, look)
    run_dcp(
        dcp.load,
        pieces,
        group,
        expected=_UNREADABLE,
        complaint=f"{path}: is not a readable checkpoint",
        storage_reader=SafeReader(path, found[0]),
        planner=PieceLoadPlanner(),
    )


def _require_fit(path: Path, pieces: StateShards, metadata: Metadata) -> None:
    tensors = metadata.state_dict_metadata
    for name, piece in pieces.items():
        if name not in tensors:
            raise UserError(f"{path}: has no tensor {name}, of shape {piece.shape} in this run")
        stored = tensors[name]
        assert isinstance(stored, TensorStorageMetadata)
        if tuple(stored.size) != piece.shape:
            raise UserError(
                f"{path}: its {name} has shape {tuple(stored.size)}, in this run {piece.shape}"
            )
        if stored.properties.dtype != piece.tensor.dtype:
            raise UserError(
                f"{path}: its {name} is {stored.properties.dtype}, in this run {piece.tensor.dtype}"
            )


# --------------------------------------------------------------------------------------------------
# Writing checkpoints beside the training.
#
# save()      in the training's thread: waits for the save before, settles which process writes
#             which piece, copies these to the machine's memory
# a thread    writes them aside, reads them back, gives the directory its name, removes old ones
# wait()      until that is done; raises what went wrong


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
        self._staged: StateShards = {}

    def save(
        self, step: int, pieces: StateShards, facts: dict[str, Any], asynchronous: bool = True
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

    def _stage(self, pieces: StateShards) -> None:
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
        commit(partial, path)
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
