"""Long work over the samples of a set, shared by processes and continued after a kill.

The samples are cut into chunks, always the same ones. Which process works on which chunk changes
nothing in what comes out, so any number of processes gives the same, also where some chunks were
done by an earlier attempt.
"""

import hashlib
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from lipnext_scale.certify.layers import BlockFacts, measure_blocks
from lipnext_scale.data import TestBatch, TestSet
from lipnext_scale.errors import UserError
from lipnext_scale.files import atomic_file
from lipnext_scale.models import LipNeXt
from lipnext_scale.parallel.processes import Processes
from lipnext_scale.progress import Progress

Result = TypeVar("Result")
CHUNK = 256
Arrays = dict[str, np.ndarray]  # of the samples of a chunk, in their order


def work_through(
    test: TestSet,
    directory: Path,
    what: list[str],
    work: Callable[[TestBatch], Arrays],
    processes: Processes,
    title: str,
    samples: Tensor | None = None,
) -> Arrays:
    """work(batch) for every chunk of the set; all results in the order of the samples, on rank 0.

    samples: the numbers of those to take, if not all.

    Finished chunks lie in a directory in `directory` until all are; `what` are all things that the
    results depend on. The other ranks get nothing.
    """
    if samples is None:
        samples = torch.arange(len(test.catalog))
    what = [*what, str(samples.tolist())]
    digest = hashlib.sha256("\n".join(what).encode()).hexdigest()[:16]
    store = _Store(directory / f".{title}-{digest}")
    chunks = samples.split(CHUNK)
    done = processes.first_does(lambda: _writable(store.begin))
    todo = [number for number in range(len(chunks)) if number not in done]
    mine = todo[processes.rank :: processes.world_size]
    progress = Progress(
        len(samples),
        done=sum(len(chunks[number]) for number in done),
        unit="image",
        title=title,
        log_seconds=10,
        silent=processes.rank > 0,
    )

    def all_mine() -> None:
        batches: Iterator[TestBatch] = iter(test.in_parts([chunks[number] for number in mine]))
        for number, batch in zip(mine, batches, strict=True):
            results = work(batch)
            _writable(partial(store.write, number, results))
            # The others are as fast as we are.
            progress.advance(min(len(batch.ids) * processes.world_size, progress.left))

    processes.each(all_mine)
    progress.close()
    if processes.rank:
        return {}
    results = store.read(len(chunks))
    store.remove()
    return results


def shared_blocks(model: LipNeXt, processes: Processes) -> dict[int, BlockFacts]:
    """The facts of all blocks, on every process; each measures its part."""
    rank, world_size = processes.rank, processes.world_size
    parts = processes.everywhere(lambda: measure_blocks(model, rank, world_size))
    return {number: facts for part in parts for number, facts in part.items()}


def _writable(action: Callable[[], Result]) -> Result:
    try:
        return action()
    except OSError as error:
        raise UserError(f"{error.filename}: cannot be written: {error.strerror}") from None


class _Store:
    """A file for each finished chunk."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def begin(self) -> set[int]:
        """Make the directory; which chunks are there already."""
        self._directory.mkdir(parents=True, exist_ok=True)
        return {int(path.stem) for path in self._directory.glob("*.npz")}

    def write(self, number: int, arrays: Arrays) -> None:
        with atomic_file(self._file(number)) as file:
            np.savez(file, **arrays)  # type: ignore[arg-type]

    def read(self, count: int) -> Arrays:
        parts = []
        for number in range(count):
            with np.load(self._file(number), allow_pickle=False) as stored:
                parts.append(dict(stored))
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}

    def remove(self) -> None:
        shutil.rmtree(self._directory)

    def _file(self, number: int) -> Path:
        return self._directory / f"{number:06d}.npz"
