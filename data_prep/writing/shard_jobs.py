"""Shards made one after the other, or several at a time in worker processes."""

import multiprocessing
import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.sources.collection import Collection
from data_prep.writing.encoding import BadImage, ImageRules, StoredImage, stored_image
from data_prep.writing.journal import Journal, ShardNote
from data_prep.writing.shards import TarWriter, sample_key
from lipnext_scale.data.index import KINDS, RECORD, ShardEntry
from lipnext_scale.errors import RunFailed, UserError
from lipnext_scale.files import atomic_file

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
