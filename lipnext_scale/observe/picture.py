"""A run in one picture: how it learned, its schedule, how matrices and machine fared.

Rank 0 draws RUN/summary.png at the end; `lipnext_scale.watch RUN --picture FILE` at any time.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from lipnext_scale.config.run_directory import RunDirectory
from lipnext_scale.observe.metrics import read_records
from lipnext_scale.utils.errors import UserError
from lipnext_scale.utils.files import atomic_file

BLUE, RED, GREY = "#1f5fa8", "#c4452c", "#777777"
POINTS = 2000  # of a curve: more than its pixels
PANELS: dict[str, dict[str, dict[str, Any]]] = {  # title → key → style
    "training loss": {"train/loss": {}},
    "training accuracy (augmented batches)": {"train/accuracy": {}},
    "test accuracy of the slow weights": {
        "test/clean_accuracy": {"label": "clean", "marker": "."},
        "test/nominal_cra": {"label": "certified at loss.epsilon, K as 1", "marker": "."},
        "watch/clean_accuracy": {"label": "clean, subset", "linestyle": ":"},
        "watch/nominal_cra": {"label": "certified, subset", "linestyle": ":"},
    },
    "learning rate": {"train/lr": {}},
    "training radius ε": {"train/epsilon": {}},
    "gradient norm, before clipping": {"train/gradient_norm": {}},
    "images per second": {"images_per_second": {}},
    "share of time waited for data": {"data/wait_share": {}},
    "memory of rank 0 (GB)": {"memory/resident_gb": {}},
}
BY_BLOCK = {
    "distance from O(d): ‖XᵀX - I‖ / √d by block": "drift/block_",
    "size of the manifold step: ‖Δ‖ by block": "move/block_",
    "gradient norm by block": "gradient/block_",
}
Records = Sequence[dict[str, Any]]


def draw_summary(run: RunDirectory, path: Path) -> None:
    records = read_records(run.metrics)
    if not any("train/loss" in record for record in records):
        raise UserError(f"{run.metrics}: holds no record of training to draw yet")
    figure = Figure(figsize=(16, 9), dpi=90)
    # Measuring the room for titles and labels would take longer than the drawing.
    figure.subplots_adjust(0.045, 0.06, 0.985, 0.9, 0.24, 0.42)
    grid = iter(figure.subplots(3, 4).flat)
    for (name, styles), axes in zip(PANELS.items(), grid, strict=False):
        _panel(axes, name, records, styles, log="norm" in name)
        if any(word in name for word in ("accuracy", "share")):
            axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    for (name, prefix), axes in zip(BY_BLOCK.items(), grid, strict=False):
        keys = sorted({key for record in records for key in record if key.startswith(prefix)})
        _panel(axes, name, records, _shades(keys), log=True)
    title = f"{run.path}: step {records[-1]['step']:,}"
    figure.suptitle(title, fontsize=13, x=0.045, ha="left")
    with atomic_file(path) as file:
        figure.savefig(file, format="png")


def _shades(keys: list[str]) -> dict[str, dict[str, Any]]:
    """Dark to light from the first block to the last; three of them are named."""
    colors = matplotlib.colormaps["viridis"](np.linspace(0, 0.92, max(1, len(keys))))
    named = {0, len(keys) - 1, len(keys) // 2}
    return {
        key: {"color": color, "label": f"block {block}" if block in named else None}
        for block, (key, color) in enumerate(zip(keys, colors, strict=False))
    }


def _panel(
    axes: Axes, title: str, records: Records, styles: dict[str, dict[str, Any]], log: bool
) -> None:
    positive = True
    for key, style in styles.items():
        points = [(record["step"], record[key]) for record in records if key in record]
        points = points[:: max(1, len(points) // POINTS)]
        if points:
            positive = positive and min(value for _, value in points) > 0
            color = RED if key.endswith("_cra") else BLUE
            axes.plot(*zip(*points, strict=True), **{"color": color, "linewidth": 1.3, **style})
    axes.set_title(title, fontsize=10.5, loc="left")
    axes.set_xlabel("step", fontsize=9)
    axes.tick_params(which="both", labelsize=8)
    axes.grid(alpha=0.3)
    axes.margins(x=0.02)
    axes.spines[["top", "right"]].set_visible(False)
    if log and positive:
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)
    if not axes.lines:
        axes.text(0.5, 0.5, "not recorded", transform=axes.transAxes, ha="center", color=GREY)
    elif len(styles) > 1:
        axes.legend(fontsize=8, frameon=False)
