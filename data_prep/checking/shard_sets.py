"""The sets that a command's arguments mean: an index, a directory of sets, or shards by pattern."""

import argparse
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TypeVar

import numpy as np

from lipnext_scale.data.catalog import is_remote, resolve_shards
from lipnext_scale.data.decode import BadSample, channels_of, decode
from lipnext_scale.data.index import (
    Record,
    ShardEntry,
    index_paths,
    map_records,
    sample_key,
    scan_tar,
    set_name,
)
from lipnext_scale.errors import UserError
from lipnext_scale.files import file_sha256
from lipnext_scale.progress import Progress

INDEX = ".index.json"
SHARD_SUFFIXES = (".tar", ".beton")
# Seconds between two lines of progress where there is no terminal.
LOG_SECONDS = 10.0
Task = TypeVar("Task")
Result = TypeVar("Result")


@dataclass(frozen=True)
class ShardSet:
    """index: its index.json if it has one. files: the shards asked for, in `directory`; None: all
    that the index knows."""

    directory: Path
    name: str
    index: Path | None
    files: list[str] | None

    @property
    def title(self) -> str:
        return str(self.index or self.directory / self.name)


def find_sets(arguments: Sequence[str]) -> list[ShardSet]:
    """The sets of all arguments; a mistake in any is the user's."""
    return [found for argument in arguments for found in _sets_of(argument)]


def _sets_of(argument: str) -> list[ShardSet]:
    path = Path(argument)
    if path.is_dir():
        return _sets_in(path)
    if argument.endswith(INDEX):
        if not path.is_file():
            raise UserError(f"{argument}: there is no such index")
        return [ShardSet(path.parent, path.name.removesuffix(INDEX), path, None)]
    shards = resolve_shards(argument, "SHARDS")
    return list(group_shards(shards))


def _sets_in(directory: Path) -> list[ShardSet]:
    """A directory's indexed sets, then the shards in it that no set claims."""
    found = [s for path in sorted(directory.glob(f"*{INDEX}")) for s in _sets_of(str(path))]
    known = {shard_set.name for shard_set in found}
    shards = [p for p in sorted(directory.iterdir()) if p.suffix in SHARD_SUFFIXES and p.is_file()]
    found += group_shards([str(path) for path in shards if set_name(path.name) not in known])
    if not found:
        raise UserError(f"{directory}: holds neither an index of shards nor a .tar")
    return found


def group_shards(shards: Sequence[str]) -> Iterator[ShardSet]:
    """Local shards by the set that they belong to."""
    groups: dict[tuple[Path, str], list[str]] = {}
    for shard in shards:
        if is_remote(shard):
            raise UserError(f"{shard}: is not on this machine; copy it here first")
        path = Path(shard)
        groups.setdefault((path.parent, set_name(path.name)), []).append(path.name)
    for (directory, name), files in groups.items():
        index, _ = index_paths(directory, name)
        yield ShardSet(directory, name, index if index.is_file() else None, files)


def add_workers_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--workers",
        type=_positive,
        default=len(os.sched_getaffinity(0)),
        metavar="N",
        help="shards that are worked on at a time (default: %(default)s, the CPUs)",
    )


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 on")
    return int(text)


def in_threads(
    function: Callable[[Task], Result],
    tasks: Sequence[Task],
    workers: int,
    progress: Progress,
    report: Callable[[Result], None] = lambda result: None,
) -> list[Result]:
    """The results in the tasks' order; `report` is called for each as it comes.

    Threads, because nearly all time is spent where Python lets go of its lock: reading, hashing,
    decoding. Nothing is left behind when the command is killed.
    """
    with ThreadPoolExecutor(max_workers=max(workers, 1)) as pool:
        futures = [pool.submit(function, task) for task in tasks]
        try:
            for future in as_completed(futures):
                report(future.result())
                progress.advance()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return [future.result() for future in futures]


# --------------------------------------------------------------------------------------------------
# What can be wrong with one shard, told fault by fault.

# Faults of single samples that are told by name; the rest of a ruined shard is counted.
MOST_NAMED = 20


@dataclass(frozen=True)
class ShardTask:
    """A shard to look at. entry: what its index says, None without one. records: the index.npy,
    and of its records the number in all and the first of this shard; None where it is damaged."""

    path: Path
    decode: bool
    entry: ShardEntry | None = None
    records: Path | None = None
    samples_in_all: int = 0
    first: int = 0

    def own_records(self) -> np.ndarray | None:
        if self.entry is None or self.records is None:
            return None
        return map_records(self.records, self.samples_in_all)[self.first :][: self.entry.samples]


@dataclass
class ShardReport:
    path: Path
    samples: int = 0
    bytes: int = 0
    faults: list[str] = field(default_factory=list)


def check_shard(task: ShardTask) -> ShardReport:
    """All faults of a shard; none stops the search for the others."""
    report = ShardReport(task.path)
    try:
        _check(task, report)
    except OSError as error:
        report.faults.append(f"cannot be read: {error.strerror or error}")
    return report


def _check(task: ShardTask, report: ShardReport) -> None:
    if not task.path.exists():
        report.faults.append("is missing")
        return
    report.bytes = task.path.stat().st_size
    report.samples = task.entry.samples if task.entry else 0
    records = task.own_records()
    if task.entry is not None:
        report.faults += _content_faults(task.path, task.entry)
        if records is not None:
            report.faults += _count_faults(task.entry, records)
    if task.path.suffix == ".beton":
        found = records  # FFCV's own tables stand for no tar's headers
    else:
        found = _scanned(task.path, report)
    if records is not None and found is not None:
        report.faults += _limited(_differences(task.path, records, found))
    best = records if records is not None else found
    if best is not None:
        report.samples = len(best)
        report.faults += _beyond_end(task.path, best, report.bytes)
        if task.decode:
            report.faults += _limited(_undecodable(task.path, best, report.bytes))


def _scanned(path: Path, report: ShardReport) -> np.ndarray | None:
    try:
        return scan_tar(path)[0]
    except UserError as error:
        report.faults.append(str(error).removeprefix(f"{path}: "))
        return None


def _content_faults(path: Path, entry: ShardEntry) -> Iterator[str]:
    """The file against its index: a wrong length says more than the wrong sha256 it brings."""
    size = path.stat().st_size
    if size != entry.bytes:
        how = "it is cut off" if size < entry.bytes else "it has grown"
        yield f"has {size} bytes, the index says {entry.bytes}: {how}"
    elif file_sha256(path) != entry.sha256:
        yield "its sha256 is not that of the index: bytes in it have changed"


def _count_faults(entry: ShardEntry, records: np.ndarray) -> Iterator[str]:
    counts = class_counts(records)
    for label in sorted(counts.keys() | entry.class_counts.keys()):
        says, has = entry.class_counts.get(label, 0), counts.get(label, 0)
        if entry.class_counts and says != has:
            yield f"has {has} samples of class {label}, the index says {says}"


def _differences(path: Path, records: np.ndarray, found: np.ndarray) -> Iterator[str]:
    """The index's records against the tar's own headers and labels."""
    if len(records) != len(found):
        yield f"holds {len(found)} samples, the index says {len(records)}"
        return
    fields = ["offset", "size", "label"]  # the rest the headers do not tell
    for number in np.flatnonzero(records[fields] != found[fields]):
        says, has = (Record(*table[number].item()) for table in (records, found))
        parts = [
            f"the {part} {getattr(has, part)}, not {getattr(says, part)}"
            for part in fields
            if getattr(says, part) != getattr(has, part)
        ]
        yield f"sample {sample_key(path, has)} has {', '.join(parts)} as the index says"


def _beyond_end(path: Path, records: np.ndarray, size: int) -> Iterator[str]:
    beyond = np.flatnonzero(np.minimum(records["offset"], size) + records["size"] > size)
    if len(beyond):
        first = sample_key(path, Record(*records[beyond[0]].item()))
        yield f"{len(beyond)} samples lie beyond its end, the first is {first}"


def _undecodable(path: Path, records: np.ndarray, size: int) -> Iterator[str]:
    """The samples that lie in the shard and that training would refuse."""
    with open(path, "rb", buffering=0) as file:
        for values in records:
            record = Record(*values.item())
            if record.offset + record.size > size:
                continue
            if fault := _decoding_fault(file.fileno(), record):
                yield f"sample {sample_key(path, record)} {fault}"


def _decoding_fault(descriptor: int, record: Record) -> str:
    """Why training could not use the sample; "" if it can."""
    encoded = os.pread(descriptor, record.size, record.offset)
    shape = (record.height, record.width, record.channels)
    try:
        channels = record.channels or channels_of(encoded, record.kind)
        pixels = decode(encoded, record.kind, channels, shape)
    except BadSample as error:
        return str(error)
    if record.height and pixels.shape[:2] != shape[:2]:
        height, width, _ = pixels.shape
        return f"is {height}×{width}, the index says {record.height}×{record.width}"
    return ""


def _limited(faults: Iterator[str]) -> list[str]:
    told = list(islice(faults, MOST_NAMED))
    more = sum(1 for _ in faults)
    return told + ([f"{more} more of its samples have such faults"] if more else [])


def class_counts(records: np.ndarray) -> Counter[str]:
    """How many samples each class has, as an index tells it."""
    labels, counts = np.unique(records["label"], return_counts=True)
    return Counter({str(label): int(count) for label, count in zip(labels, counts, strict=True)})
