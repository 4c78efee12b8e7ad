"""Compare runs: settings in which they differ and their certificates, in a table and a picture.

    python -m lipnext_scale.compare runs/a runs/b [--out DIR]

Prints the table, and writes compare.md, compare.csv and compare.png into the directory `comparison`
(or --out). It reads what the runs and `certify` have written, and computes nothing anew. Several
seeds become one row, mean ± s.d., with `python -m lipnext_scale.study compare`.
"""

import lipnext_scale.utils.passive  # noqa: F401

from collections.abc import Callable
from typing import Any

from lipnext_scale.certification.certificate import write_csv, writing
from lipnext_scale.studies import comparison
from lipnext_scale.studies.comparison import COMMON, Run
from lipnext_scale.utils.errors import ArgumentParser, command
from lipnext_scale.utils.files import atomic_file, write_atomically


@command
def main(argv: list[str] | None = None) -> None:
    parser = ArgumentParser(prog="lipnext_scale.compare", description=__doc__.split("\n")[0])
    parser.add_runs("comparison")
    arguments = parser.parse_args(argv)
    out, runs = arguments.out, comparison.read_runs(arguments.runs)
    columns = all_columns(runs)
    differ = {title for title, values, _ in columns if len({*values} - {None}) > 1}
    rows = comparison.narrower(
        [
            [title, *("–" if value is None else text(value) for value in values)]
            for title, values, text in columns
            if title not in COMMON or title in differ
        ]
    )
    warnings, notes = comparison.in_common(runs)
    page = comparison.markdown("Comparison", rows, notes) + "![certified accuracy](compare.png)\n"
    with writing(out):
        out.mkdir(parents=True, exist_ok=True)
        write_atomically(out / "compare.md", page.encode())
        numbers = [[title, *values] for title, values, _ in columns]
        write_csv(out / "compare.csv", zip(*numbers, strict=True))
        with atomic_file(out / "compare.png") as file:
            groups = {run.name: [run] for run in runs}
            comparison.curves(groups, warnings).savefig(file, format="png")
    print("\n".join([*comparison.aligned(rows), *notes]))
    print(f"written: {out}/compare.md, compare.csv and compare.png")


def all_columns(runs: list[Run]) -> list[tuple[str, list[Any], Callable[[Any], str]]]:
    """Title, a value of each run or None where it is not known, and how to show one."""
    settings, common = comparison.differing(runs).items(), COMMON.items()
    return [
        ("run", [run.name for run in runs], str),
        *((key, list(map(str, values)), str) for key, values in settings),
        *((one.title, list(map(one.of, runs)), one.text) for one in comparison.figures(runs)),
        *((title, [run.of_facts(of) for run in runs], str) for title, (of, _) in common),
    ]


if __name__ == "__main__":
    main()
