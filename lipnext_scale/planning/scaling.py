"""Predicted scaling from 1 to 1,024 GPUs: a picture, and its numbers as CSV."""

import csv
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lipnext_scale.config.recipe import Recipe
from lipnext_scale.planning.prediction import CHAIN, Prediction
from lipnext_scale.planning.times import PARTS, Device
from lipnext_scale.planning.walk import Walk, walk_all
from lipnext_scale.utils.errors import UserError

MOST = 1024
COLOURS = {
    "compute": "#2c5f8a",
    "memory bandwidth": "#7fb2d9",
    "links in the node": "#f2a93b",
    "network": "#c8452f",
    "host": "#6b6b6b",
    "memory full": "#ffffff",
}
# The causes of a step's time, in the colours of what limits.
BARS = {
    "arithmetic": ("compute", "#2c5f8a"),
    "memory": ("memory bandwidth", "#7fb2d9"),
    "beside": ("kernels slowed by collectives", "#c5dbec"),
    "node": ("waits for links in the node", "#f2a93b"),
    "network": ("waits for the network", "#c8452f"),
    "host": ("waits for the host", "#6b6b6b"),
}


@dataclass(frozen=True)
class Point:
    kind: str  # strong: one batch for all. weak: as many images a GPU as configured
    ranks: int
    batch: int
    raised: bool  # the batch, to an image for each part and GPU
    found: Prediction | UserError


def scale(walk: Walk, recipe: Recipe, device: Device, known: dict[str, Any]) -> list[Point]:
    parts, batch = recipe.parallel.accumulation, recipe.data.batch_size
    sizes = [1 << k for k in range(MOST.bit_length()) if (1 << k) < walk.per_node]
    while (sizes or [0])[-1] < MOST:
        sizes.append(max(walk.per_node, 2 * sizes[-1] if sizes else 1))
    asked: list[tuple[str, int, int, bool]] = []
    for ranks in sizes:
        least = parts * ranks
        strong = max(1, round(batch / least)) * least
        asked.append(("strong", ranks, strong, strong > batch))
        asked.append(("weak", ranks, batch // walk.ranks * ranks, False))
    keep = [s for s in walk.settings if not s.startswith("data.batch_size=")]
    walks = {
        (ranks, size): replace(
            walk,
            settings=[*keep, f"data.batch_size={size}"],
            nodes=max(1, ranks // walk.per_node),
            per_node=min(ranks, walk.per_node),
            what=CHAIN,
        )
        for _, ranks, size, _ in asked
    }
    walked = dict(zip(walks, walk_all(walks.values()), strict=True))
    points = []
    for kind, ranks, size, raised in asked:
        done = walked[ranks, size]
        found: Any = done
        if not isinstance(done, UserError):
            found = Prediction(walks[ranks, size], done, device, **known)
        points.append(Point(kind, ranks, size, raised, found))
    return points


def draw(points: list[Point], path: Path) -> None:
    """path: of the picture; the numbers go beside it."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    _write(points, path.with_suffix(".csv"))
    done = [p for p in points if isinstance(p.found, Prediction)]
    if not done:
        raise next(p.found for p in points if isinstance(p.found, UserError))
    one = done[0].found
    assert isinstance(one, Prediction)
    figure, axes = plt.subplots(
        2, 2, figsize=(12, 7.4), sharex="col", height_ratios=[1.25, 1], layout="constrained"
    )
    for column, kind in enumerate(("strong", "weak")):
        here = [p for p in done if p.kind == kind]
        _curve(axes[0, column], here)
        _bars(axes[1, column], here)
    batch = next(p.batch for p in done if p.kind == "strong")
    share = next(p.batch // p.ranks for p in done if p.kind == "weak")
    axes[0, 0].set_title(f"Strong scaling: a batch of {batch}")
    axes[0, 1].set_title(f"Weak scaling: {share} images a GPU")
    model = one.recipe.model
    figure.suptitle(
        f"LipNeXt L{model.depth}W{model.width} on {one.device.title}, predicted from a walked step"
    )
    handles, labels = axes[1, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=6, frameon=False, fontsize=9)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _curve(axis: Any, points: list[Point]) -> None:
    minutes = [_prediction(p).epoch / 60 for p in points]
    ranks = [p.ranks for p in points]
    node = max(points, key=lambda p: (_prediction(p).walk.nodes == 1, p.ranks))
    whole = node.ranks * _prediction(node).epoch / 60
    axis.plot(
        ranks, [whole / n for n in ranks], "--", color="#999999", lw=1, label="ideal, from one node"
    )
    axis.plot(ranks, minutes, "-", color="#444444", lw=1, zorder=2)
    seen: set[str] = set()
    for point, value in zip(points, minutes, strict=True):
        limit, marker = _prediction(point).limit, "X" if point.raised else "o"
        label = None if limit in seen else f"limit: {limit}"
        seen.add(limit)
        style = {"c": COLOURS[limit], "edgecolors": "#222222", "label": label}
        axis.scatter([point.ranks], [value], s=70, marker=marker, zorder=3, **style)
        share = _prediction(point).mfu
        at, off = (point.ranks, value), (0, 9)
        axis.annotate(f"{share:.0%}", at, off, textcoords="offset points", fontsize=8, ha="left")
    if any(p.raised for p in points):
        axis.scatter(
            [], [], marker="X", c="w", edgecolors="k", label="too few images: larger batch"
        )
    axis.plot([], [], " ", label="numbers: MFU")
    axis.set(xscale="log", yscale="log", ylabel="minutes per epoch")
    axis.set_xticks(ranks, [str(n) for n in ranks], minor=False)
    axis.minorticks_off()
    ticks = [d * 10.0**e for e in range(-4, 5) for d in (1, 2, 5)]
    ticks = [m for m in ticks if 0.5 * min(minutes) < m < 2 * max(minutes)]
    axis.set_yticks(ticks, [f"{m:g}" for m in ticks])
    axis.grid(alpha=0.25)
    axis.legend(fontsize=8, loc="lower left", frameon=False)


def _bars(axis: Any, points: list[Point]) -> None:
    """Where a step's time goes, as shares."""
    ranks, below = [p.ranks for p in points], [0.0] * len(points)
    for part, (label, colour) in BARS.items():
        shares = [_prediction(p).times.of(part) / _prediction(p).times.step for p in points]
        widths = [0.5 * n for n in ranks]
        axis.bar(ranks, shares, widths, below, color=colour, label=label)
        below = [a + b for a, b in zip(below, shares, strict=True)]
    axis.set(ylim=(0, 1), xlabel="GPUs", ylabel="share of a step")


def _prediction(point: Point) -> Prediction:
    assert isinstance(point.found, Prediction)
    return point.found


def _write(points: list[Point], path: Path) -> None:
    columns = ["kind", "gpus", "batch", "limit", "minutes_per_epoch", "images_per_second", "mfu"]
    columns += ["memory_gb", *(f"{part}_ms" for part in PARTS)]
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        for p in points:
            if isinstance(p.found, UserError):
                writer.writerow([p.kind, p.ranks, p.batch, f"refused: {p.found}"])
                continue
            found, limit = p.found, p.found.limit
            limit += "; too few images a GPU" if p.raised else ""
            values = [found.epoch / 60, found.images_per_second, found.mfu, found.memory / 1e9]
            values += [1e3 * found.times.of(part) for part in PARTS]
            writer.writerow([p.kind, p.ranks, p.batch, limit, *(f"{v:.4g}" for v in values)])
