"""Write the index of shards that others have made, so that training need not scan them.

    python -m data_prep.index SHARDS … [--classes-file FILE] [--force] [--workers N]

SHARDS are WebDataset tars on this machine: paths, wildcards or braces. They are not changed. For
train-000000.tar, train-000001.tar, … train.index.json and train.index.npy are written beside them,
for other.tar other.tar.index.json and other.tar.index.npy.
"""

import lipnext_scale.utils.passive  # noqa: F401

import os
from pathlib import Path

import numpy as np

from data_prep.common import (
    LOG_SECONDS,
    LONGEST_SIDE,
    ShardSet,
    add_workers_option,
    class_counts,
    command_parser,
    group_shards,
    in_threads,
    text_lines,
    writing,
)
from lipnext_scale import __version__
from lipnext_scale.data.catalog import resolve_shards
from lipnext_scale.data.decode import BadSample, image_header
from lipnext_scale.data.index import KINDS, Record, ShardEntry, sample_key, scan_tar, write_index
from lipnext_scale.utils.errors import UserError, command
from lipnext_scale.utils.files import file_sha256
from lipnext_scale.utils.progress import Progress


def index_shard(path: Path) -> tuple[ShardEntry, np.ndarray]:
    """A shard's entry in the index, and its records."""
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
    return ShardEntry(path.name, len(records), size, digest, class_counts(records)), records


def _with_header(record: Record, encoded: bytes) -> Record:
    """The record with what the image itself says: its kind too, whatever its name ends in."""
    kind, height, width, channels = image_header(encoded)
    if max(height, width) > LONGEST_SIDE:
        raise BadSample(f"is {height}×{width}; at most {LONGEST_SIDE} pixels a side")
    return record._replace(height=height, width=width, channels=channels, kind=KINDS[kind])


def index_set(shard_set: ShardSet, classes: list[str], workers: int) -> None:
    files, title = shard_set.files or [], shard_set.title
    paths = [shard_set.directory / file for file in files]
    progress = Progress(len(paths), unit="shard", title=shard_set.name, log_seconds=LOG_SECONDS)
    shards = list(in_threads(index_shard, paths, workers, progress))
    records = np.concatenate([own for _, own in shards])
    if not len(records):
        raise UserError(f"{title}: the shards hold no samples")
    highest = int(records["label"].max())
    if classes and highest >= len(classes):
        raise UserError(f"--classes-file: names {len(classes)} classes; there is a label {highest}")
    converter, entries = {"name": "data_prep.index", "version": __version__}, [e for e, _ in shards]
    directory, name = shard_set.directory, shard_set.name
    with writing(f"{title}: its index"):
        write_index(directory, name, entries, records, classes, converter=converter)
    path = directory / f"{name}.index.json"
    print(f"{path}: {len(paths)} shards, {len(records):,} samples")


def sets_to_index(patterns: list[str], force: bool) -> list[ShardSet]:
    """Mistakes are found before the first shard is read."""
    shards = [shard for pattern in patterns for shard in resolve_shards(pattern, "SHARDS")]
    for shard in shards:
        if shard.endswith(".beton"):
            raise UserError(f"{shard}: python -m data_prep.ffcv --index {shard} writes its index")
    sets = list(group_shards(list(dict.fromkeys(shards))))
    for shard_set in sets:
        if shard_set.index is not None and not force:
            raise UserError(f"{shard_set.index}: is there already; --force replaces it")
    return sets


@command
def main(argv: list[str] | None = None) -> None:
    parser = command_parser("index", __doc__)
    parser.add_argument("shards", nargs="+", metavar="SHARDS", help="paths, wildcards or braces")
    parser.add_argument("--classes-file", type=Path, metavar="FILE", help="class names, one a line")
    parser.add_argument("--force", action="store_true", help="replace an index that is there")
    add_workers_option(parser, "shards that are read at a time")
    arguments = parser.parse_args(argv)
    sets = sets_to_index(arguments.shards, arguments.force)
    file = arguments.classes_file
    classes = text_lines(file) if file else []
    for shard_set in sets:
        index_set(shard_set, classes, arguments.workers)


if __name__ == "__main__":
    main()
