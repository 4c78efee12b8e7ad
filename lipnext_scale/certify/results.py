"""What came out for every sample, and the figures that follow from it."""

import math
from dataclasses import dataclass

import numpy as np

_Z = 1.959963984540054  # of 95 % of a normal distribution


@dataclass(frozen=True)
class SampleResults:
    """Of all samples of a set, by number: label, prediction, and the radius it is proven within."""

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

    def of_class(self, label: int) -> "SampleResults":
        mine = self.labels == label
        return SampleResults(self.labels[mine], self.predictions[mine], self.radii[mine])


def wilson_interval(hits: int, total: int) -> tuple[float, float]:
    """95 % confidence interval of a share, Wilson's: sound also near 0 and 1."""
    if total == 0:
        return 0.0, 1.0
    share, scale = hits / total, _Z**2 / total
    centre = (share + scale / 2) / (1 + scale)
    half = _Z * math.sqrt(share * (1 - share) / total + scale / (4 * total)) / (1 + scale)
    low = 0.0 if hits == 0 else max(0.0, centre - half)
    return low, 1.0 if hits == total else min(1.0, centre + half)
