"""The sets that a command's arguments mean: an index, a directory of sets, or shards by pattern."""

import argparse
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from lipnext_scale.data.index import index_paths, set_name
from lipnext_scale.data.shards import is_remote, resolve_shards
from lipnext_scale.errors import UserError
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
