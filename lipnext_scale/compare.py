"""Compare runs: settings in which they differ and their certificates, in a table and a picture.

    python -m lipnext_scale.compare runs/a runs/b [--out DIR]

Prints the table, and writes compare.md, compare.csv and compare.png into the directory `comparison`
(or --out). It reads what the runs and `certify` have written, and computes nothing anew. Several
seeds become one row, mean ± s.d., with `python -m lipnext_scale.study compare`.
"""

import lipnext_scale.utils.passive  # noqa: F401

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lipnext_scale.certification.certificate import write_csv, writing
from lipnext_scale.studies import comparison
from lipnext_scale.studies.comparison import COMMON, Run
from lipnext_scale.utils.errors import ArgumentParser, command
from lipnext_scale.utils.files import atomic_file, write_atomically


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
    parser.add_runs("comparison")
    arguments = parser.parse_args(argv)
    out, runs = arguments.out, comparison.read_runs(arguments.runs)
    columns = all_columns(runs)
    differ = [column.title for column in columns if len({*column.values} - {None}) > 1]
    rows = [c.cells() for c in columns if c.title not in COMMON or c.title in differ]
    rows = comparison.narrower(rows)
    warnings, notes = comparison.in_common(runs)
    page = comparison.markdown("Comparison", rows, notes) + "![certified accuracy](compare.png)\n"
    with writing(out):
        out.mkdir(parents=True, exist_ok=True)
        write_atomically(out / "compare.md", page.encode())
        write_csv(out / "compare.csv", zip(*([c.title, *c.values] for c in columns), strict=True))
        with atomic_file(out / "compare.png") as file:
            groups = {run.name: [run] for run in runs}
            comparison.curves(groups, warnings).savefig(file, format="png")
    print("\n".join([*comparison.aligned(rows), *notes]))
    print(f"written: {out}/compare.md, compare.csv and compare.png")


def all_columns(runs: list[Run]) -> list[Column]:
    settings, figures = comparison.differing(runs), comparison.figures(runs)
    return [
        Column("run", [run.name for run in runs]),
        *(Column(key, list(map(str, values))) for key, values in settings.items()),
        *(Column(one.title, list(map(one.of, runs)), one.text) for one in figures),
        *(Column(title, [run.of_facts(of) for run in runs]) for title, (of, _) in COMMON.items()),
    ]


if __name__ == "__main__":
    main()
