"""A run in one picture: how it learned, what it was told to do, how the matrices and machine fared.

Rank 0 draws RUN/summary.png at the end; `lipnext_scale.watch RUN --picture FILE` at any time.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lipnext_scale.files import atomic_file
from lipnext_scale.metrics import read_records
from lipnext_scale.run_directory import RunDirectory

BLUE, RED, GREY = "#1f5fa8", "#c4452c", "#777777"
COLUMNS, ROWS = 3, 3
POINTS = 2000  # of a curve: more than its pixels
Records = Sequence[dict[str, Any]]


def draw_summary_or_say(directory: RunDirectory, path: Path, say: Callable[[str], None]) -> None:
    """The run has what it was for: a picture that cannot be drawn does not fail it."""
    try:
        records = read_records(directory.metrics)
        if any("train/loss" in record for record in records):
            draw_summary(records, str(directory.path), path)
    except Exception as error:  # of matplotlib there may be any
        say(f"{path}: the summary was not drawn: {type(error).__name__}: {error}")


def draw_summary(records: Records, title: str, path: Path) -> None:
    figure = Figure(figsize=(13.5, 9), dpi=100)
    # Measuring the room for titles and labels would take longer than the drawing.
    figure.subplots_adjust(0.055, 0.06, 0.945, 0.9, 0.32, 0.42)
    grid = figure.subplots(ROWS, COLUMNS)
    panels = (
        _loss,
        _training_accuracy,
        _test_accuracy,
        _schedule,
        _gradient,
        _speed,
        _drift,
        _move,
        _gradient_by_depth,
    )
    for axes, draw in zip(grid.flat, panels, strict=True):
        draw(axes, records)
    figure.suptitle(f"{title}: {_headline(records)}", fontsize=13, x=0.055, ha="left")
    with atomic_file(path) as file:
        figure.savefig(file, format="png")


def _headline(records: Records) -> str:
    steps, epochs = _curve(records, "train/epoch")
    words = [f"step {records[-1]['step']:,}"]
    if len(steps):
        words.append(f"epoch {epochs[-1]:.4g}")
    for key, name in (("test/clean_accuracy", "clean"), ("test/nominal_cra", "CRA (K as 1)")):
        _, values = _curve(records, key)
        if len(values):
            words.append(f"{name} {values[-1]:.2%}")
    return ", ".join(words)


def _curve(records: Records, key: str) -> tuple[np.ndarray, np.ndarray]:
    """(steps, values), thinned to what a picture can show."""
    steps, (values,) = _curves(records, [key])
    return steps, values


def _curves(records: Records, keys: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """(steps, values [keys, steps]) of the records that have any of them.

    What one of them lacks, since a number that is not finite is not recorded, is NaN: a gap.
    """
    found = [record for record in records if any(key in record for key in keys)]
    found = found[:: max(1, len(found) // POINTS)]
    steps = np.array([record["step"] for record in found], dtype=float)
    values = [[record.get(key, np.nan) for record in found] for key in keys]
    return steps, np.array(values, dtype=float)


def _by_depth(records: Records, kind: str) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """(steps, values [blocks, steps], names) of all `KIND/block_NN`."""
    names = sorted({key for record in records for key in record if key.startswith(f"{kind}/block")})
    return *_curves(records, names), names


def _plot(axes: Axes, records: Records, key: str, color: str, label: str, **style: Any) -> bool:
    steps, values = _curve(records, key)
    axes.plot(steps, values, color=color, label=label, **{"linewidth": 1.6, **style})
    return len(steps) > 0


def _finish(axes: Axes, title: str, ylabel: str = "", drawn: bool = True) -> None:
    axes.set_title(title, fontsize=10.5, loc="left")
    axes.set_ylabel(ylabel, fontsize=9)
    axes.set_xlabel("step", fontsize=9)
    axes.tick_params(which="both", labelsize=8)
    axes.grid(alpha=0.3)
    axes.margins(x=0.02)
    axes.spines[["top", "right"]].set_visible(False)
    if not drawn:
        axes.text(0.5, 0.5, "not recorded", transform=axes.transAxes, ha="center", color=GREY)


def _second_axis(axes: Axes, ylabel: str) -> Axes:
    other = axes.twinx()
    other.set_ylabel(ylabel, color=RED, fontsize=9)
    other.tick_params(labelsize=8, colors=RED)
    other.margins(x=0.02)
    other.spines["top"].set_visible(False)
    return other


def _loss(axes: Axes, records: Records) -> None:
    _finish(axes, "training loss", drawn=_plot(axes, records, "train/loss", BLUE, "loss"))
    axes.set_ylim(bottom=0)


def _percent(axes: Axes, top: float = 1.03) -> None:
    axes.set_ylim(0, top)
    axes.yaxis.set_major_formatter(matplotlib.ticker.PercentFormatter(1.0))


def _training_accuracy(axes: Axes, records: Records) -> None:
    drawn = _plot(axes, records, "train/accuracy", BLUE, "batches")
    _finish(axes, "training accuracy (augmented batches)", drawn=drawn)
    _percent(axes)


def _test_accuracy(axes: Axes, records: Records) -> None:
    marked: dict[str, Any] = {"marker": "o", "markersize": 3.5}
    whole = {
        "test/clean_accuracy": (BLUE, "clean"),
        "test/nominal_cra": (RED, "certified at loss.epsilon, K as 1"),
    }
    subset = {
        "watch/clean_accuracy": (BLUE, "clean, subset"),
        "watch/nominal_cra": (RED, "certified, subset"),
    }
    drawn = [_plot(axes, records, key, *style, **marked) for key, style in whole.items()]
    for key, style in subset.items():
        if any(key in record for record in records):
            drawn.append(_plot(axes, records, key, *style, linestyle=":", linewidth=1.2))
    _finish(axes, "test accuracy of the slow weights", drawn=any(drawn))
    _percent(axes)
    if any(drawn):
        axes.legend(fontsize=8, frameon=False, loc="best")


def _schedule(axes: Axes, records: Records) -> None:
    drawn = _plot(axes, records, "train/lr", BLUE, "learning rate")
    _finish(axes, "schedule", "learning rate", drawn)
    axes.yaxis.label.set_color(BLUE)
    _plot(_second_axis(axes, "training radius ε"), records, "train/epsilon", RED, "ε")


def _gradient(axes: Axes, records: Records) -> None:
    drawn = _plot(axes, records, "train/gradient_norm", BLUE, "norm")
    _finish(axes, "gradient norm, before clipping", drawn=drawn)
    axes.set_yscale("log")


def _speed(axes: Axes, records: Records) -> None:
    drawn = _plot(axes, records, "images_per_second", BLUE, "images/s")
    _finish(axes, "speed, and waiting for data", "images/s", drawn)
    axes.set_ylim(bottom=0)
    axes.yaxis.label.set_color(BLUE)
    other = _second_axis(axes, "share of time waited")
    _plot(other, records, "data/wait_share", RED, "wait", linewidth=1.0)
    _, waited = _curve(records, "data/wait_share")
    _percent(other, max(0.1, 1.1 * waited.max()) if len(waited) else 1.0)


def _drift(axes: Axes, records: Records) -> None:
    _depth_panel(axes, records, "drift", "distance from O(d): ‖XᵀX - I‖ / √d by block")


def _move(axes: Axes, records: Records) -> None:
    _depth_panel(axes, records, "move", "size of the manifold step: ‖Δ‖ by block")


def _gradient_by_depth(axes: Axes, records: Records) -> None:
    _depth_panel(axes, records, "gradient", "gradient norm by block")


def _depth_panel(axes: Axes, records: Records, kind: str, title: str) -> None:
    """A curve for each block, dark to light from the first to the last."""
    steps, values, names = _by_depth(records, kind)
    colors = matplotlib.colormaps["viridis"](np.linspace(0, 0.92, max(1, len(names))))
    labelled = {0, len(names) - 1, len(names) // 2}
    for block, (curve, color) in enumerate(zip(values, colors, strict=False)):
        label = f"block {block}" if block in labelled else None
        axes.plot(steps, curve, color=color, linewidth=1.1, label=label)
    _finish(axes, title, drawn=bool(names))
    if names:
        axes.set_yscale("log" if (values[np.isfinite(values)] > 0).all() else "linear")
        axes.legend(fontsize=8, ncols=3, handlelength=1.2, columnspacing=1.0, edgecolor="none")
