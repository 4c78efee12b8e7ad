"""Writing WebDataset shards whose bytes depend on their content alone."""

import gzip
import io
import tarfile
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from PIL import Image

from lipnext_scale.files import atomic_file


def png_bytes(image: np.ndarray) -> bytes:
    """A uint8 image [H, W] or [H, W, 3] as PNG: lossless."""
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, format="PNG", optimize=True)
    return buffer.getvalue()


def write_shard(path: Path, samples: Iterable[tuple[str, bytes, int]]) -> None:
    """Write (key, PNG, label) samples as one tar.gz, aside first and then renamed into place."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(path) as file:
        # Neither the name nor the time goes into the gzip header.
        with gzip.GzipFile("", "wb", compresslevel=9, fileobj=file, mtime=0) as packed:
            with tarfile.open(fileobj=packed, mode="w", format=tarfile.USTAR_FORMAT) as tar:
                for key, png, label in samples:
                    _add(tar, f"{key}.cls", str(label).encode())
                    _add(tar, f"{key}.png", png)


def _add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    entry = tarfile.TarInfo(name)  # its time, owner and mode are constants
    entry.size = len(content)
    tar.addfile(entry, io.BytesIO(content))
