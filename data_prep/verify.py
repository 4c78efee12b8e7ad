"""Compare shards with their index and name every fault.

    python -m data_prep.verify DIRECTORY | INDEX | SHARDS … [--decode] [--workers N]

Each shard must be there with its size and sha256; the index's records must be those of the tar's
own headers and labels. With --decode every image is decoded as in training. Shards without an index
are checked on their own. The exit code is 0 if all is sound, 1 if anything is damaged.
"""

import lipnext_scale.utils.passive  # noqa: F401

import os
from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np

from data_prep.common import (
    LOG_SECONDS,
    ShardSet,
    add_workers_option,
    command_parser,
    find_sets,
    in_threads,
    reading,
)
from lipnext_scale.data.decode import BadSample, decode
from lipnext_scale.data.index import (
    Record,
    ShardEntry,
    index_paths,
    map_records,
    read_index,
    sample_key,
    scan_tar,
    set_name,
)
from lipnext_scale.utils.errors import RunFailed, UserError, command
from lipnext_scale.utils.files import file_sha256
from lipnext_scale.utils.progress import Progress

MOST_NAMED = 20  # faults of single samples of a shard; the rest is counted


# A shard, and what its index says: None without an index, or where its records are damaged.
Task = tuple[Path, ShardEntry | None, np.ndarray | None]


def plan_set(shard_set: ShardSet) -> tuple[list[Task], list[str], list[str]]:
    """(tasks, faults, warnings): checks the index itself, and leaves the shards to the tasks."""
    directory, title, files = shard_set.directory, shard_set.title, shard_set.files
    if shard_set.index is None:
        if shard_set.name.endswith(".beton"):
            how = f"python -m data_prep.ffcv --index {title} writes it"
            raise UserError(f"{title}: has no index to be compared with; {how}")
        warning = f"{title}: has no index; nothing to compare the shards with"
        return [(directory / file, None, None) for file in files or []], [], [warning]
    try:
        index = read_index(shard_set.index)
    except UserError as error:
        return [], [str(error)], []
    tasks: list[Task] = []
    faults: list[str] = []
    records = None
    try:
        npy_path = index_paths(directory, shard_set.name)[1]
        with reading(npy_path):
            if file_sha256(npy_path) != index.records:  # numpy says little about damaged bytes
                raise UserError(f"{npy_path}: its sha256 is not that of the index")
        records = map_records(npy_path, index.samples)
    except UserError as error:
        faults.append(str(error))
    first = 0
    for entry in index.shards:
        if files is None or entry.file in files:
            own = None if records is None else records[first : first + entry.samples]
            tasks.append((directory / entry.file, entry, own))
        first += entry.samples
    known = [entry.file for entry in index.shards]
    if files is None:
        tars = [path for path in sorted(directory.glob("*.tar")) if path.name not in known]
        others = [path for path in tars if set_name(path.name) == shard_set.name]
        return tasks, faults, [f"{path}: is not in {title}, and is not checked" for path in others]
    faults += [f"{directory / file}: is not in {title}" for file in files if file not in known]
    return tasks, faults, []


def check_shard(decode: bool, task: Task) -> tuple[Path, list[str], int, int]:
    """(path, faults, samples, bytes); no fault stops the search for the others."""
    path, entry, records = task
    faults: list[str] = []
    size = samples = 0
    try:
        size = path.stat().st_size
        if entry is not None and size != entry.bytes:  # says more than a wrong sha256
            how = "it is cut off" if size < entry.bytes else "it has grown"
            faults.append(f"has {size} bytes, the index says {entry.bytes}: {how}")
        elif entry is not None and file_sha256(path) != entry.sha256:
            faults.append("its sha256 is not that of the index: bytes have changed")
        found = None
        if path.suffix != ".beton":  # which has no headers to compare with
            try:
                found = scan_tar(path)[0]
            except UserError as error:
                faults.append(str(error).removeprefix(f"{path}: "))
        if records is not None and found is not None:
            faults += _limited(_differences(path, records, found))
        best = found if records is None else records
        if best is not None:
            samples = len(best)
            faults += _limited(_undecodable(path, best)) if decode else []
    except FileNotFoundError:
        faults.append("is missing")
    except OSError as error:
        faults.append(f"cannot be read: {error.strerror or error}")
    return path, faults, samples, size


def _differences(path: Path, records: np.ndarray, found: np.ndarray) -> Iterator[str]:
    """The index's records against the tar's own headers and labels."""
    if len(records) != len(found):
        yield f"holds {len(found)} samples, the index says {len(records)}"
        return
    fields = ["offset", "size", "label"]  # the headers have no others
    for number in np.flatnonzero(records[fields] != found[fields]):
        key = sample_key(path, Record(*found[number].item()))
        yield f"sample {key} has another place, size or label than the index says"


def _undecodable(path: Path, records: np.ndarray) -> Iterator[str]:
    """The samples that training would refuse."""
    with open(path, "rb", buffering=0) as file:
        for values in records:
            record = Record(*values.item())
            encoded = os.pread(file.fileno(), record.size, record.offset)
            try:
                height, width, _ = decode(encoded, record).shape
                if record.height and (height, width) != (record.height, record.width):
                    raise BadSample(
                        f"is {height}×{width}, the index says {record.height}×{record.width}"
                    )
            except BadSample as error:
                yield f"sample {sample_key(path, record)} {error}"


def _limited(faults: Iterator[str]) -> Iterator[str]:
    yield from islice(faults, MOST_NAMED)
    if more := sum(1 for _ in faults):
        yield f"{more} more of its samples have such faults"


def verify(sets: list[ShardSet], decode: bool, workers: int) -> tuple[int, str]:
    """(the number of faults, a summary); prints each fault as it is found."""
    plans = [plan_set(shard_set) for shard_set in sets]
    tasks = [task for own, _, _ in plans for task in own]
    progress = Progress(len(tasks), unit="shard", title="verifying", log_seconds=LOG_SECONDS)
    for _, faults, warnings in plans:
        for line in [f"warning: {w}" for w in warnings] + [f"fault: {f}" for f in faults]:
            progress.say(line)
    count, samples, size = sum(len(faults) for _, faults, _ in plans), 0, 0
    check = partial(check_shard, decode)
    for path, found, own_samples, own_size in in_threads(check, tasks, workers, progress):
        count, samples, size = count + len(found), samples + own_samples, size + own_size
        for fault in found:
            progress.say(f"fault: {path}: {fault}")
    return count, f"{len(tasks)} shards, {samples:,} samples, {size:,} bytes"


@command
def main(argv: list[str] | None = None) -> None:
    parser = command_parser("verify", __doc__)
    parser.add_argument("sets", nargs="+", metavar="SET", help="an index, a directory or shards")
    parser.add_argument("--decode", action="store_true", help="decode every image too")
    add_workers_option(parser, "shards that are checked at a time")
    arguments = parser.parse_args(argv)
    faults, summary = verify(find_sets(arguments.sets), arguments.decode, arguments.workers)
    if faults:
        raise RunFailed(f"{faults} fault{'s' if faults > 1 else ''} in {summary}")
    print(f"sound: {summary}{', every image decoded' if arguments.decode else ''}")


if __name__ == "__main__":
    main()
