"""Writing WebDataset shards whose bytes depend on their content alone."""

import gzip
import hashlib
import io
import re
import tarfile
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import BinaryIO

import numpy as np
from PIL import Image

from lipnext_scale.files import atomic_file

LONGEST_KEY = 90  # with its suffix it fits the 100 bytes of a tar header
_NOT_IN_KEYS = re.compile(r"[^A-Za-z0-9_-]+")


def png_bytes(image: np.ndarray) -> bytes:
    """A uint8 image [H, W] or [H, W, 3] as PNG: lossless."""
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, format="PNG", optimize=True)
    return buffer.getvalue()


def sample_key(number: int, count: int, name: str) -> str:
    """The sample's number of `count` and what is safe of its name: no dot, at the first of which
    WebDataset ends a key; no slash, so that it never leaves a directory it is unpacked into."""
    digits = max(6, len(str(count - 1)))
    stem = _NOT_IN_KEYS.sub("_", PurePosixPath(name).stem).strip("_")
    return f"{number:0{digits}d}_{stem}"[:LONGEST_KEY].rstrip("_")


class TarWriter:
    """A USTAR archive with its size and sha256; `add` tells where a file's content begins."""

    def __init__(self, file: BinaryIO | gzip.GzipFile) -> None:
        self._file, self._digest, self.bytes = file, hashlib.sha256(), 0

    def add(self, name: str, content: bytes) -> int:
        entry = tarfile.TarInfo(name)  # its time, owner and mode are constants
        entry.size = len(content)
        self._write(entry.tobuf(tarfile.USTAR_FORMAT))
        place = self.bytes
        self._write(content)
        self._write(bytes(-self.bytes % tarfile.BLOCKSIZE))
        return place

    def end(self) -> None:
        """Two empty blocks, and more until the archive is as long as tars use to be."""
        self._write(bytes(2 * tarfile.BLOCKSIZE))
        self._write(bytes(-self.bytes % tarfile.RECORDSIZE))

    @property
    def sha256(self) -> str:
        return self._digest.hexdigest()

    def _write(self, content: bytes) -> None:
        self._file.write(content)
        self._digest.update(content)
        self.bytes += len(content)


def write_shard(path: Path, samples: Iterable[tuple[str, bytes, int]]) -> None:
    """Write (key, PNG, label) samples as one tar.gz, aside first and then renamed into place."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(path) as file:
        # Neither the name nor the time goes into the gzip header.
        with gzip.GzipFile("", "wb", compresslevel=9, fileobj=file, mtime=0) as packed:
            tar = TarWriter(packed)
            for key, png, label in samples:
                tar.add(f"{key}.cls", str(label).encode())
                tar.add(f"{key}.png", png)
            tar.end()
