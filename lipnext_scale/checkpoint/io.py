"""Reading and writing checkpoints by torch.distributed.checkpoint (DCP).

Files are hashed while they are written, and read without running what they might contain.
"""

import errno
import hashlib
import io
import json
import os
import pickle
import re
import shutil
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata

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
    ShardLoadPlanner,
    ShardSavePlanner,
    StateShards,
    assign_writers,
    layout_of,
)
from lipnext_scale.utils.collectives import Group, everywhere, on_rank0, rank_in, reason_of
from lipnext_scale.utils.errors import UserError
from lipnext_scale.utils.files import PARTIAL, free_space
from lipnext_scale.utils.progress import beat

METADATA, FACTS, FORMAT = ".metadata", "facts.json", 2
_DATA_FILE = re.compile(r"__[0-9]+_[0-9]+\.distcp")


def run_dcp(
    operation: Callable[..., Any],
    shards: StateShards,
    group: Group,
    expected: type[Exception],
    message: str,
    **parts: Any,
) -> None:
    """dcp.save or dcp.load: an expected failure anywhere is the same UserError on all ranks.

    One that is not expected is a bug: the error then has the tracebacks of all ranks.
    """
    # DCP warns that there is one process where there is no group: that is intended.
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    try:
        operation(shards, process_group=group, no_dist=group is None, **parts)
    except CheckpointException as failed:
        failures = [failure for _, (failure, _) in sorted(failed.failures.items())]
        for failure in failures:
            if isinstance(failure, expected):
                raise UserError(f"{message}: {reason_of(failure)}") from failure
        raise RuntimeError(str(failed)) from failures[0]


# --------------------------------------------------------------------------------------------------
# Reading


def read_facts(path: Path) -> dict[str, Any]:
    """What the run stored beside its tensors, with the "step" and the "format"."""
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
    """The names of the tensors in a checkpoint, and their full shapes."""
    return {name: tuple(stored.size) for name, stored in _tensors(read_metadata(path)).items()}


def load_shards(path: Path, shards: StateShards, group: Group = None) -> None:
    """Read into the shards' tensors, in place. Call `verify_checkpoint` before."""
    found: list[Metadata] = []

    def look() -> None:
        found.append(read_metadata(path))
        _require_fit(path, shards, _tensors(found[0]))

    everywhere(group, look)
    run_dcp(
        dcp.load,
        shards,
        group,
        expected=Exception,  # DCP and torch.load raise many kinds for files that are damaged
        message=f"{path}: is not a readable checkpoint",
        storage_reader=KnownReader(path, found[0]),
        planner=ShardLoadPlanner(),
    )


def _require_fit(path: Path, shards: StateShards, tensors: dict[str, Any]) -> None:
    for name, shard in shards.items():
        if name not in tensors:
            raise UserError(f"{path}: has no tensor {name}, of shape {shard.shape} in this run")
        shape, dtype = tuple(tensors[name].size), tensors[name].properties.dtype
        if shape != shard.shape:
            raise UserError(f"{path}: its {name} has shape {shape}, in this run {shard.shape}")
        if dtype != shard.tensor.dtype:
            raise UserError(f"{path}: its {name} is {dtype}, in this run {shard.tensor.dtype}")


class KnownReader(FileSystemReader):
    """DCP's reader with metadata that was read before. It reads tensors as `weights_only`."""

    def __init__(self, path: Path, known: Metadata) -> None:
        super().__init__(path)
        self.known = known

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self.known


def read_metadata(path: Path) -> Metadata:
    """DCP's description of a checkpoint. It is a pickle, of which only data is accepted."""
    file = path / METADATA
    try:
        with file.open("rb") as stream:
            found = _MetadataUnpickler(stream).load()
        _require_own_files(found)
    except Exception as error:  # a damaged pickle can cause any
        raise UserError(f"{file}: is not a readable checkpoint: {reason_of(error)}") from None
    return found


def _tensors(found: Metadata) -> dict[str, TensorStorageMetadata]:
    return found.state_dict_metadata  # type: ignore[return-value]  # `read_metadata` has checked it


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
        if (module, name) == ("builtins", "getattr"):  # how Python 3.11.0 to 3.11.3 pickle an enum
            return _memory_format
        raise pickle.UnpicklingError(f"it holds {module}.{name}, which is not data")


def _memory_format(kind: Any, name: str) -> Any:
    if kind is not metadata._MEM_FORMAT_ENCODING:
        raise pickle.UnpicklingError(f"it holds {name!r} of {kind!r}, which is not data")
    return kind[name]


def _require_own_files(found: Any) -> None:
    """It describes tensors, whose data is in files of the checkpoint itself."""
    if not isinstance(found, Metadata):
        raise ValueError("it does not describe tensors")
    for name, stored in found.state_dict_metadata.items():
        if not isinstance(stored, TensorStorageMetadata):
            raise ValueError(f"it does not describe a tensor {name!r}")
    for place in found.storage_data.values():
        transforms = getattr(place, "transform_descriptors", None)  # not in torch before 2.7
        if not _DATA_FILE.fullmatch(place.relative_path) or transforms:
            raise ValueError(f"it places a tensor in {place.relative_path!r}")


# --------------------------------------------------------------------------------------------------
# Writing


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
        if not self.file.closed:  # a stream that failed is flushed again when it is collected
            self.file.flush()

    def tell(self) -> int:
        return self.file.tell()


class HashedFiles(FileSystem):
    """Writes files, on the disk when their stream ends, and knows the digest of each by name."""

    def __init__(self) -> None:
        self.digests: dict[str, str] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[HashedStream]:
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
    """DCP's writer on HashedFiles: one file per rank, and no path or time in its metadata."""

    def __init__(self, path: Path, files: HashedFiles) -> None:
        # HashedFiles syncs: DCP's own sync leaves out what is still in a buffer. The tensors are in
        # the host's memory already: nothing is to be copied ahead.
        super().__init__(path, sync_files=False, per_thread_copy_ahead=0, overwrite=False)
        self.fs = files

    def storage_meta(self) -> StorageMeta | None:
        return None


class CheckpointWriter:
    """Saves the shards of all ranks of a group beside the training (docs/checkpoints.md).

    All ranks make the same calls.

    keep_last, keep_every: the newest so many checkpoints stay, and those of steps that are a
        multiple of `keep_every` (0: none).
    group: of a CPU backend and for this writer alone, whose thread uses it. None: one process.
    """

    def __init__(
        self, directory: Path, keep_last: int, keep_every: int = 0, group: Group = None
    ) -> None:
        self.directory, self.group = directory, group
        self.keep_last, self.keep_every = keep_last, keep_every
        # The interpreter does not end before an executor's work is done.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._saving: Future[None] | None = None
        self._staged: StateShards = {}

    def save(
        self, step: int, shards: StateShards, facts: dict[str, Any], asynchronous: bool = True
    ) -> None:
        """Save the shards as they are now; they may change as soon as this returns."""
        self.wait()
        described = {"format": FORMAT, "step": step, **facts}
        # Encoded now, since the facts may change too; rank 0 writes them.
        content = on_rank0(self.group, lambda: json.dumps(described, indent=1, allow_nan=False))
        ours = assign_writers(everywhere(self.group, lambda: layout_of(shards)))
        everywhere(self.group, lambda: self._stage(shards, ours[rank_in(self.group)]))
        self._saving = self._thread.submit(self._write, step, content.encode())
        if not asynchronous:
            self.wait()

    def wait(self) -> None:
        """Until the save under way is complete; raises what went wrong in it."""
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.result()

    @property
    def failure(self) -> BaseException | None:
        """What went wrong in the last save, until wait() or save() raises it."""
        saving = self._saving
        return saving.exception() if saving is not None and saving.done() else None

    def _stage(self, shards: StateShards, ours: set[str]) -> None:
        """Copy what is ours to write, into the memory of the last save where that fits."""
        kept = {name: shard.tensor for name, shard in self._staged.items()}
        self._staged = {}
        for name in sorted(ours):
            tensor, copy = shards[name].tensor.detach(), kept.pop(name, None)
            if copy is None or copy.shape != tensor.shape or copy.dtype != tensor.dtype:
                # Copies from a GPU are several times faster into pinned memory.
                copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            copy.copy_(tensor, non_blocking=True)
            self._staged[name] = replace(shards[name], tensor=copy)
        if any(shards[name].tensor.is_cuda for name in ours):
            torch.cuda.synchronize()

    def _write(self, step: int, facts: bytes) -> None:
        """The checkpoint, up to its name; where that fails, nothing of it stays."""
        path = self.directory / checkpoint_name(step)
        partial, files = path.with_name(path.name + PARTIAL), HashedFiles()
        try:
            on_rank0(self.group, lambda: _begin(path, partial, files, facts))
            run_dcp(
                dcp.save,
                self._staged,
                self.group,
                expected=OSError,
                message=_message(path),
                storage_writer=HashedWriter(partial, files),
                planner=ShardSavePlanner(),
            )
            digests = everywhere(self.group, lambda: _read_back(path, partial, files))
            on_rank0(self.group, lambda: _finish(path, partial, files, digests))
        except BaseException as error:
            if rank_in(self.group) == 0:  # the next save removes what cannot be removed now
                shutil.rmtree(partial, ignore_errors=True)
            if str(error).endswith((os.strerror(errno.ENOSPC), os.strerror(errno.EDQUOT))):
                free = f"{free_space(self.directory)} are free there"  # without the partial one
                raise UserError(f"{error}, {free}") from None
            raise
        on_rank0(self.group, lambda: self._retain(step))

    def _retain(self, step: int) -> None:
        try:
            retain(self.directory, step, self.keep_last, self.keep_every)
        except OSError as error:
            what = f"{error.filename or self.directory}: the old checkpoint cannot be removed"
            raise UserError(f"{what}: {reason_of(error)}") from None


def _begin(path: Path, partial: Path, files: HashedFiles, facts: bytes) -> None:
    with _writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        tidy(path.parent)
        partial.mkdir()
        with files.create_stream(partial / FACTS, "wb") as stream:
            stream.write(facts)


def _read_back(path: Path, partial: Path, files: HashedFiles) -> dict[str, str]:
    """The digests of this rank's files, which hold on the disk what was written to them."""
    with _writing(path):
        for name, digest in files.digests.items():
            if digest_on_disk(partial / name) != digest:
                raise UserError(f"{_message(path)}: {name} does not read back as it was written")
    return files.digests


def _finish(path: Path, partial: Path, files: HashedFiles, digests: list[dict[str, str]]) -> None:
    every = {name: digest for part in digests for name, digest in part.items()}
    with _writing(path):
        for name in sorted(every.keys() - {file.name for file in partial.iterdir()}):
            raise UserError(
                f"{_message(path)}: rank 0 does not see {name} of another rank: "
                "all ranks need the same directory"
            )
        with files.create_stream(partial / SUMS, "wb") as stream:
            stream.write(sums_of(every))
        listed_files(partial)  # SHA256SUMS reads back, and there is no other file
        sync_directory(partial)
        commit(partial, path)
        point_latest(path.parent)


def _message(path: Path) -> str:
    return f"{path}: the checkpoint cannot be written"


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(f"{_message(path)}: {reason_of(error)}") from None
