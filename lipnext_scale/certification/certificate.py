"""The certificate of a model on a test set: what certificate.json holds.

Nothing in it depends on how many processes worked, how long, or where.
"""

import csv
import io
import json
import math
import platform
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import lipnext_scale
from lipnext_scale.certification.target import EvaluationTarget
from lipnext_scale.utils import config as configuration
from lipnext_scale.utils.config import as_float
from lipnext_scale.utils.errors import UserError
from lipnext_scale.utils.files import write_atomically

# --------------------------------------------------------------------------------------------------
# Radii as text.

DEFAULT_RADII = (36 / 255, 72 / 255, 108 / 255, 0.5, 1.0)


def parse_radii(texts: list[str] | None) -> tuple[float, ...]:
    """The values of --radii, in rising order; without any, the default ones."""
    radii = set()
    for text in texts or []:
        radius = as_float(text)
        if radius is None or not 0 <= radius < float("inf"):
            raise UserError(f"--radii {text}: must be a number of at least 0, such as 36/255")
        radii.add(radius)
    return tuple(sorted(radii)) or DEFAULT_RADII


def radius_name(radius: float) -> str:
    """36/255 for such a fraction, else the number."""
    numerator = radius * 255
    if float(f"{radius:.3g}") == radius or abs(numerator - round(numerator)) > 1e-6:
        return f"{radius:g}"
    return f"{round(numerator)}/255"


# --------------------------------------------------------------------------------------------------
# The results of every sample, and the figures that follow from them.

_Z = 1.959963984540054  # of 95 % of a normal distribution


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


def wilson_interval(hits: int, total: int) -> tuple[float, float]:
    """95 % confidence interval of a share, Wilson's: sound also near 0 and 1."""
    if total == 0:
        return 0.0, 1.0
    share, scale = hits / total, _Z**2 / total
    centre = (share + scale / 2) / (1 + scale)
    half = _Z * math.sqrt(share * (1 - share) / total + scale / (4 * total)) / (1 + scale)
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
    model, catalog = target.model, target.test.catalog
    rounding = {"method": METHOD, "features": proof.feature_rounding}
    return {
        "format": 1,
        "certified": not proof.why_not,
        **({"why_not": proof.why_not} if proof.why_not else {}),
        "model": {
            "path": str(target.path),
            "weights": target.weights,
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "architecture": configuration.to_dict(model.config),
        },
        "data": {
            "shards": target.data,
            "fingerprint": catalog.fingerprint(),
            "samples": len(results),
            "resize": target.test.resize,
        },
        "arithmetic": proof.arithmetic,
        "lipschitz_bound": proof.lipschitz_bound,
        "rounding": rounding if proof.feature_rounding is not None else None,
        "clean_accuracy": results.share(),
        "certified_accuracy": {repr(epsilon): results.share(epsilon) for epsilon in epsilons},
        "intervals": {
            "clean": _interval(results, 0.0),
            **{repr(epsilon): _interval(results, epsilon) for epsilon in epsilons},
        },
        "classes": _classes(results, epsilons),
        "histogram": _histogram(results),
        "quantiles": _quantiles(results),
        "versions": {
            "lipnext_scale": lipnext_scale.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
    }


def _interval(results: SampleResults, epsilon: float) -> list[float]:
    return list(wilson_interval(int(results.certified(epsilon).sum()), len(results)))


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


def _quantiles(results: SampleResults) -> dict[str, float]:
    right = results.radii[results.correct]
    return {str(q): float(np.quantile(right, q)) for q in QUANTILES} if len(right) else {}


def write_json(path: Path, facts: dict[str, Any]) -> None:
    write_atomically(path, (json.dumps(facts, indent=2) + "\n").encode())


def write_samples(path: Path, results: SampleResults, name: Callable[[int], str]) -> None:
    """samples.csv: a row for each sample, radii with all their digits."""
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(["sample", "name", "label", "prediction", "correct", "radius"])
    columns = (results.labels, results.predictions, results.correct, results.radii)
    for number, (label, prediction, correct, radius) in enumerate(
        zip(*(column.tolist() for column in columns), strict=True)
    ):
        rows.writerow([number, name(number), label, prediction, int(correct), repr(radius)])
    write_atomically(path, text.getvalue().encode(errors="backslashreplace"))


def read_results(path: Path) -> SampleResults:
    """Of samples.csv."""
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    kinds = {"label": int, "prediction": int, "radius": float}
    return SampleResults(*(np.array([of(row[key]) for row in rows]) for key, of in kinds.items()))


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
