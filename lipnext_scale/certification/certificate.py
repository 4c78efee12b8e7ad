"""The certificate of a model on a test set: the target, the work over its samples, what is written.

Nothing in certificate.json depends on how many processes worked, how long, or where.
"""

import argparse
import csv
import hashlib
import io
import json
import math
import platform
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import lipnext_scale
from lipnext_scale.certification.certifier import (
    PROOF,
    Facts,
    layer_count,
    load_model,
    measure_layers,
    run_of,
)
from lipnext_scale.checkpoint import latest_checkpoint
from lipnext_scale.checkpoint.exports import IN_ZOO, SUFFIX, export_data, stable_parameters
from lipnext_scale.config.run_directory import RunDirectory
from lipnext_scale.data import DataConfig, TestBatch, TestSet, open_test_set
from lipnext_scale.distributed.processes import Processes
from lipnext_scale.models import LipNeXt
from lipnext_scale.utils.config import as_float
from lipnext_scale.utils.errors import UserError
from lipnext_scale.utils.files import atomic_file, write_atomically
from lipnext_scale.utils.progress import Progress

# --------------------------------------------------------------------------------------------------
# What is certified or attacked: a model and test samples.


@dataclass(frozen=True)
class EvaluationTarget:
    """model: as stored, on the CPU. out: where results go. data: the pattern of the shards.
    classes: the names of the labels; empty: they have none."""

    path: Path
    model: LipNeXt
    weights: str  # a digest of all weights and of the architecture
    test: TestSet
    data: str
    out: RunDirectory
    classes: tuple[str, ...]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--run", metavar="DIR", help="a run directory, or one of its checkpoints")
    # torchrun takes --run for an option of its own.
    parser.add_argument(
        "--model", metavar="PATH", help="a run, checkpoint, or export (zoo:NAME is one) with --data"
    )
    parser.add_argument("--data", metavar="SHARDS", help="test shards (default: those of the run)")
    parser.add_argument(
        "--resize", type=int, help="short side before the centre is cut out (default: the run's)"
    )
    parser.add_argument("--workers", type=int, help="processes that decode (default: the run's)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="where to write (default: the run)")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda (default auto)")
    which = "radii to look at (default 36/255 72/255 108/255 0.5 1)"
    parser.add_argument("--radii", nargs="+", type=parse_radius, default=DEFAULT_RADII, help=which)


def open_target(arguments: argparse.Namespace, *settings: str) -> EvaluationTarget:
    """Load the model and open the test shards, which must fit it. settings: as of `_place`."""
    if (arguments.run is None) == (arguments.model is None):
        raise UserError("give either --run DIR or --model PATH")
    path = Path(arguments.run or arguments.model)
    model, run = load_model(path), run_of(path)
    config = _data_config(arguments, path, run)
    takes = model.config
    for radius in arguments.radii:
        takes.require_radius("--radii", radius)
    if arguments.resize is not None and 0 < arguments.resize < takes.image_size:
        raise UserError(f"--resize {arguments.resize}: must be 0 or at least {takes.image_size}")
    key = "--data" if arguments.data else "data.test"
    test = open_test_set(config, takes.image_size, takes.in_channels, takes.num_classes, key)
    name = str(path).removesuffix(SUFFIX).removeprefix(IN_ZOO)
    own = Path(f"{name}-certificate") if run is None else run.path
    data = _data_setting(test.catalog.fingerprint(), test.resize)
    place = arguments.out or _place(own, _older_checkpoint(run, path), [*settings, data])
    out = RunDirectory(place)
    if out.path.is_file():
        raise UserError(f"--out {out.path}: is a file; must be a directory")
    named = test.catalog.class_names
    facts = export_data(path) if run is None else run.data_facts()
    classes = () if len(named) > 1 else next(iter(named), facts.classes)  # shards may disagree
    return EvaluationTarget(path, model, weights_digest(model), test, config.test, out, classes)


BESIDE = "certificates"


def _place(own: Path, names: list[str], settings: list[str]) -> Path:
    """The model's own directory, or one in it that is named after what differs: `names`, a fast
    look, and settings that are not those of the certificate that is there."""

    def place(names: list[str]) -> Path:
        return own / BESIDE / "_".join(names) if names else own

    names = names + [setting for setting in settings if setting == "bfloat16"]
    if stored := whole_certificate(RunDirectory(place(names))):
        facts = stored[0]
        radii = radii_setting(map(float, facts["certified_accuracy"]))
        there = (facts["arithmetic"], radii, _data_setting(**facts["data"]))
        names += [setting for setting in settings if setting not in there]
    return place(names)


def _older_checkpoint(run: RunDirectory | None, path: Path) -> list[str]:
    """Its name, if the path is one that is not the run's newest."""
    newest = latest_checkpoint(run.checkpoints) if run is not None and path != run.path else None
    name = path.resolve().name  # `latest` is a link
    return [] if newest is None or newest.name == name else [name]


def radii_setting(radii: Iterable[float]) -> str:
    return "radii-" + "-".join(radius_name(radius).replace("/", "_") for radius in radii)


def _data_setting(fingerprint: str, resize: int, **_: object) -> str:
    return f"data-{fingerprint[:8]}" + (f"-resize-{resize}" if resize else "")


def _data_config(arguments: argparse.Namespace, path: Path, run: RunDirectory | None) -> DataConfig:
    """The run's, changed by the arguments; only the test set counts."""
    if run is not None:
        config = run.recipe().data
        # Another machine than those that trained may not have their local disks.
        stage = config.stage_dir if Path(config.stage_dir).is_dir() else ""
        config = replace(config, stage_dir=stage)
    elif arguments.data is not None:
        resize = export_data(path).test_resize
        config = DataConfig(arguments.data, arguments.data, test_resize=resize, workers=0)
    else:
        raise UserError(f"{path}: is an export and needs --data, the shards of a test set")
    given = {"test": arguments.data, "test_resize": arguments.resize, "workers": arguments.workers}
    return replace(config, **{key: value for key, value in given.items() if value is not None})


def weights_digest(model: LipNeXt) -> str:
    """The same for a run, a checkpoint and an export of the same numbers."""
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
    target: EvaluationTarget,
    title: str,
    what: list[str],
    work: Callable[[TestBatch, Callable[[float], None]], Arrays],
    processes: Processes,
    samples: Tensor | None = None,
) -> Arrays:
    """work(batch, reach) for every chunk; all results in the order of the samples, on rank 0.

    Finished chunks are files in a directory in `target.out` until all are done. what: everything
    that the results depend on, beside the target and the proof. samples: the numbers of those to
    take, if not all. Slow work calls reach(share of the batch that is done) on its way. The other
    ranks get {}.
    """
    test = target.test
    if samples is None:
        samples = torch.arange(len(test.catalog))
    what = [PROOF, target.weights, test.catalog.fingerprint(), str(test.resize), *what]
    digest = hashlib.sha256("\n".join([*what, str(samples.tolist())]).encode()).hexdigest()
    store = target.out.path / f".{title}-{digest[:16]}"
    chunks = samples.split(CHUNK)
    files = [store / f"{number:06d}.npz" for number in range(len(chunks))]

    def finished() -> set[int]:
        with writing(store):
            store.mkdir(parents=True, exist_ok=True)
        return {number for number, file in enumerate(files) if file.is_file()}

    done = processes.on_rank0(finished)
    todo = [number for number in range(len(chunks)) if number not in done]
    mine = todo[processes.rank :: processes.world_size]
    before, silent = sum(len(chunks[number]) for number in done), processes.rank > 0
    progress = Progress(len(samples), before, "image", title, log_seconds=10, silent=silent)

    def reach(left: int, images: int, share: float) -> None:
        # The other ranks are about as fast.
        reached = min(int(share * images) * processes.world_size, left)
        progress.advance(reached - (left - progress.left))

    def all_mine() -> None:
        batches = iter(test.in_parts([chunks[number] for number in mine]))
        for number, batch in zip(mine, batches, strict=True):
            so_far = partial(reach, progress.left, len(batch.ids))
            results = work(batch, so_far)
            with writing(store):
                write_arrays(files[number], results)
            so_far(1.0)

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


def shared_facts(model: LipNeXt, processes: Processes) -> list[Facts]:
    """The facts of all layers, on every rank; each measures its part."""
    rank, ranks = processes.rank, processes.world_size
    parts = processes.everywhere(lambda: measure_layers(model, rank, ranks))
    count = layer_count(model.config)
    return [parts[number % ranks][number // ranks] for number in range(count)]


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


# --------------------------------------------------------------------------------------------------
# Radii as text.

DEFAULT_RADII = (36 / 255, 72 / 255, 108 / 255, 0.5, 1.0)


def parse_radius(text: str) -> float:
    """The type of --radii."""
    radius = as_float(text)
    if radius is None or not 0 <= radius < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} must be a number of at least 0, such as 36/255")
    return radius


def radius_name(radius: float) -> str:
    """36/255 for such a fraction, else the number."""
    numerator = radius * 255
    if float(f"{radius:.3g}") == radius or abs(numerator - round(numerator)) > 1e-6:
        return f"{radius:g}"
    return f"{round(numerator)}/255"


# --------------------------------------------------------------------------------------------------
# The results of every sample, and the figures that follow from them.


@dataclass(frozen=True)
class SampleResults:
    """Of all samples of a set, by number: label, prediction and certified radius."""

    labels: np.ndarray
    predictions: np.ndarray
    radii: np.ndarray

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def correct(self) -> np.ndarray:
        return self.labels == self.predictions

    def certified(self, epsilon: float) -> np.ndarray:
        """Which samples are right with a radius of at least ε."""
        return self.correct & (self.radii >= epsilon)

    def share(self, epsilon: float = 0.0) -> float:
        """CRA@ε; at 0 the clean accuracy."""
        return float(self.certified(epsilon).mean())

    def interval(self, epsilon: float = 0.0) -> list[float]:
        """Of CRA@ε, at 95 % confidence."""
        return list(wilson_interval(int(self.certified(epsilon).sum()), len(self)))


def wilson_interval(hits: int, total: int) -> tuple[float, float]:
    """95 % confidence interval of a share, Wilson's: sound also near 0 and 1."""
    z = 1.959963984540054  # of 95 % of a normal distribution
    share, scale = hits / total, z**2 / total
    centre = (share + scale / 2) / (1 + scale)
    half = z * math.sqrt(share * (1 - share) / total + scale / (4 * total)) / (1 + scale)
    low = 0.0 if hits == 0 else max(0.0, centre - half)
    return low, 1.0 if hits == total else min(1.0, centre + half)


QUANTILES = (0.1, 0.25, 0.5, 0.75, 0.9)
BINS = 40
METHOD = "a-priori bound carried along the layers, taken off both ends of every radius"


@dataclass(frozen=True)
class Proof:
    """How the radii were found. why_not: why they are no certificate, if they are not."""

    lipschitz_bound: float
    arithmetic: str
    feature_rounding: float | None = None
    why_not: str = ""


def certificate(
    target: EvaluationTarget, proof: Proof, results: SampleResults, epsilons: tuple[float, ...]
) -> dict[str, Any]:
    """certificate.json."""
    rounding, right = None, results.radii[results.correct]
    if proof.feature_rounding is not None:
        rounding = {"method": METHOD, "features": proof.feature_rounding}
    return {
        "format": 1,
        "certified": not proof.why_not,
        **({"why_not": proof.why_not} if proof.why_not else {}),
        "model": {
            "path": str(target.path),
            "weights": target.weights,
            "parameters": sum(parameter.numel() for parameter in target.model.parameters()),
            "architecture": asdict(target.model.config),
        },
        "data": {
            "shards": target.data,
            "fingerprint": target.test.catalog.fingerprint(),
            "samples": len(results),
            "resize": target.test.resize,
        },
        "arithmetic": proof.arithmetic,
        "lipschitz_bound": proof.lipschitz_bound,
        "rounding": rounding,
        "clean_accuracy": results.share(),
        "certified_accuracy": {repr(epsilon): results.share(epsilon) for epsilon in epsilons},
        "intervals": {
            "clean": results.interval(),
            **{repr(epsilon): results.interval(epsilon) for epsilon in epsilons},
        },
        "classes": _classes(results, epsilons),
        "histogram": _histogram(results),
        "quantiles": {str(q): float(np.quantile(right, q)) for q in QUANTILES if len(right)},
        "versions": {
            "lipnext_scale": lipnext_scale.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
    }


def _classes(results: SampleResults, epsilons: tuple[float, ...]) -> list[dict[str, Any]]:
    rows = []
    for label in np.unique(results.labels).tolist():
        mine = results.labels == label
        own = SampleResults(results.labels[mine], results.predictions[mine], results.radii[mine])
        right = own.radii[own.correct]
        rows.append(
            {
                "label": label,
                "samples": len(own),
                "clean": own.share(),
                "certified": {repr(epsilon): own.share(epsilon) for epsilon in epsilons},
                "median_radius": float(np.median(right)) if len(right) else None,
            }
        )
    return rows


def _histogram(results: SampleResults) -> dict[str, list[float]]:
    """Of the radii of right and of wrong predictions; the last bin has the largest 1 % too."""
    end = float(np.quantile(results.radii, 0.99)) or 1.0
    edges, radii = np.linspace(0, end, BINS + 1), np.minimum(results.radii, end)
    right, _ = np.histogram(radii[results.correct], edges)
    wrong, _ = np.histogram(radii[~results.correct], edges)
    return {"edges": edges.tolist(), "right": right.tolist(), "wrong": wrong.tolist()}


def write_json(path: Path, facts: dict[str, Any]) -> None:
    write_atomically(path, (json.dumps(facts, indent=2) + "\n").encode())


def write_csv(path: Path, rows: Iterable[Iterable[Any]]) -> None:
    """Numbers with all their digits; None is empty."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    # File names need not be valid Unicode.
    write_atomically(path, text.getvalue().encode(errors="backslashreplace"))


def class_name(names: tuple[str, ...], label: int) -> str:
    return names[label] if 0 <= label < len(names) else str(label)


def write_samples(target: EvaluationTarget, results: SampleResults) -> None:
    """samples.csv: a row for each sample."""
    heads = ["sample", "name", "label", "prediction", "correct", "radius"]
    rows: list[list[Any]] = [[*heads, "label_name", "prediction_name"]]
    columns = (results.labels, results.predictions, results.correct, results.radii)
    for number, (label, prediction, correct, radius) in enumerate(
        zip(*(column.tolist() for column in columns), strict=True)
    ):
        names = [class_name(target.classes, one) for one in (label, prediction)]
        name = target.test.sample_name(number)
        rows.append([number, name, label, prediction, int(correct), radius, *names])
    write_csv(target.out.samples, rows)


def read_results(path: Path) -> SampleResults:
    """Of samples.csv."""
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    kinds = {"label": int, "prediction": int, "radius": float}
    return SampleResults(*(np.array([of(row[key]) for row in rows]) for key, of in kinds.items()))


def read_certificate(run: RunDirectory) -> tuple[dict[str, Any], SampleResults] | None:
    """certificate.json and samples.csv; None where they are not, or cannot be read."""
    try:
        return json.loads(run.certificate.read_bytes()), read_results(run.samples)
    except (OSError, ValueError, KeyError):
        return None


def whole_certificate(run: RunDirectory) -> tuple[dict[str, Any], SampleResults] | None:
    """The same, refused where certificate.json was edited and lacks what others read in it."""
    if (stored := read_certificate(run)) is not None:
        facts: dict[str, Any] = {"data": {}, "model": {}, **stored[0]}
        lacks = {"arithmetic", "certified", "certified_accuracy", "lipschitz_bound"} - {*facts}
        lacks |= {"fingerprint", "samples", "resize"} - {*facts["data"]}
        lacks |= {"path", "weights"} - {*facts["model"]}
        if lacks:
            right = "remove it, and python -m lipnext_scale.certify writes it anew"
            raise UserError(f"{run.certificate}: lacks {', '.join(sorted(lacks))}; {right}")
    return stored


def table(facts: dict[str, Any]) -> str:
    """certificate.json for a terminal."""
    intervals = facts["intervals"]
    rows = [("clean accuracy", _share(facts["clean_accuracy"], intervals["clean"]))]
    for radius, share in facts["certified_accuracy"].items():
        title = f"{'certified' if facts['certified'] else 'NOT certified'} at ε = "
        rows.append((title + radius_name(float(radius)), _share(share, intervals[radius])))
    rounding = facts["rounding"]
    rows += [
        ("Lipschitz bound K", f"{facts['lipschitz_bound']:.9f}"),
        ("rounding of features", f"≤ {rounding['features']:.1e}" if rounding else "not bounded"),
        ("arithmetic", facts["arithmetic"]),
        ("samples", f"{facts['data']['samples']:,}"),
    ]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"  {name:<{width}}  {value}" for name, value in rows)


def _share(share: float, interval: list[float]) -> str:
    return f"{share:7.2%}   (95 %: {interval[0]:.2%} to {interval[1]:.2%})"
