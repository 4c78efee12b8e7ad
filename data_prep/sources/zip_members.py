"""Members of a zip read where they lie, by any number of processes: nothing is ever unpacked to a
name of the archive's own."""

import os
import struct
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path

from lipnext_scale.errors import UserError

_LOCAL_HEADER, _LOCAL_MAGIC = struct.Struct("<4s5H3L2H"), b"PK\x03\x04"
_ENCRYPTED = 0x1
_CHUNK = 1 << 22


class BadMember(Exception):
    """A member that cannot be read, and why."""


def zip_directory(path: Path) -> list[zipfile.ZipInfo]:
    """What the archive says is in it, but for directories."""
    try:
        with zipfile.ZipFile(path) as archive:
            return [info for info in archive.infolist() if not info.is_dir()]
    except OSError as error:
        raise UserError(f"--source {path}: cannot be read: {error.strerror or error}") from None
    except Exception as error:  # whatever zipfile makes of bytes that are no zip
        reason = str(error).split("\n")[0] or type(error).__name__
        raise UserError(f"--source {path}: is no readable zip archive: {reason}") from None


def data_start(descriptor: int, header: int) -> int:
    """Where a member's bytes begin: its local header, at `header`, has a length of its own."""
    fixed = os.pread(descriptor, _LOCAL_HEADER.size, header)
    if len(fixed) < _LOCAL_HEADER.size or not fixed.startswith(_LOCAL_MAGIC):
        raise BadMember(f"has no header at byte {header}")
    *_, name_length, extra_length = _LOCAL_HEADER.unpack(fixed)
    return header + _LOCAL_HEADER.size + int(name_length) + int(extra_length)


def require_plain(info: zipfile.ZipInfo) -> None:
    """Stored or deflated, not encrypted: what every numpy and every EDM tool writes."""
    if info.flag_bits & _ENCRYPTED:
        raise BadMember("is encrypted")
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise BadMember(f"is packed by method {info.compress_type}; store it or deflate it")


def member_chunks(descriptor: int, info: zipfile.ZipInfo) -> Iterator[bytes]:
    """The member's content in pieces; at its end its length and checksum are compared."""
    require_plain(info)
    start = data_start(descriptor, info.header_offset)
    chunks = _stored(descriptor, start, start + info.compress_size)
    if info.compress_type == zipfile.ZIP_DEFLATED:
        chunks = _inflated(chunks)
    size = checksum = 0
    for chunk in chunks:
        size, checksum = size + len(chunk), zlib.crc32(chunk, checksum)
        if size > info.file_size:  # a bomb, or damaged
            break
        yield chunk
    if size != info.file_size or checksum != info.CRC:
        raise BadMember("is damaged: its length or checksum differs")


def _stored(descriptor: int, place: int, end: int) -> Iterator[bytes]:
    while place < end:
        chunk = os.pread(descriptor, min(_CHUNK, end - place), place)
        if not chunk:
            raise BadMember("is cut off")
        place += len(chunk)
        yield chunk


def _inflated(chunks: Iterator[bytes]) -> Iterator[bytes]:
    unpack = zlib.decompressobj(-zlib.MAX_WBITS)
    try:
        for packed in chunks:
            while packed:
                yield unpack.decompress(packed, _CHUNK)
                packed = unpack.unconsumed_tail
        yield unpack.flush()
    except zlib.error as error:
        raise BadMember(f"is damaged: {error}") from None


def read_member(descriptor: int, info: zipfile.ZipInfo) -> bytes:
    return b"".join(member_chunks(descriptor, info))
