"""What a command certifies or attacks: a model and the samples, as its arguments say."""

import argparse
import hashlib
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from lipnext_scale.certify.bounds import BlockFacts, measure_blocks
from lipnext_scale.certify.certifier import load_model, run_of
from lipnext_scale.data import DataConfig, TestBatch, TestSet, open_test_set
from lipnext_scale.errors import UserError
from lipnext_scale.files import atomic_file
from lipnext_scale.models import LipNeXt
from lipnext_scale.parallel.processes import Processes
from lipnext_scale.progress import Progress
from lipnext_scale.run_directory import RunDirectory
from lipnext_scale.weights import SUFFIX, stable_parameters


@dataclass(frozen=True)
class EvaluationTarget:
    """model: as stored, on the CPU. out: where results go. data: the pattern of the shards."""

    path: Path
    model: LipNeXt
    weights: str  # a digest of all weights and of the architecture
    test: TestSet
    data: str
    out: Path

    def identity(self) -> list[str]:
        """What results depend on, beside what is done."""
        resize = str(self.test.resize)
        return [self.weights, self.test.catalog.fingerprint(), resize]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--run", metavar="DIR", help="a run directory, or one of its checkpoints")
    # torchrun takes --run for an option of its own.
    parser.add_argument("--model", metavar="PATH", help="the same, or an export; it needs --data")
    parser.add_argument("--data", metavar="SHARDS", help="test shards (default: those of the run)")
    parser.add_argument(
        "--resize", type=int, help="short side before the centre is cut out (default: the run's)"
    )
    parser.add_argument("--workers", type=int, help="processes that decode (default: the run's)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="where to write (default: the run)")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda (default auto)")


def open_target(arguments: argparse.Namespace) -> EvaluationTarget:
    """Load the model, open the test shards, and see that they fit together."""
    if (arguments.run is None) == (arguments.model is None):
        raise UserError("give either --run DIR or --model PATH")
    path = Path(arguments.run or arguments.model)
    model = load_model(path)
    run = run_of(path)
    config = _data_config(arguments, path, run)
    takes = model.config
    if arguments.resize is not None and 0 < arguments.resize < takes.image_size:
        raise UserError(f"--resize {arguments.resize}: must be 0 or at least {takes.image_size}")
    key = "--data" if arguments.data else "data.test"
    test = open_test_set(config, takes.image_size, takes.in_channels, takes.num_classes, key)
    return EvaluationTarget(
        path, model, weights_digest(model), test, config.test, _out(arguments, path, run)
    )


def _data_config(arguments: argparse.Namespace, path: Path, run: RunDirectory | None) -> DataConfig:
    """That of the run with what the arguments change; only the test set counts."""
    recorded = run.recipe().data if run is not None else None
    pattern = arguments.data or (recorded.test if recorded is not None else None)
    if pattern is None:
        raise UserError(f"{path}: is an export and needs --data, the shards of a test set")
    resize, workers = arguments.resize, arguments.workers
    cache_dir = stage_dir = ""
    if recorded is not None:
        cache_dir = recorded.cache_dir
        # This may be another machine than those that trained, without their disks.
        stage_dir = recorded.stage_dir if Path(recorded.stage_dir).is_dir() else ""
        resize = recorded.test_resize if resize is None else resize
        workers = recorded.workers if workers is None else workers
    return DataConfig(
        pattern,
        pattern,
        test_resize=resize or 0,
        workers=workers or 0,
        cache_dir=cache_dir,
        stage_dir=stage_dir,
    )


def _out(arguments: argparse.Namespace, path: Path, run: RunDirectory | None) -> Path:
    if arguments.out is not None:
        out = arguments.out
    elif run is not None:
        out = run.path
    else:
        out = Path(f"{str(path).removesuffix(SUFFIX)}-certificate")
    if out.is_file():
        raise UserError(f"--out {out}: is a file; must be a directory")
    return out


def weights_digest(model: LipNeXt) -> str:
    """Of the numbers of the network, whatever file they came in."""
    digest = hashlib.sha256(repr(model.config).encode())
    for name, tensor in sorted(stable_parameters(model).items()):
        digest.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
        plain = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        digest.update(plain.numpy().data)
    return digest.hexdigest()


# --------------------------------------------------------------------------------------------------
# Long work over the samples of a set, shared by processes and continued after a kill.
#
# The samples are cut into chunks, always the same ones. Which process works on which chunk
# changes nothing in what comes out, so any number of processes gives the same, also where some
# chunks were done by an earlier attempt.

Result = TypeVar("Result")
CHUNK = 256
Arrays = dict[str, np.ndarray]  # of the samples of a chunk, in their order


def map_test_set(
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
    done = processes.on_rank0(lambda: _writable(store.begin))
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
