"""Runs that exist, beside each other: figures, tables and pictures of them.

All comes from what a run and `certify` have written; nothing is computed anew.
"""

import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Picture
from matplotlib.ticker import MaxNLocator, PercentFormatter

from lipnext_scale.certification.certificate import (
    SampleResults,
    radius_name,
    whole_certificate,
    write_csv,
    writing,
)
from lipnext_scale.certification.report import INK, WRONG, attack_in, new_figure, quiet
from lipnext_scale.config.recipe import Recipe
from lipnext_scale.config.run_directory import RunDirectory
from lipnext_scale.observe.console import duration
from lipnext_scale.observe.metrics import read_records
from lipnext_scale.utils import config as configuration
from lipnext_scale.utils.files import atomic_file, write_atomically

NOT_COMPARABLE = ": their figures are not comparable as they stand"
MANY = 12  # rows, whose curves and points cannot be told apart
LONGEST = 45  # characters of a name in a picture
LINES, MARKERS = ("-", "--", "-.", ":"), "osD^v<>pX"  # where colours are not seen
Rows = list[list[str]]  # the first is of titles


@dataclass(frozen=True)
class Run:
    """name: of the directory, or its path where several have that name. seconds: of all steps,
    without evaluations. memory: GB, the most at a record, of rank 0's GPU or else its process."""

    name: str
    path: Path
    recipe: Recipe
    certificate: tuple[dict[str, Any], SampleResults] | None
    steps: int
    seconds: float
    memory: float | None
    attack: dict[str, Any] | None = None

    def share(self, epsilon: float) -> float | None:
        """CRA@ε; at 0 the clean accuracy."""
        return self.certificate[1].share(epsilon) if self.certificate else None

    def of_facts(self, find: Callable[[dict[str, Any]], Any]) -> Any:
        return find(self.certificate[0]) if self.certificate else None


Groups = dict[str, list[Run]]  # rows of a table: runs that differ in their seed alone


def read_runs(paths: list[Path]) -> list[Run]:
    names = [path.absolute().name for path in paths]
    return [
        read_run(path, name if names.count(name) == 1 else str(path))
        for path, name in zip(paths, names, strict=True)
    ]


def read_run(path: Path, name: str) -> Run:
    run = RunDirectory(path)
    recipe = run.recipe()  # refuses what is no run
    steps, seconds, memory = 0, 0.0, None
    for record in read_records(run.metrics):
        # `seconds` of a record begins anew with every process that continues the run.
        if rate := record.get("images_per_second"):
            seconds += (record["step"] - steps) * recipe.data.batch_size / rate
            steps = record["step"]
        resident = record.get("memory/resident_gb", 0.0)
        memory = max(memory or 0.0, record.get("memory/gpu_allocated_gb", resident))
    certificate = whole_certificate(run)
    attack = attack_in(run, certificate[0]) if certificate else None
    return Run(name, path, recipe, certificate, steps, seconds, memory or None, attack)


def differing(runs: list[Run]) -> dict[str, list[Any]]:
    """Settings in which a run differs from the first, but run.dir; with the value of each run."""
    found = [configuration.differences(runs[0].recipe, run.recipe) for run in runs]
    firsts = {key: values[0] for one in found for key, values in one.items() if key != "run.dir"}
    return {
        key: [one[key][1] if key in one else first for one in found]
        for key, first in firsts.items()
    }


# --------------------------------------------------------------------------------------------------
# Figures, and whether they can be compared.


@dataclass(frozen=True)
class Figure:
    """A number of a run, None where it is not known. best: the function that finds it, if any."""

    title: str
    of: Callable[[Run], float | None]
    text: Callable[[Any], str]
    best: Callable[[list[float]], float] | None = None

    def spread(self, runs: list[Run]) -> tuple[float | None, float | None]:
        """Mean and standard deviation of the sample."""
        values = [value for value in map(self.of, runs) if value is not None]
        deviation = stdev(values) if len(values) > 1 else None
        return fmean(values) if values else None, deviation

    def cells(self, groups: Groups, mark: str) -> list[str]:
        """mean ± s.d., as far as that can be seen; `mark` is put on the best, if they differ."""
        spreads = [self.spread(runs) for runs in groups.values()]
        means = [mean for mean, _ in spreads if mean is not None]
        best = self.text(self.best(means)) if self.best and means else ""
        best = best if len({self.text(mean) for mean in means}) > 1 else ""
        cells = []
        for mean, deviation in spreads:
            shown, around = ("–" if x is None else self.text(x) for x in (mean, deviation))
            seen = around not in ("–", self.text(0.0))
            cells.append(mark.format(shown) if shown == best else shown)
            cells[-1] += f" ± {around}" if seen else ""
        return cells


def figures(runs: list[Run]) -> list[Figure]:
    """Those of a table, with every ε that a certificate reports."""
    radii = {float(e) for r in runs for e in r.of_facts(lambda f: f["certified_accuracy"]) or ()}
    attacked = any(run.attack for run in runs)
    return [
        share_at(0.0, "clean"),
        *map(share_at, sorted(radii)),
        Figure("K", lambda r: r.of_facts(lambda f: f["lipschitz_bound"]), "{:.6f}".format),
        *([Figure("violations", violations, "{:g}".format)] if attacked else []),
        Figure("steps", lambda run: run.steps, "{:,.0f}".format),
        Figure("training time", lambda run: run.seconds, duration, min),
        Figure("memory (GB)", lambda run: run.memory, "{:.2f}".format, min),
        Figure("parameters", lambda r: r.of_facts(parameters), "{:,.0f}".format, min),
    ]


def share_at(epsilon: float, title: str = "") -> Figure:
    title = title or f"CRA@{radius_name(epsilon)}"
    return Figure(title, lambda run: run.share(epsilon), "{:.2%}".format, max)


def violations(run: Run) -> int | None:
    """Images whose label an attack has changed inside their certified radius."""
    return len(run.attack["violations"]) if run.attack else None


def parameters(facts: dict[str, Any]) -> int | None:
    return facts["model"].get("parameters")


def test_set(facts: dict[str, Any]) -> str:
    data = facts["data"]
    resized = f", short side {data['resize']}" if data["resize"] else ""
    return f"{data['samples']:,} samples{resized}, {data['fingerprint'][:8]}"


def arithmetic(facts: dict[str, Any]) -> str:
    return facts["arithmetic"] + ("" if facts["certified"] else " (NO CERTIFICATE)")


# What certificates should have in common, and what is wrong where they have not.
COMMON = {
    "test set": (test_set, "on different test sets"),
    "arithmetic": (arithmetic, "in different arithmetic"),
}


def in_common(runs: list[Run]) -> tuple[list[str], list[str]]:
    """(warnings, notes): in what certificates differ, and what must be known to read a table."""
    warnings, notes = [], []
    for title, (of, wrong) in COMMON.items():
        values = {run.of_facts(of) for run in runs} - {None}
        if len(values) > 1:
            warnings.append(f"runs are certified {wrong}")
        notes += [f"{title}: {value}" for value in values if len(values) == 1]
    for run in runs:
        path = run.of_facts(lambda facts: Path(facts["model"]["path"]))
        if path is None:
            words = ["python", "-m", "lipnext_scale.certify", "--run", str(run.path)]
            notes.append(f"{run.name}: no certificate; this makes one: {shlex.join(words)}")
        elif path.parent.name == "checkpoints":
            notes.append(f"{run.name}: the certificate is of {path.name}")
    return warnings, [*(warning + NOT_COMPARABLE for warning in warnings), *notes]


# --------------------------------------------------------------------------------------------------
# Tables.


def write_tables(out: Path, title: str, groups: Groups, notes: list[str]) -> list[str]:
    """Tables and pictures of groups of runs; returns the lines for a terminal."""
    runs = [run for group in groups.values() for run in group]
    shown, (warnings, remarks) = figures(runs), in_common(runs)
    if len(groups) > MANY:
        pictures = {"rows.png": rows_by_radius(groups, shown, warnings)}
    else:
        pictures = {"curves.png": curves(groups, warnings)}
        pictures["tradeoffs.png"] = tradeoffs(groups, shown)
    with writing(out):
        out.mkdir(parents=True, exist_ok=True)
        for name in {"curves.png", "tradeoffs.png", "rows.png"} - pictures.keys():
            (out / name).unlink(missing_ok=True)  # of a table with fewer rows, or more
        page = markdown(title, grouped(groups, shown, "**{}**"), notes + remarks)
        page += "\n".join(f"![]({name})\n" for name in pictures)
        write_atomically(out / "table.md", page.encode())
        write_atomically(out / "table.tex", latex(grouped(groups, shown, "\0{}\1")).encode())
        heads = [head for one in shown for head in (one.title, f"{one.title} s.d.")]
        rows = [
            [name, len(own), *(number for one in shown for number in one.spread(own))]
            for name, own in groups.items()
        ]
        write_csv(out / "table.csv", [["row", "runs", *heads], *rows])
        for name, picture in pictures.items():
            with atomic_file(out / name) as file:
                picture.savefig(file, format="png")
    written = f"written: {out}/table.md, table.csv, table.tex, {', '.join(pictures)}"
    return [*aligned(grouped(groups, shown, "{}")), *notes, *remarks, written]


def grouped(groups: Groups, shown: list[Figure], mark: str) -> Rows:
    """A row for each group."""
    columns = [["", *groups], ["runs", *(str(len(runs)) for runs in groups.values())]]
    columns += [[one.title, *one.cells(groups, mark)] for one in shown]
    return [list(row) for row in zip(*columns, strict=True)]


def narrower(rows: Rows) -> Rows:
    """These rows, or turned: a few runs stand side by side, many one below the other."""
    turned = [list(row) for row in zip(*rows, strict=True)]
    return min(rows, turned, key=lambda table: len(aligned(table)[0]))


def aligned(rows: Rows) -> list[str]:
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    return [
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows
    ]


def markdown(title: str, rows: Rows, notes: list[str]) -> str:
    head, *others = [f"| {' | '.join(row)} |" for row in rows]
    lines = [f"# {title}", "", head, "|---" + "|---:" * (len(rows[0]) - 1) + "|", *others, ""]
    return "\n".join([*lines, *(f"- {note}" for note in notes), "", ""])


def latex(rows: Rows) -> str:
    """A tabular for booktabs; what is between \\0 and \\1 is bold."""
    cells = [[re.sub(r"([%&#$_{}])", r"\\\1", cell) for cell in row] for row in rows]
    head, *others = [" & ".join(row) + r" \\" for row in cells]
    begin = rf"\begin{{tabular}}{{l{'r' * (len(rows[0]) - 1)}}}"
    lines = [begin, r"\toprule", head, r"\midrule", *others, r"\bottomrule", r"\end{tabular}", ""]
    table = "\n".join(lines).replace("±", r"$\pm$").replace("–", "--")
    return table.replace("\0", r"\textbf{").replace("\1", "}")


# --------------------------------------------------------------------------------------------------
# Pictures.


def curves(groups: Groups, warnings: list[str]) -> Picture:
    """Certified accuracy over the radius: the mean of a group, in a band of ± s.d."""
    found = [run.certificate for runs in groups.values() for run in runs if run.certificate]
    # A hundredth of the right predictions may lie beyond the axis.
    ends = [np.quantile(own.radii * own.correct, 0.99) for _, own in found]
    ends += [float(key) for facts, _ in found for key in facts["certified_accuracy"]]
    radii, colors = np.linspace(0, 1.05 * max(ends, default=1), 400), matplotlib.colormaps["tab10"]
    figure, axes = new_figure()
    columns, top = 2 if max(map(len, groups)) < 20 else 1, 10.0
    figure.set_figheight(figure.get_figheight() + 0.2 * len(groups) / columns)
    for number, (name, runs) in enumerate(groups.items()):
        known = [run.certificate for run in runs if run.certificate]
        if not known:
            continue
        shares = np.array([[100 * own.share(radius) for radius in radii] for _, own in known])
        mean, around = shares.mean(0), shares.std(0, ddof=min(1, len(known) - 1))
        line, color = LINES[number % len(LINES)], colors(number % colors.N)
        top = max(top, 1.05 * (mean + around).max())
        axes.plot(radii, mean, line, color=color, lw=1.8, label=_label(name, runs))
        axes.fill_between(radii, mean - around, mean + around, color=color, alpha=0.2, lw=0)
    axes.set(xlabel="radius ε (l2 norm, pixels in [0, 1])", ylabel="certified accuracy (%)")
    axes.set(xlim=(0, radii[-1]), ylim=(0, min(top, 103)))
    axes.set_title("\n".join(warnings if found else ["no certificates"]), fontsize=9, color=WRONG)
    if found:
        figure.legend(loc="outside upper left", ncols=columns, frameon=False, labelcolor=INK)
    return figure


def rows_by_radius(groups: Groups, shown: list[Figure], warnings: list[str]) -> Picture:
    """A line for each row: its accuracy ± s.d., clean and at every ε."""
    scores = [one for one in shown if one.title.startswith(("clean", "CRA"))]
    figure = Picture(figsize=(9.6, 1.2 + 0.24 * len(groups)), dpi=120, layout="constrained")
    axes, places = quiet(figure.subplots()), range(len(groups))
    for number, score in enumerate(scores):
        means, around = zip(*map(score.spread, groups.values()), strict=True)
        color = f"C{number % 10}"
        found = [np.nan if mean is None else 100 * mean for mean in means]
        bars = [100 * (deviation or 0) for deviation in around]
        axes.axvline(found[0], color=color, lw=1, alpha=0.5)
        axes.errorbar(found, places, xerr=bars, fmt="o", ms=4, color=color, label=score.title)
    labels = [_label(name, runs) for name, runs in groups.items()]
    axes.set(yticks=places, yticklabels=labels, ylim=(len(groups) - 0.5, -0.5))
    axes.set(xlabel="accuracy (%); vertical lines: the first row", xlim=(0, None))
    axes.set_title("\n".join(warnings), fontsize=9, color=WRONG)
    figure.legend(loc="outside upper left", ncols=len(scores), frameon=False, labelcolor=INK)
    return figure


def tradeoffs(groups: Groups, shown: list[Figure]) -> Picture:
    """Clean and certified accuracy, at the ε that the first run was trained for, against costs."""
    first, *_ = (run for runs in groups.values() for run in runs)
    costs = [one for one in shown if one.title in ("training time", "memory (GB)", "parameters")]
    figure = Picture(figsize=(9.6, 6 + 0.08 * len(groups)), dpi=120, layout="constrained")
    panels = figure.subplots(2, len(costs), squeeze=False, sharex="col", sharey="row")
    scores = [share_at(0.0, "clean"), share_at(first.recipe.loss.epsilon)]
    for (row, score), (column, cost) in product(enumerate(scores), enumerate(costs)):
        axes = quiet(panels[row, column])
        _points(axes, groups, score, cost)
        axes.set(xlabel=cost.title if row else "", ylabel="" if column else score.title)
    names = panels[0, 0].get_legend_handles_labels()
    figure.legend(*names, loc="outside upper left", ncols=3, frameon=False, labelcolor=INK)
    return figure


def _points(axes: Axes, groups: Groups, score: Figure, cost: Figure) -> None:
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.xaxis.set_major_formatter(lambda value, _: cost.text(value))
    axes.xaxis.set_major_locator(MaxNLocator(4))
    for number, (name, runs) in enumerate(groups.items()):
        (x, dx), (y, dy) = cost.spread(runs), score.spread(runs)
        if x is not None and y is not None:
            marker, color = MARKERS[number % len(MARKERS)], f"C{number % 10}"
            axes.errorbar(x, y, dy, dx, fmt=marker, color=color, label=_short(name))
    axes.set_xlim(0, 1.05 * axes.get_xlim()[1])


def _label(name: str, runs: list[Run]) -> str:
    proven = all(run.certificate[0]["certified"] for run in runs if run.certificate)
    return _short(name) + ("" if proven else " (NO CERTIFICATE)")


def _short(name: str) -> str:
    return name if len(name) <= LONGEST else "…" + name[1 - LONGEST :]
