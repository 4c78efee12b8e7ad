"""Tars made on the fly, and images in every encoding."""

import gzip
import io
import struct
import tarfile
import zlib
from pathlib import Path

import numpy as np
from PIL import Image


def tar_bytes(members: list[tuple[str, bytes]], format: int = tarfile.DEFAULT_FORMAT) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=format) as tar:
        for name, content in members:
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()


def write_tar(path: Path, members: list[tuple[str, bytes]]) -> str:
    """A tar of (name, content) members, compressed if the path ends in .gz."""
    content = tar_bytes(members)
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return str(path)


def encode(
    pixels: np.ndarray, kind: str = "PNG", mode: str | None = None, **options: object
) -> bytes:
    """An image file; `mode` is a Pillow mode to convert to first."""
    image = Image.fromarray(pixels)
    buffer = io.BytesIO()
    kind = "JPEG" if kind == "jpg" else kind.upper()
    (image.convert(mode) if mode else image).save(buffer, format=kind, **options)
    return buffer.getvalue()


def png_with(width: int, height: int, bits: int, colour_type: int, data: bytes) -> bytes:
    """A PNG by hand, for what Pillow does not write; `data` are its rows with filter bytes."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        summed = struct.pack(">I", zlib.crc32(kind + content))
        return struct.pack(">I", len(content)) + kind + content + summed

    header = struct.pack(">IIBBBBB", width, height, bits, colour_type, 0, 0, 0)
    chunks = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(data)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + chunks


class Runs:
    """Unpickled, it makes a call: Runs(function, (argument, …))."""

    def __init__(self, *call: object) -> None:
        self.call = call

    def __reduce__(self):
        return self.call


def noise(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def sample(key: str, image: bytes = encode(noise(4, 4)), label: object = 0, kind: str = "png"):
    """The members of a sample: its class and its image."""
    return [(f"{key}.cls", str(label).encode()), (f"{key}.{kind}", image)]
