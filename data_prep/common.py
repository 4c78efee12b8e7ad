"""What the commands share: options, text, sets of shards, and work in threads and processes."""

import argparse
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import (
    FIRST_COMPLETED,
    CancelledError,
    Future,
    ProcessPoolExecutor,
    ThreadPoolExecutor,
    wait,
)
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from lipnext_scale.data.catalog import is_remote, resolve_shards
from lipnext_scale.data.index import index_paths, set_name
from lipnext_scale.data.loader import end_with_parent
from lipnext_scale.utils.collectives import reason_of
from lipnext_scale.utils.errors import ArgumentParser, RunFailed, UserError
from lipnext_scale.utils.files import free_bytes
from lipnext_scale.utils.progress import Progress

LOOK_SECONDS = 0.25  # between two looks at the progress of worker processes
LOG_SECONDS = 10  # between two lines of progress where there is no terminal
LARGEST_SEED = 2**32 - 1
LONGEST_SIDE = 2**16 - 1  # pixels; what an index can hold
INDEX = ".index.json"
SHARD_SUFFIXES = (".tar", ".beton")
Task = TypeVar("Task")
Result = TypeVar("Result")


def command_parser(name: str, doc: str | None) -> ArgumentParser:
    """The parser of a command, whose help is its module's docstring."""
    layout = argparse.RawDescriptionHelpFormatter
    return ArgumentParser(prog=f"data_prep.{name}", description=doc, formatter_class=layout)


def number(
    lowest: float, highest: float | None = None, kind: type = int
) -> Callable[[str], int | float]:
    """An argument type: a number in a range."""
    allowed = f"at least {lowest}" if highest is None else f"{lowest} to {highest}"

    def parse(text: str) -> int | float:
        value: int | float = kind(text)
        if not lowest <= value or (highest is not None and value > highest):
            raise argparse.ArgumentTypeError(f"{text}: must be {allowed}")
        return value

    parse.__name__ = "number"  # so argparse calls what is none
    return parse


def add_workers_option(parser: argparse.ArgumentParser, what: str) -> None:
    cpus = len(os.sched_getaffinity(0))
    help = f"{what} (default: %(default)s, the CPUs)"
    parser.add_argument("--workers", type=number(1), default=cpus, metavar="N", help=help)


@contextmanager
def reading(what: object) -> Iterator[None]:
    """Any error inside is a fault of what is read: tarfile, zipfile, zlib, pickle and numpy
    raise errors of many kinds on damaged bytes."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{what}: cannot be read: {reason_of(error)}") from None


@contextmanager
def writing(what: object, hint: str = "") -> Iterator[None]:
    """Errors of the disk become the user's."""
    try:
        yield
    except BrokenPipeError:  # of the output: the command's decorator handles it
        raise
    except OSError as error:
        raise UserError(f"{what}: cannot be written: {reason_of(error)}{hint}") from None


def text_lines(path: Path) -> list[str]:
    """The stripped lines of a text file, without empty ones."""
    with reading(path):
        lines = path.read_text(encoding="utf-8").splitlines()
    return [line.strip() for line in lines if line.strip()]


def require_space(out: Path, needed: int) -> None:
    if needed > (free := free_bytes(out)):
        raise UserError(f"--out {out}: about {needed:,} bytes are needed, {free:,} are free there")


def class_counts(records: np.ndarray) -> dict[str, int]:
    """How many samples each class has, as an index stores it."""
    labels, counts = np.unique(records["label"], return_counts=True)
    return {str(label): int(count) for label, count in zip(labels, counts, strict=True)}


# --------------------------------------------------------------------------------------------------
# The sets that arguments name: an index, a directory of sets, or shards by pattern.


@dataclass(frozen=True)
class ShardSet:
    """index: its index.json if it has one. files: the shards asked for, in `directory`; None: all
    shards of the index."""

    directory: Path
    name: str
    index: Path | None
    files: list[str] | None

    @property
    def title(self) -> str:
        return str(self.index or self.directory / self.name)

    @property
    def pattern(self) -> str:
        """All shards of the set, as data.train names them."""
        numbered = not self.name.endswith(SHARD_SUFFIXES)
        return str(self.directory / (f"{self.name}-*.tar" if numbered else self.name))


def find_sets(arguments: Sequence[str]) -> list[ShardSet]:
    return [found for argument in arguments for found in _sets_of(argument)]


def _sets_of(argument: str) -> list[ShardSet]:
    path = Path(argument)
    if path.is_dir():
        return _sets_in(path)
    if argument.endswith(INDEX):
        if not path.is_file():
            raise UserError(f"{argument}: there is no such index")
        return [ShardSet(path.parent, path.name.removesuffix(INDEX), path, None)]
    return list(group_shards(resolve_shards(argument, "SHARDS")))


def _sets_in(directory: Path) -> list[ShardSet]:
    """A directory's indexed sets, then the shards in it that belong to none of them."""
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


# --------------------------------------------------------------------------------------------------
# Work in threads and processes.


def in_threads(
    function: Callable[[Task], Result],
    tasks: Sequence[Task],
    workers: int,
    progress: Progress,
) -> Iterator[Result]:
    """The results in the tasks' order. Threads, because reading, hashing and decoding release the
    interpreter's lock."""
    with closing(progress), ThreadPoolExecutor(workers) as pool:
        for result in pool.map(function, tasks):
            progress.advance()
            yield result


def in_processes(
    function: Callable[[Task, Callable[[], None]], Result],
    tasks: Sequence[Task],
    workers: int,
    advance: Callable[[int], None],
) -> Iterator[tuple[Task, Result]]:
    """Each task with its result, as soon as it is there. The function calls what it is given
    after each sample; `advance` gets the number of samples since the last look.

    By fork, so that nothing but tasks and results is sent: a collection may have a million names.
    """
    context = multiprocessing.get_context("fork")
    done, stop = context.Value("Q", 0), context.RawValue("b", 0)
    shared = (os.getpid(), function, done, stop)
    pool = ProcessPoolExecutor(workers, context, _start_worker, shared)
    shown = 0
    try:
        futures = {pool.submit(_work, task): task for task in tasks}
        left: set[Future[Any]] = set(futures)
        while left:
            ended, left = wait(left, LOOK_SECONDS, FIRST_COMPLETED)
            total = done.value
            advance(total - shown)
            shown = total
            for future in ended:
                yield futures[future], future.result()
    except BrokenProcessPool:
        raise RunFailed(
            "a worker process was killed, perhaps for lack of memory; run the same command again "
            "with fewer --workers"
        ) from None
    finally:
        stop.value = 1
        pool.shutdown(cancel_futures=True)


_worker: tuple[Any, ...]  # the function, `done` and `stop` of in_processes


def _start_worker(parent: int, *worker: Any) -> None:
    global _worker
    _worker = worker
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent sets `stop`
    end_with_parent(parent)  # it must not go on writing for one that was killed


def _work(task: Any) -> Any:
    function, done, stop = _worker

    def advance() -> None:
        with done.get_lock():
            done.value += 1
        if stop.value:  # another task has failed
            raise CancelledError

    return function(task, advance)
