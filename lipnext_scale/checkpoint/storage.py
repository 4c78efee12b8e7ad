"""DCP's files: hashed while they are written, and read without running what they might contain."""

import hashlib
import io
import os
import pickle
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)

from lipnext_scale.agreement import Group, reason_of
from lipnext_scale.checkpoint.pieces import Pieces
from lipnext_scale.errors import UserError
from lipnext_scale.heartbeat import beat

METADATA = ".metadata"
_DATA_FILE = re.compile(r"__[0-9]+_[0-9]+\.distcp")


def run_dcp(
    operation: Callable[..., Any],
    pieces: Pieces,
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
