"""The certificate as pictures: accuracy over the radius, and examples with their radii."""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.figure import Figure

from lipnext_scale.certify.certificate import Certified
from lipnext_scale.data import Samples
from lipnext_scale.files import atomic_file


def draw_curve(result: Certified, samples: Samples, path: Path) -> None:
    """Certified accuracy over the radius, exact: it falls at every correct sample's radius."""
    correct = result.predictions == samples.labels
    radii = np.sort(result.radii[correct].numpy())
    share = 1 - np.arange(len(radii) + 1) / max(1, len(radii))
    share *= len(radii) / len(samples)
    figure, axes = plt.subplots(figsize=(7, 4.2), dpi=130, layout="constrained")
    edges = np.concatenate([[0.0], radii])
    axes.step(edges, share * 100, where="post", color="#1f5fa8", linewidth=2)
    axes.fill_between(edges, share * 100, step="post", color="#1f5fa8", alpha=0.12)
    for radius, value in result.certificate.certified_accuracy.items():
        axes.plot(float(radius), value * 100, "o", color="#c4452c", markersize=5)
        axes.annotate(
            f"{value:.1%}", (float(radius), value * 100), xytext=(5, 5), textcoords="offset points"
        )
    axes.set(
        xlabel="radius ε (l2 norm, pixels in [0, 1])",
        ylabel="certified accuracy (%)",
        ylim=(0, 103),
        xlim=(0, None),
        title=f"Certified on {len(samples):,} samples, "
        f"clean {result.certificate.clean_accuracy:.1%}, "
        f"K ≤ {result.certificate.lipschitz_bound:.6f}",
    )
    axes.grid(alpha=0.3)
    _save(figure, path)


def _save(figure: Figure, path: Path) -> None:
    with atomic_file(path) as file:
        figure.savefig(file, format="png")
    plt.close(figure)


def draw_examples(result: Certified, samples: Samples, path: Path, columns: int = 8) -> None:
    """The samples with the largest and the smallest radii, and the ones that are misclassified."""
    correct = result.predictions == samples.labels
    right = torch.where(correct)[0][result.radii[correct].argsort(descending=True)]
    wrong = torch.where(~correct)[0]
    rows = [
        ("largest radii", right[:columns]),
        ("smallest radii", right.flip(0)[:columns]),
        ("misclassified", wrong[:columns]),
    ]
    rows = [(title, chosen) for title, chosen in rows if len(chosen)]
    figure, grid = plt.subplots(
        len(rows), columns, figsize=(1.35 * columns, 1.9 * len(rows)), dpi=130, squeeze=False
    )
    for axes in grid.flat:
        axes.axis("off")
    for (title, chosen), line in zip(rows, grid, strict=True):
        for index, axes in zip(chosen.tolist(), line, strict=False):
            image = samples.images[index].permute(1, 2, 0).numpy()
            axes.imshow(image.squeeze(), cmap="gray", vmin=0, vmax=255)
            said, true = int(result.predictions[index]), int(samples.labels[index])
            verdict = f"{said}" if said == true else f"{said}, is {true}"
            axes.set_title(f"{verdict}\nr = {result.radii[index]:.3f}", fontsize=8)
        line[0].annotate(
            title,
            (0, 0.5),
            xytext=(-8, 0),
            xycoords="axes fraction",
            textcoords="offset points",
            rotation=90,
            ha="right",
            va="center",
        )
    figure.tight_layout()
    _save(figure, path)
