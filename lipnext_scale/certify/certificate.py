"""The certificate of a model on a test set: what is certified, in figures."""

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from lipnext_scale.certify.lipschitz import lipschitz_bound
from lipnext_scale.certify.radius import evaluate_radii
from lipnext_scale.data import Samples
from lipnext_scale.files import write_atomically
from lipnext_scale.models import LipNeXt
from lipnext_scale.progress import Progress

DEFAULT_RADII = (36 / 255, 72 / 255, 108 / 255, 0.5)


@dataclass(frozen=True)
class Certificate:
    """Shares of all `samples`; one counts at ε if it is right and its radius is at least ε."""

    clean_accuracy: float
    certified_accuracy: dict[str, float]
    lipschitz_bound: float
    samples: int
    arithmetic: str
    seconds: float

    def write(self, path: Path) -> None:
        write_atomically(path, (json.dumps(asdict(self), indent=2) + "\n").encode())

    def table(self) -> str:
        rows = [("clean accuracy", f"{self.clean_accuracy:.2%}")]
        for radius, share in self.certified_accuracy.items():
            rows.append((f"certified at ε = {_radius_name(float(radius))}", f"{share:.2%}"))
        rows += [
            ("Lipschitz bound K", f"{self.lipschitz_bound:.9f}"),
            ("samples", f"{self.samples:,}"),
            ("arithmetic", self.arithmetic),
            ("time", f"{self.seconds:.2f} s"),
        ]
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"  {name:<{width}}  {value:>12}" for name, value in rows)


@dataclass(frozen=True)
class Certified:
    """A certificate with the predictions and radii it is made of."""

    certificate: Certificate
    predictions: Tensor
    radii: Tensor


def certify(
    model: LipNeXt, samples: Samples, epsilons: tuple[float, ...] = DEFAULT_RADII
) -> Certified:
    """Certify every sample with the model in the arithmetic of its weights."""
    started = time.perf_counter()
    bound = lipschitz_bound(model)
    progress = Progress(len(samples), unit="image", title="certify", log_seconds=10)
    predictions, radii = evaluate_radii(model, samples.images, bound, progress=progress)
    progress.close()
    certificate = Certificate(
        clean_accuracy=certified_share(predictions, radii, samples.labels, 0.0),
        certified_accuracy={
            repr(float(epsilon)): certified_share(predictions, radii, samples.labels, epsilon)
            for epsilon in epsilons
        },
        lipschitz_bound=bound,
        samples=len(samples),
        arithmetic=str(model.head.weight.dtype).removeprefix("torch."),
        seconds=round(time.perf_counter() - started, 3),
    )
    return Certified(certificate, predictions, radii)


def certified_share(predictions: Tensor, radii: Tensor, labels: Tensor, epsilon: float) -> float:
    """CRA@ε: the share that is right with a radius of at least ε."""
    return ((predictions == labels) & (radii >= epsilon)).to(torch.float64).mean().item()


def _radius_name(radius: float) -> str:
    """36/255 where it is such a fraction, else the number."""
    numerator = radius * 255
    if abs(numerator - round(numerator)) < 1e-6 and round(numerator) % 255:
        return f"{round(numerator)}/255"
    return f"{radius:g}"
