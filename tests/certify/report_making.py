"""Made-up results with a certificate of them, for tests of the report."""

from typing import Any

import numpy as np
import torch

from lipnext_scale.attack import AttackExample
from lipnext_scale.certify.certificate import SampleResults, wilson_interval
from lipnext_scale.certify.report import ReportInputs

EPSILONS = (36 / 255, 72 / 255, 0.5)


def made_up(classes: int, samples: int = 200, right: float = 0.8) -> SampleResults:
    chance = np.random.default_rng(0)
    labels = np.arange(samples) % classes
    wrong = chance.random(samples) >= right
    return SampleResults(labels, (labels + wrong) % classes, chance.gamma(2, 0.2, samples))


def facts_of(results: SampleResults, classes: int, image_size: int = 32) -> dict[str, Any]:
    shares = {repr(epsilon): results.share(epsilon) for epsilon in EPSILONS}
    hits = {"clean": 0.0, **{repr(epsilon): epsilon for epsilon in EPSILONS}}
    edges = np.linspace(0, results.radii.max(), 11)
    architecture = {"image_size": image_size, "in_channels": 3, "num_classes": classes}
    return {
        "format": 1,
        "certified": True,
        "model": {
            "path": "runs/some",
            "weights": "ab" * 32,
            "parameters": 1_234_567,
            "architecture": architecture,
        },
        "data": {"shards": "data/x-{0..3}.tar", "fingerprint": "cd" * 32, "resize": 256},
        "arithmetic": "float64",
        "lipschitz_bound": 1.000003189,
        "rounding": {"method": "a bound of some kind", "features": 1.25e-12},
        "clean_accuracy": results.share(),
        "certified_accuracy": shares,
        "intervals": {
            key: list(wilson_interval(int(results.certified(epsilon).sum()), len(results)))
            for key, epsilon in hits.items()
        },
        "classes": [
            {
                "label": label,
                "samples": len(own),
                "clean": own.share(),
                "certified": {repr(epsilon): own.share(epsilon) for epsilon in EPSILONS},
                "median_radius": float(np.median(own.radii)),
            }
            for label, own in ((label, results.of_class(label)) for label in range(classes))
        ],
        "histogram": {
            "edges": edges.tolist(),
            "right": np.histogram(results.radii[results.correct], edges)[0].tolist(),
            "wrong": np.histogram(results.radii[~results.correct], edges)[0].tolist(),
        },
        "quantiles": {"0.1": 0.0625, "0.5": 0.3125},
        "versions": {"lipnext_scale": "9.8.7", "torch": "2.99", "python": "3.98"},
    }


def image_of(sample: int) -> np.ndarray:
    return np.random.default_rng(sample).integers(0, 256, (32, 32, 3), dtype=np.uint8)


def inputs_of(classes: int = 10, right: float = 0.8, samples: int = 200) -> ReportInputs:
    results = made_up(classes, samples, right)
    return ReportInputs(
        facts_of(results, classes), results, image_of, lambda n: f"x-0.tar {n:05}", [], None
    )


def attack_of(distance: float, radius: float, grey: bool = False) -> AttackExample:
    image = torch.full((1 if grey else 3, 32, 32), 0.5, dtype=torch.float64)
    change = torch.zeros_like(image)
    change[0, 3, 4] = distance
    return AttackExample(7, image, image + change, distance, radius, 2, 5)
