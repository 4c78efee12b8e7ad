"""What a command certifies or attacks: a model and the samples, as its arguments say."""

import argparse
import hashlib
from dataclasses import dataclass
from pathlib import Path

import torch

from lipnext_scale.certify.loading import load_model, run_of
from lipnext_scale.data import DataConfig, TestSet, open_test_set
from lipnext_scale.errors import UserError
from lipnext_scale.models import LipNeXt
from lipnext_scale.run_directory import RunDirectory
from lipnext_scale.weights import SUFFIX, stable_parameters


@dataclass(frozen=True)
class Subject:
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


def open_subject(arguments: argparse.Namespace) -> Subject:
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
    return Subject(
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
