"""Tell what is in a set of shards: samples, sizes, classes, and whether the shards are shuffled.

    python -m data_prep.inspect DIRECTORY | INDEX | SHARDS … [--sheet OUT.png] [--json]

With --sheet a picture of some samples with their classes is written: look at it before you train.
"""

import json
from pathlib import Path
from typing import Any

from data_prep.checking.contents import SetView, statistics, view_set, write_sheet
from data_prep.checking.shard_sets import find_sets
from lipnext_scale.errors import ArgumentParser, UserError, command

BAR = 40
# A histogram of more classes than this shows the largest and the smallest only.
MOST_CLASSES = 40
SHOWN_OF_MANY = 10


def describe(view: SetView, values: dict[str, Any]) -> str:
    """The statistics as text."""
    where = f"{values['shards']:,} shards, {values['bytes']:,} bytes"
    lines = [view.title, f"  samples    {values['samples']:,} in {where}"]
    if values["samples"]:
        lines += [
            f"  images     {_listed(values['kinds'])}; channels {_listed(values['channels'])}",
            f"  height     {_spread(values['height'])}",
            f"  width      {_spread(values['width'])}",
            f"  bytes      {_spread(values['image_bytes'])}",
            *_shuffling(values),
        ]
    for name in ("source", "converter"):
        if values.get(name):
            lines.append(f"  {name:10} {json.dumps(values[name], ensure_ascii=False)}")
    if values.get("skipped"):
        lines.append(f"  skipped    {values['skipped']} samples of the source")
    if values["samples"]:
        lines += _histogram(view, values["class_counts"])
    return "\n".join(lines)


def _listed(counts: dict[str, int]) -> str:
    if len(counts) == 1:
        return next(iter(counts))
    return ", ".join(f"{name} ({count:,})" for name, count in counts.items())


def _spread(values: dict[str, float] | None) -> str:
    if values is None:
        return "not known; python -m data_prep.index reads it"
    if values["min"] == values["max"]:
        return f"{values['min']:,} of all"
    return f"{values['min']:,} to {values['max']:,}, median {values['median']:,.10g}"


def _shuffling(values: dict[str, Any]) -> list[str]:
    found = values["shuffling"]
    least = found["least_diverse"]
    verdict = "shuffled" if found["shards_shuffled"] else "NOT SHUFFLED"
    return [
        f"  shards     {verdict}: {found['mean_entropy']:.3f} bits of class entropy on average, "
        f"{found['random_entropy']:.3f} if drawn at random, {found['set_entropy']:.3f} in the set",
        f"             least in {least['shard']}: {least['entropy']:.3f} bits, "
        f"{least['of_random']:.0%} of a random draw's",
        f"  order      {found['same_class_neighbours']:.1%} of neighbours are of one class, "
        f"{found['same_class_pairs']:.1%} if in random order",
    ]


def _histogram(view: SetView, counts: dict[int, int]) -> list[str]:
    lines = [
        f"  classes    {len(counts):,}, of {min(counts.values()):,} to {max(counts.values()):,} "
        "samples each"
    ]
    missing = [label for label in range(len(view.classes)) if label not in counts]
    if missing:
        lines.append(
            f"             {len(missing):,} named classes have none: {_some(view, missing)}"
        )
    rows = sorted(counts.items())
    if len(rows) > MOST_CLASSES:
        by_count = sorted(rows, key=lambda row: (-row[1], row[0]))
        rows = [*by_count[:SHOWN_OF_MANY], (-1, -1), *by_count[-SHOWN_OF_MANY:]]
    largest, width = max(counts.values()), max(len(str(label)) for label in counts)
    for label, count in rows:
        if count < 0:
            lines.append(f"    … {len(counts) - 2 * SHOWN_OF_MANY:,} classes between them …")
            continue
        name, bar = view.class_name(label)[:24], "█" * round(BAR * count / largest)
        lines.append(f"    {label:{width}} {name:24} {count:9,} {bar}".rstrip())
    return lines


def _some(view: SetView, labels: list[int]) -> str:
    shown = ", ".join(f"{label} {view.class_name(label)}" for label in labels[:5])
    return shown + (", …" if len(labels) > 5 else "")


@command
def main(argv: list[str] | None = None) -> None:
    assert __doc__ is not None
    parser = ArgumentParser(prog="data_prep.inspect", description=__doc__.split("\n")[0])
    parser.add_argument("sets", nargs="+", metavar="SET", help="an index, a directory or shards")
    parser.add_argument("--sheet", type=Path, metavar="OUT.png", help="write a contact sheet")
    parser.add_argument("--samples", type=int, default=64, help="images of the sheet, of each set")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    arguments = parser.parse_args(argv)
    if not 1 <= arguments.samples <= 2000:
        raise UserError(f"--samples {arguments.samples}: must be from 1 to 2000")
    if arguments.sheet is not None and arguments.sheet.suffix.lower() != ".png":
        raise UserError(f"--sheet {arguments.sheet}: must end in .png")
    views = [view_set(shard_set) for shard_set in find_sets(arguments.sets)]
    values = [statistics(view) for view in views]
    if arguments.json:
        print(json.dumps(values, indent=1, ensure_ascii=False))
    else:
        print("\n\n".join(describe(v, x) for v, x in zip(views, values, strict=True)))
    if arguments.sheet is not None:
        write_sheet(arguments.sheet, views, arguments.samples)


if __name__ == "__main__":
    main()
