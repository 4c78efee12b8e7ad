"""The certificate as pictures: accuracy over the radius, and examples with their radii."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lipnext_scale.certify.report_charts import certified_curve, furthest_shown
from lipnext_scale.certify.results import SampleResults
from lipnext_scale.files import atomic_file

COLUMNS = 8
BLUE, RED = "#1f5fa8", "#c4452c"


def draw_curve(path: Path, facts: dict[str, Any], results: SampleResults) -> None:
    """Certified accuracy over the radius with its 95 % band, finer than a pixel."""
    certified = {float(radius): share for radius, share in facts["certified_accuracy"].items()}
    end = furthest_shown(results, certified)
    curve = certified_curve(results, np.linspace(0, end, 1200))
    figure = Figure(figsize=(7, 4.2), dpi=130, layout="constrained")
    axes = figure.add_subplot()
    low, high = curve.low * 100, curve.high * 100
    axes.fill_between(curve.radii, low, high, color=BLUE, alpha=0.18, label="95 % confidence")
    axes.plot(curve.radii, curve.share * 100, color=BLUE, linewidth=2)
    for radius, share in certified.items():
        place = (radius, share * 100)
        axes.plot(*place, "o", color=RED, markersize=5)
        axes.annotate(f"{share:.1%}", place, xytext=(5, 5), textcoords="offset points")
    axes.set(
        xlabel="radius ε (l2 norm, pixels in [0, 1])",
        ylabel="certified accuracy (%)" if facts.get("certified") else "accuracy (%)",
        ylim=(0, 103),
        xlim=(0, end),
        title=_title(facts, results),
    )
    axes.grid(alpha=0.3)
    axes.legend(loc="upper right", frameon=False)
    _save(figure, path)


def _title(facts: dict[str, Any], results: SampleResults) -> str:
    how = "Certified on" if facts.get("certified") else "NOT A CERTIFICATE:"
    return (
        f"{how} {len(results):,} samples, clean {facts['clean_accuracy']:.1%}, "
        f"K ≤ {facts['lipschitz_bound']:.6f}"
    )


def extremes(results: SampleResults, count: int) -> dict[str, np.ndarray]:
    """Sample numbers: right with the largest and the smallest radii, wrong with the largest."""
    order = np.argsort(results.radii, kind="stable")
    right, wrong = order[results.correct[order]], order[~results.correct[order]]
    return {
        "largest radii": right[::-1][:count],
        "smallest radii": right[:count],
        "misclassified": wrong[::-1][:count],
    }


def draw_examples(
    path: Path, results: SampleResults, image: Callable[[int], np.ndarray], columns: int = COLUMNS
) -> None:
    """The samples with the largest and the smallest radii, and ones that are misclassified."""
    rows = {title: found for title, found in extremes(results, columns).items() if len(found)}
    width, height = 1.35 * columns, 1.9 * len(rows)
    figure = Figure(figsize=(width, height), dpi=130)
    # Room in inches for the titles of rows and images: measuring it takes longer than the drawing.
    figure.subplots_adjust(
        0.35 / width, 0.05 / height, 1 - 0.1 / width, 1 - 0.45 / height, 0.1, 0.4
    )
    grid = figure.subplots(len(rows), columns, squeeze=False)
    for axes in grid.flat:
        axes.axis("off")
    for (title, chosen), line in zip(rows.items(), grid, strict=True):
        _draw_row(line, title, chosen.tolist(), results, image)
    _save(figure, path)


def _draw_row(
    line: np.ndarray,
    title: str,
    chosen: Iterable[int],
    results: SampleResults,
    image: Callable[[int], np.ndarray],
) -> None:
    axes: Axes
    for sample, axes in zip(chosen, line, strict=False):
        pixels = image(sample)
        axes.imshow(pixels.squeeze(2) if pixels.shape[2] == 1 else pixels, "gray", vmin=0, vmax=255)
        said, true = int(results.predictions[sample]), int(results.labels[sample])
        verdict = f"{said}" if said == true else f"{said}, is {true}"
        axes.set_title(f"{verdict}\nr = {results.radii[sample]:.3f}", fontsize=8)
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


def _save(figure: Figure, path: Path) -> None:
    with atomic_file(path) as file:
        figure.savefig(file, format="png")
