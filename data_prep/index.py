"""Write the index of shards that others have made, so that training need not scan them.

    python -m data_prep.index SHARDS … [--classes-file FILE] [--force] [--workers N]

SHARDS are WebDataset tars on this machine: paths, wildcards or braces. They are not changed. For
train-000000.tar, train-000001.tar, … train.index.json and train.index.npy are written beside them,
for other.tar other.tar.index.json and other.tar.index.npy.
"""

import os
import struct
from pathlib import Path

import numpy as np
import simplejpeg

from data_prep.checking.shard_sets import (
    LOG_SECONDS,
    ShardSet,
    add_workers_option,
    class_counts,
    group_shards,
    in_threads,
)
from lipnext_scale import __version__
from lipnext_scale.data.catalog import resolve_shards
from lipnext_scale.data.decode import BadSample, channels_of
from lipnext_scale.data.index import (
    KINDS,
    Record,
    ShardEntry,
    index_paths,
    sample_key,
    scan_tar,
    set_name,
    write_index,
)
from lipnext_scale.errors import ArgumentParser, UserError, command
from lipnext_scale.files import file_sha256
from lipnext_scale.progress import Progress

LONGEST_SIDE = 2**16 - 1  # what RECORD can say
_MAGIC = {b"\xff\xd8": KINDS["jpeg"], b"\x89PNG\r\n\x1a\n": KINDS["png"]}


def index_shard(path: Path) -> tuple[ShardEntry, np.ndarray]:
    """What an index says of a shard, with its records."""
    digest = file_sha256(path)  # first, as it fetches all that is then read in small pieces
    records, size = scan_tar(path)
    with open(path, "rb", buffering=0) as file:
        for number, values in enumerate(records):
            record = Record(*values.item())
            encoded = os.pread(file.fileno(), record.size, record.offset)
            try:
                records[number] = _with_header(record, encoded)
            except BadSample as error:
                raise UserError(f"{path}: sample {sample_key(path, record)} {error}") from None
    return ShardEntry(path.name, len(records), size, digest, dict(class_counts(records))), records


def _with_header(record: Record, encoded: bytes) -> Record:
    """The record with what the image itself says: its kind too, whatever its name ends in."""
    kind = next((k for magic, k in _MAGIC.items() if encoded.startswith(magic)), None)
    if kind is None:
        raise BadSample("is neither a JPEG nor a PNG")
    channels = channels_of(encoded, kind)  # refuses a header that makes no sense
    if kind == KINDS["png"]:
        width, height = struct.unpack_from(">II", encoded, 16)
    else:
        height, width, _, _ = simplejpeg.decode_jpeg_header(encoded, strict=False)
    if max(height, width) > LONGEST_SIDE:
        raise BadSample(f"is {height}×{width}; at most {LONGEST_SIDE} pixels a side")
    return record._replace(height=height, width=width, channels=channels, kind=kind)


def index_set(shard_set: ShardSet, classes: list[str], workers: int) -> None:
    """Index all shards of a set."""
    paths = [shard_set.directory / file for file in shard_set.files or []]
    progress = Progress(len(paths), unit="shard", title=shard_set.name, log_seconds=LOG_SECONDS)
    try:
        shards = in_threads(index_shard, paths, workers, progress)
    finally:
        progress.close()
    records = np.concatenate([own for _, own in shards])
    if not len(records):
        raise UserError(f"{shard_set.title}: the shards hold no samples")
    _require_named(records, classes)
    converter = {"name": "data_prep.index", "version": __version__}
    try:
        index = write_index(
            shard_set.directory,
            shard_set.name,
            [entry for entry, _ in shards],
            records,
            classes,
            converter=converter,
        )
    except OSError as error:
        raise UserError(
            f"{shard_set.title}: its index cannot be written: {error.strerror}"
        ) from None
    path, _ = index_paths(shard_set.directory, shard_set.name)
    print(f"{path}: {len(paths)} shards, {index.samples:,} samples")
    for left_out in _left_out(shard_set):
        print(f"note: {left_out}: was not named, and is not in {path.name}")


def _require_named(records: np.ndarray, classes: list[str]) -> None:
    highest = int(records["label"].max())
    if classes and highest >= len(classes):
        raise UserError(f"--classes-file: names {len(classes)} classes; there is a label {highest}")


def _left_out(shard_set: ShardSet) -> list[Path]:
    named = shard_set.files or []
    return [
        path
        for path in sorted(shard_set.directory.glob("*.tar"))
        if set_name(path.name) == shard_set.name and path.name not in named
    ]


def read_classes(path: Path | None) -> list[str]:
    """The class names of a file, one a line."""
    if path is None:
        return []
    try:
        return [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError) as error:
        raise UserError(f"--classes-file {path}: cannot be read: {error}") from None


def _sets_to_index(patterns: list[str], force: bool) -> list[ShardSet]:
    """All mistakes are told before the first shard is read."""
    shards = [shard for pattern in patterns for shard in resolve_shards(pattern, "SHARDS")]
    for shard in shards:
        if shard.endswith(".beton"):
            raise UserError(f"{shard}: python -m data_prep.ffcv --index {shard} writes its index")
    sets = list(group_shards(list(dict.fromkeys(shards))))
    for shard_set in sets:
        if shard_set.index is not None and not force:
            raise UserError(f"{shard_set.index}: is there already; --force writes it anew")
    return sets


@command
def main(argv: list[str] | None = None) -> None:
    assert __doc__ is not None
    parser = ArgumentParser(prog="data_prep.index", description=__doc__.split("\n")[0])
    parser.add_argument("shards", nargs="+", metavar="SHARDS", help="paths, wildcards or braces")
    parser.add_argument("--classes-file", type=Path, metavar="FILE", help="class names, one a line")
    parser.add_argument("--force", action="store_true", help="write an index that is there anew")
    add_workers_option(parser)
    arguments = parser.parse_args(argv)
    sets = _sets_to_index(arguments.shards, arguments.force)
    classes = read_classes(arguments.classes_file)
    for shard_set in sets:
        index_set(shard_set, classes, arguments.workers)


if __name__ == "__main__":
    main()
