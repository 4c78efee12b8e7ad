"""Shards made one after the other, or several at a time in worker processes."""

import base64
import fcntl
import json
import multiprocessing
import os
import shutil
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.sources.listing import Collection
from data_prep.writing.encoding import BadImage, ImageRules, StoredImage, stored_image
from data_prep.writing.shards import TarWriter, sample_key
from lipnext_scale.data.index import KINDS, RECORD, ShardEntry
from lipnext_scale.errors import RunFailed, UserError
from lipnext_scale.files import PARTIAL, atomic_file, write_atomically

# --------------------------------------------------------------------------------------------------
# What of a set is written already, so that a conversion that was killed goes on where it was.
#
#     train.journal/plan.json      what is being written: settings, source, classes
#     train.journal/000012.json    shard 12 is finished: its size, sha256, records, what is left out
#
# A shard is noted after it is renamed into place. One without its note is written again, to the
# same bytes. The journal goes when the index is there.

LOCK = ".data_prep.lock"
# Seconds. Workers of a conversion that was killed hold its lock until they have noticed.
PATIENCE = 5.0


@dataclass(frozen=True)
class ShardNote:
    """A finished shard. `changes` counts what was done to images; `skipped` are the bad ones."""

    entry: ShardEntry
    records: np.ndarray
    skipped: list[dict[str, str]] = field(default_factory=list)
    changes: dict[str, int] = field(default_factory=dict)

    def to_json(self) -> bytes:
        packed = base64.b64encode(self.records.tobytes()).decode()
        values = {"entry": asdict(self.entry), "records": packed}
        return json.dumps(values | {"skipped": self.skipped, "changes": self.changes}).encode()

    @staticmethod
    def from_json(text: bytes) -> "ShardNote":
        values = json.loads(text)
        records = np.frombuffer(base64.b64decode(values["records"]), dtype=RECORD)
        entry = ShardEntry(**values["entry"])
        return ShardNote(entry, records, values["skipped"], values["changes"])


class Journal:
    """The journal of the set `name` in the directory `out`."""

    def __init__(self, out: Path, name: str) -> None:
        self._out, self._name = out, name
        self.directory = out / f"{name}.journal"

    def plan(self) -> dict[str, Any] | None:
        """What the unfinished set here is, None if there is none."""
        damaged = UserError(f"{self.directory}: is damaged; remove it and the set's shards")
        try:
            plan = json.loads((self.directory / "plan.json").read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, ValueError):
            raise damaged from None
        if not isinstance(plan, dict):
            raise damaged
        return plan

    def begin(self, plan: dict[str, Any]) -> None:
        aside = self.directory.with_name(self.directory.name + PARTIAL)
        aside.mkdir()
        write_atomically(aside / "plan.json", json.dumps(plan).encode())
        aside.rename(self.directory)

    def note(self, shard: int, note: ShardNote) -> None:
        write_atomically(self._note_path(shard), note.to_json())

    def finished(self, shards: int) -> dict[int, ShardNote]:
        """The notes of shards that are here in their full size.

        A shard is synced before it has its name, so its bytes are not read again.
        """
        found = {}
        for shard in range(shards):
            try:
                note = ShardNote.from_json(self._note_path(shard).read_bytes())
                if (self._out / note.entry.file).stat().st_size == note.entry.bytes:
                    found[shard] = note
            except FileNotFoundError:
                continue
            except (OSError, ValueError, KeyError, TypeError):
                damaged = f"{self._note_path(shard)}: is damaged; remove it to write its shard anew"
                raise UserError(damaged) from None
        return found

    def remove(self) -> None:
        """Renamed first: a journal that is partly removed would have lost its plan or its notes."""
        aside = self.directory.with_name(self.directory.name + PARTIAL)
        self.directory.rename(aside)
        shutil.rmtree(aside)

    def clean(self) -> None:
        """Remove what a killed conversion of this set left half-written."""
        shutil.rmtree(self.directory.with_name(self.directory.name + PARTIAL), ignore_errors=True)
        of_set = (f"{self._name}-*.tar{PARTIAL}", f"{self._name}.index.*{PARTIAL}")
        for pattern in (*of_set, f"{self.directory.name}/*{PARTIAL}"):
            for path in self._out.glob(pattern):
                path.unlink()

    def _note_path(self, shard: int) -> Path:
        return self.directory / f"{shard:06d}.json"


@contextmanager
def only_conversion_in(out: Path) -> Iterator[None]:
    """Keep other conversions out of the directory until this one and all its workers have ended.

    Forked workers share the lock, so it is not free before the last of them is gone.
    """
    path, deadline = out / LOCK, time.monotonic() + PATIENCE
    while (descriptor := _locked(path)) is None:
        if time.monotonic() > deadline:
            raise UserError(
                f"--out {out}: another conversion is writing there; wait for it, or give another "
                "directory"
            )
        time.sleep(0.05)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(descriptor)


def _locked(path: Path) -> int | None:
    """A descriptor that holds the lock. It may have been of a file that was removed meanwhile, and
    then keeps nobody out: look whether it still has its name."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(descriptor), path.stat()):
            return descriptor
    except (BlockingIOError, FileNotFoundError):
        pass
    os.close(descriptor)
    return None


SUFFIXES = {"jpeg": "jpg", "png": "png"}
LOOK_SECONDS = 0.25  # how often progress is looked at


class _Stopped(Exception):
    """Another shard failed: this one need not be finished."""


@dataclass(frozen=True)
class ShardMaker:
    """Makes the shards of one set: whatever a worker has to know, beside the numbers."""

    collection: Collection
    out: Path
    name: str
    rules: ImageRules

    def make(self, shard: int, numbers: np.ndarray, report: Callable[[int], None]) -> ShardNote:
        """Write the samples of these numbers as a shard, and note it; `report` hears how many are
        done."""
        path = self.out / f"{self.name}-{shard:06d}.tar"
        skipped: list[dict[str, str]] = []
        changes: Counter[str] = Counter()
        with writing(path):
            with atomic_file(path) as file:
                tar = TarWriter(file)
                records = np.array(list(self._fill(tar, numbers, skipped, changes, report)), RECORD)
                tar.end()
            counts = _class_counts(records)
            entry = ShardEntry(path.name, len(records), tar.bytes, tar.sha256, counts)
            note = ShardNote(entry, records, skipped, dict(sorted(changes.items())))
            Journal(self.out, self.name).note(shard, note)
        return note

    def _fill(
        self,
        tar: TarWriter,
        numbers: np.ndarray,
        skipped: list[dict[str, str]],
        changes: Counter[str],
        report: Callable[[int], None],
    ) -> Iterator[tuple[int, ...]]:
        """Add the samples to the tar; their records, and what was skipped and changed."""
        for done, number in enumerate(numbers.tolist(), start=1):
            try:
                image = stored_image(self._loaded(number), self.rules)
            except BadImage as error:
                name = printable(self.collection.name(number))
                skipped.append({"name": name, "reason": printable(str(error))})
            else:
                yield self._add(tar, number, image)
                changes.update([image.change] if image.change else [])
            report(done)

    def _loaded(self, number: int) -> bytes | np.ndarray:
        try:
            return self.collection.load(number)
        except OSError as error:
            name = printable(self.collection.name(number))
            raise UserError(f"{name}: cannot be read: {error.strerror or error}") from None

    def _add(self, tar: TarWriter, number: int, image: StoredImage) -> tuple[int, ...]:
        label = self.collection.label(number)
        key = sample_key(number, len(self.collection), self.collection.name(number))
        tar.add(f"{key}.cls", str(label).encode())
        place = tar.add(f"{key}.{SUFFIXES[image.kind]}", image.content)
        shape = (image.height, image.width, image.channels)
        return (place, len(image.content), label, *shape, KINDS[image.kind], 0)


def _class_counts(records: np.ndarray) -> dict[str, int]:
    labels, counts = np.unique(records["label"], return_counts=True)
    return {str(label): int(count) for label, count in zip(labels, counts, strict=True)}


def printable(name: str) -> str:
    """A name that fits a line of any terminal and a JSON file, whatever bytes it is made of."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in name)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """The disk's troubles, told to the user."""
    try:
        yield
    except BrokenPipeError:  # of what we print; whoever started the command deals with it
        raise
    except OSError as error:
        raise UserError(
            f"{path}: cannot be written: {error.strerror or error}; finished shards are kept, the "
            "same command goes on from there"
        ) from None


def make_shards(
    maker: ShardMaker,
    jobs: Mapping[int, np.ndarray],
    workers: int,
    advance: Callable[[int], None],
) -> Iterator[tuple[int, ShardNote]]:
    """(number, note) of each shard as it is finished; `advance` hears of samples done since."""
    if min(workers, len(jobs)) > 1:
        yield from _in_processes(maker, jobs, min(workers, len(jobs)), advance)
    else:
        for shard, numbers in jobs.items():
            yield shard, maker.make(shard, numbers, lambda done: advance(1))


def _in_processes(
    maker: ShardMaker,
    jobs: Mapping[int, np.ndarray],
    workers: int,
    advance: Callable[[int], None],
) -> Iterator[tuple[int, ShardNote]]:
    """By fork, so that a collection of a million names is there without being sent."""
    context = multiprocessing.get_context("fork")
    done, stop = context.RawArray("Q", max(jobs) + 1), context.RawValue("b", 0)
    pool = ProcessPoolExecutor(workers, context, _start_worker, (maker, done, stop))
    shown = 0
    try:
        shards = {pool.submit(_work, shard, numbers): shard for shard, numbers in jobs.items()}
        left: set[Future[ShardNote]] = set(shards)
        while left:
            ended, left = wait(left, LOOK_SECONDS, FIRST_COMPLETED)
            if (total := sum(done)) > shown:
                advance(total - shown)
                shown = total
            for future in ended:
                yield shards[future], future.result()
    except BrokenProcessPool:
        raise RunFailed(
            "a worker process was killed, perhaps for want of memory; finished shards are kept: "
            "the same command, with fewer --workers, goes on from there"
        ) from None
    finally:
        stop.value = 1
        pool.shutdown(cancel_futures=True)


_worker: tuple[ShardMaker, Any, Any]


def _start_worker(maker: ShardMaker, done: Any, stop: Any) -> None:
    global _worker
    _worker = maker, done, stop
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent says when to stop
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """A worker must not go on writing for a parent that was killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _work(shard: int, numbers: np.ndarray) -> ShardNote:
    maker, done, stop = _worker

    def report(count: int) -> None:
        done[shard] = count
        if stop.value:
            raise _Stopped

    return maker.make(shard, numbers, report)
