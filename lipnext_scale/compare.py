"""Compare runs: settings in which they differ and their certificates, in a table and a picture.

    python -m lipnext_scale.compare runs/a runs/b [--out DIR]

Prints the table, and writes compare.md, compare.csv and compare.png into the directory `comparison`
(or --out). It reads what the runs and `certify` have written, and computes nothing anew.
"""

import lipnext_scale.utils.passive  # noqa: F401

import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from lipnext_scale.certification.certificate import (
    SampleResults,
    radius_name,
    whole_certificate,
    write_csv,
    writing,
)
from lipnext_scale.certification.report import INK, WRONG, new_figure
from lipnext_scale.config.recipe import Recipe
from lipnext_scale.config.run_directory import RunDirectory
from lipnext_scale.observe.console import duration
from lipnext_scale.observe.metrics import read_records
from lipnext_scale.utils import config as configuration
from lipnext_scale.utils.errors import ArgumentParser, UserError, command
from lipnext_scale.utils.files import atomic_file, write_atomically

# Columns of the table where certificates differ in them, else a line below it.
COMMON = {"test set": "on different test sets", "arithmetic": "in different arithmetic"}
NOT_COMPARABLE = ": their figures are not comparable as they stand"
LONGEST = 45  # characters of a run's name beside its curve
LINES = ("-", "--", "-.", ":")


@dataclass(frozen=True)
class Run:
    """name: of the directory, or its path where several have that name. seconds: of all steps,
    without evaluations."""

    name: str
    path: Path
    recipe: Recipe
    certificate: tuple[dict[str, Any], SampleResults] | None
    steps: int
    seconds: float


@dataclass(frozen=True)
class Column:
    """values: one of each run, None where it is not known."""

    title: str
    values: list[Any]
    text: Callable[[Any], str] = str

    def cells(self) -> list[str]:
        return [self.title, *("–" if value is None else self.text(value) for value in self.values)]


@command
def main(argv: list[str] | None = None) -> None:
    parser = ArgumentParser(prog="lipnext_scale.compare", description=__doc__.split("\n")[0])
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run directories")
    parser.add_argument(
        "--out", type=Path, metavar="DIR", default="comparison", help="where to write (comparison)"
    )
    arguments = parser.parse_args(argv)
    out: Path = arguments.out
    if out.is_file():
        raise UserError(f"--out {out}: is a file; must be a directory")
    names = [path.absolute().name for path in arguments.runs]
    runs = [
        read_run(path, name if names.count(name) == 1 else str(path))
        for path, name in zip(arguments.runs, names, strict=True)
    ]
    columns = all_columns(runs)
    differ = [column.title for column in columns if len({*column.values} - {None}) > 1]
    rows = narrower([c.cells() for c in columns if c.title not in COMMON or c.title in differ])
    warnings = [f"runs are certified {COMMON[title]}" for title in COMMON if title in differ]
    notes = [warning + NOT_COMPARABLE for warning in warnings]
    notes += remarks(runs, [c for c in columns if c.title in COMMON and c.title not in differ])
    with writing(out):
        out.mkdir(parents=True, exist_ok=True)
        write_atomically(out / "compare.md", markdown(rows, notes).encode())
        write_csv(out / "compare.csv", zip(*([c.title, *c.values] for c in columns), strict=True))
        with atomic_file(out / "compare.png") as file:
            picture(runs, warnings).savefig(file, format="png")
    print("\n".join([*aligned(rows), *notes]))
    print(f"written: {out}/compare.md, compare.csv and compare.png")


def read_run(path: Path, name: str) -> Run:
    run = RunDirectory(path)
    recipe = run.recipe()  # refuses what is no run
    steps, seconds = 0, 0.0
    for record in read_records(run.metrics):
        # `seconds` of a record begins anew with every process that continues the run.
        if rate := record.get("images_per_second"):
            seconds += (record["step"] - steps) * recipe.data.batch_size / rate
            steps = record["step"]
    return Run(name, path, recipe, whole_certificate(run), steps, seconds)


# --------------------------------------------------------------------------------------------------
# The table: a column for each figure, and for each setting in which runs differ.


def all_columns(runs: list[Run]) -> list[Column]:
    found = [run.certificate for run in runs]

    def of_facts(title: str, value: Callable[[dict[str, Any]], Any], text: Any = str) -> Column:
        return Column(title, [value(one[0]) if one else None for one in found], text)

    def share(title: str, epsilon: float) -> Column:
        shares = [one[1].share(epsilon) if one else None for one in found]
        return Column(title, shares, "{:.2%}".format)

    epsilons = {float(key) for one in found if one for key in one[0]["certified_accuracy"]}
    return [
        Column("run", [run.name for run in runs]),
        *settings(runs),
        share("clean", 0.0),
        *(share(f"CRA@{radius_name(epsilon)}", epsilon) for epsilon in sorted(epsilons)),
        of_facts("K", lambda facts: facts["lipschitz_bound"], "{:.6f}".format),
        Column("steps", [run.steps for run in runs], "{:,}".format),
        Column("training time", [run.seconds for run in runs], duration),
        of_facts("test set", test_set),
        of_facts("arithmetic", arithmetic),
    ]


def settings(runs: list[Run]) -> list[Column]:
    """Those in which a run differs from the first; run.dir always does."""
    differing = [configuration.differences(runs[0].recipe, run.recipe) for run in runs]
    firsts = {key: values[0] for found in differing for key, values in found.items()}
    return [
        Column(key, [str(found[key][1] if key in found else first) for found in differing])
        for key, first in firsts.items()
        if key != "run.dir"
    ]


def test_set(facts: dict[str, Any]) -> str:
    data = facts["data"]
    resized = f", short side {data['resize']}" if data["resize"] else ""
    return f"{data['samples']:,} samples{resized}, {data['fingerprint'][:8]}"


def arithmetic(facts: dict[str, Any]) -> str:
    return facts["arithmetic"] + ("" if facts["certified"] else " (NO CERTIFICATE)")


def remarks(runs: list[Run], common: list[Column]) -> list[str]:
    """What must be known to read the table."""
    found = [f"{c.title}: {value}" for c in common for value in {*c.values} - {None}]
    for run in runs:
        if run.certificate is None:
            words = ["python", "-m", "lipnext_scale.certify", "--run", str(run.path)]
            found.append(f"{run.name}: no certificate; this makes one: {shlex.join(words)}")
        elif (path := Path(run.certificate[0]["model"]["path"])).parent.name == "checkpoints":
            found.append(f"{run.name}: the certificate is of {path.name}")
    return found


def narrower(rows: list[list[str]]) -> list[list[str]]:
    """These rows, or turned: a few runs stand side by side, many one below the other."""
    turned = [list(row) for row in zip(*rows, strict=True)]
    return min(rows, turned, key=lambda table: len(aligned(table)[0]))


def aligned(rows: list[list[str]]) -> list[str]:
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    return [
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows
    ]


def markdown(rows: list[list[str]], notes: list[str]) -> str:
    head, *others = [f"| {' | '.join(row)} |" for row in rows]
    lines = ["# Comparison", "", head, "|---" + "|---:" * (len(rows[0]) - 1) + "|", *others, ""]
    lines += [*(f"- {note}" for note in notes), "", "![certified accuracy](compare.png)", ""]
    return "\n".join(lines)


def picture(runs: list[Run], warnings: list[str]) -> Figure:
    """Certified accuracy over the radius, a curve for each certificate."""
    shown = [(run.name, *run.certificate) for run in runs if run.certificate]
    # A hundredth of the right predictions may lie beyond the axis.
    ends = [np.quantile(own.radii * own.correct, 0.99) for _, _, own in shown]
    ends += [float(key) for _, facts, _ in shown for key in facts["certified_accuracy"]]
    radii, colors = np.linspace(0, 1.05 * max(ends, default=1), 400), matplotlib.colormaps["tab10"]
    figure, axes = new_figure()
    figure.set_figheight(figure.get_figheight() + 0.2 * len(shown))
    for number, (name, facts, results) in enumerate(shown):
        shares = [100 * results.share(radius) for radius in radii]
        label = name if len(name) <= LONGEST else "…" + name[1 - LONGEST :]
        label += "" if facts["certified"] else " (NO CERTIFICATE)"
        line = LINES[number % len(LINES)]  # where colours are not seen
        axes.plot(radii, shares, line, color=colors(number % colors.N), lw=1.8, label=label)
    axes.set(xlabel="radius ε (l2 norm, pixels in [0, 1])", ylabel="certified accuracy (%)")
    axes.set(xlim=(0, radii[-1]), ylim=(0, 103))
    axes.set_title("\n".join(warnings if shown else ["no certificates"]), fontsize=9, color=WRONG)
    if shown:
        figure.legend(loc="outside upper left", frameon=False, labelcolor=INK)
    return figure


if __name__ == "__main__":
    main()
