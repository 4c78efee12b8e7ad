"""The certificate of a model on a test set: what certificate.json holds.

Nothing in it depends on how many processes worked, how long, or where.
"""

import csv
import io
import json
import platform
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import lipnext_scale
from lipnext_scale import config as configuration
from lipnext_scale.certify.figures import radius_name
from lipnext_scale.certify.results import SampleResults, wilson_interval
from lipnext_scale.certify.subject import Subject
from lipnext_scale.files import write_atomically

QUANTILES = (0.1, 0.25, 0.5, 0.75, 0.9)
BINS = 40
METHOD = "a-priori bound carried along the layers, taken off both ends of every radius"


@dataclass(frozen=True)
class Proof:
    """How the radii were found. why_not: why they are no certificate; empty if they are."""

    lipschitz_bound: float
    arithmetic: str
    feature_rounding: float | None = None
    why_not: str = ""


def certificate(
    subject: Subject, proof: Proof, results: SampleResults, epsilons: tuple[float, ...]
) -> dict[str, Any]:
    """certificate.json."""
    model, catalog = subject.model, subject.test.catalog
    rounding = {"method": METHOD, "features": proof.feature_rounding}
    return {
        "format": 1,
        "certified": not proof.why_not,
        **({"why_not": proof.why_not} if proof.why_not else {}),
        "model": {
            "path": str(subject.path),
            "weights": subject.weights,
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "architecture": configuration.to_dict(model.config),
        },
        "data": {
            "shards": subject.data,
            "fingerprint": catalog.fingerprint(),
            "samples": len(results),
            "resize": subject.test.resize,
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
        own = results.of_class(label)
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
    right, wrong = (
        np.histogram(radii[chosen], edges)[0].tolist()
        for chosen in (results.correct, ~results.correct)
    )
    return {"edges": edges.tolist(), "right": right, "wrong": wrong}


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
    write_atomically(path, text.getvalue().encode())


def table(facts: dict[str, Any]) -> str:
    """The certificate for a terminal."""
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
