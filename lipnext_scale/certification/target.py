"""What the commands certify or attack, a model and test samples; work over all the samples."""

import argparse
import hashlib
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from lipnext_scale.certification.bounds import BlockFacts, measure_blocks
from lipnext_scale.certification.certifier import load_model, run_of
from lipnext_scale.checkpoint.exports import SUFFIX, stable_parameters
from lipnext_scale.config.run_directory import RunDirectory
from lipnext_scale.data import DataConfig, TestBatch, TestSet, open_test_set
from lipnext_scale.distributed.processes import Processes
from lipnext_scale.models import LipNeXt
from lipnext_scale.utils.errors import UserError
from lipnext_scale.utils.files import atomic_file
from lipnext_scale.utils.progress import Progress


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
        return [self.weights, self.test.catalog.fingerprint(), str(self.test.resize)]


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
    """Load the model and open the test shards, which must fit it."""
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
    """The run's, changed by the arguments; only the test set counts."""
    if run is not None:
        recorded = run.recipe().data
        config = DataConfig(
            recorded.test,
            recorded.test,
            test_resize=recorded.test_resize,
            workers=recorded.workers,
            cache_dir=recorded.cache_dir,
            # Another machine than those that trained may not have their local disks.
            stage_dir=recorded.stage_dir if Path(recorded.stage_dir).is_dir() else "",
        )
    elif arguments.data is not None:
        config = DataConfig(arguments.data, arguments.data, workers=0)
    else:
        raise UserError(f"{path}: is an export and needs --data, the shards of a test set")
    data, resize, workers = arguments.data, arguments.resize, arguments.workers
    given = {"train": data, "test": data, "test_resize": resize, "workers": workers}
    return replace(config, **{key: value for key, value in given.items() if value is not None})


def _out(arguments: argparse.Namespace, path: Path, run: RunDirectory | None) -> Path:
    beside = Path(f"{str(path).removesuffix(SUFFIX)}-certificate")
    out: Path = arguments.out or (run.path if run is not None else beside)
    if out.is_file():
        raise UserError(f"--out {out}: is a file; must be a directory")
    return out


def weights_digest(model: LipNeXt) -> str:
    """Of the numbers of the network, in whatever file they are."""
    digest = hashlib.sha256(repr(model.config).encode())
    for name, tensor in sorted(stable_parameters(model).items()):
        digest.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
        plain = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        digest.update(plain.numpy().data)
    return digest.hexdigest()


# --------------------------------------------------------------------------------------------------
# Long work over the samples of a set, shared by processes and continued after a kill.
#
# The samples are cut into chunks, always the same ones. Which process works on which chunk changes
# nothing in the results, so any number of processes gives the same.

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

    Finished chunks are files in a directory in `directory` until all are done. what: everything
    that the results depend on. samples: the numbers of those to take, if not all. The other ranks
    get {}.
    """
    if samples is None:
        samples = torch.arange(len(test.catalog))
    digest = hashlib.sha256("\n".join([*what, str(samples.tolist())]).encode()).hexdigest()
    store = directory / f".{title}-{digest[:16]}"
    chunks = samples.split(CHUNK)
    files = [store / f"{number:06d}.npz" for number in range(len(chunks))]

    def finished() -> set[int]:
        with writing(store):
            store.mkdir(parents=True, exist_ok=True)
        return {number for number, file in enumerate(files) if file.is_file()}

    done = processes.on_rank0(finished)
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
        batches = iter(test.in_parts([chunks[number] for number in mine]))
        for number, batch in zip(mine, batches, strict=True):
            results = work(batch)
            with writing(store):
                write_arrays(files[number], results)
            # The other ranks are about as fast.
            progress.advance(min(len(batch.ids) * processes.world_size, progress.left))

    processes.each(all_mine)
    progress.close()
    if processes.rank:
        return {}
    parts = []
    for path in files:
        with np.load(path, allow_pickle=False) as stored:
            parts.append(dict(stored))
    shutil.rmtree(store)
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def shared_blocks(model: LipNeXt, processes: Processes) -> dict[int, BlockFacts]:
    """The facts of all blocks, on every rank; each measures its part."""
    rank, world_size = processes.rank, processes.world_size
    parts = processes.everywhere(lambda: measure_blocks(model, rank, world_size))
    return {number: facts for part in parts for number, facts in part.items()}


def write_arrays(path: Path, arrays: Arrays) -> None:
    with atomic_file(path) as file:
        np.savez(file, **arrays)  # type: ignore[arg-type]


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """A file that cannot be written is the user's error, in one line."""
    try:
        yield
    except OSError as error:
        file = error.filename or path
        raise UserError(f"{file}: cannot be written: {error.strerror}") from None
