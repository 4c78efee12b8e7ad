"""Print what is in a set of shards: samples, sizes, classes, and whether the shards are shuffled.

    python -m data_prep.inspect DIRECTORY | INDEX | SHARDS … [--sheet OUT.png] [--json]

With --sheet a picture of some samples with their classes is written: look at it before you train.
"""

import json
import os
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from PIL import Image, ImageDraw, ImageFont

from data_prep.common import ShardSet, command_parser, find_sets, number, printable, writing
from lipnext_scale.data.decode import BadSample, channels_of, decode
from lipnext_scale.data.index import (
    KINDS,
    Record,
    beton_records,
    index_paths,
    map_records,
    read_index,
    scan_tar,
)
from lipnext_scale.utils.errors import UserError, command
from lipnext_scale.utils.files import atomic_file

CHANCE = 20  # pairs of one class that a shuffled shard may have beyond twice its share
BAR = 40
# A histogram of more classes than this shows the largest and the smallest only.
MOST_CLASSES = 40
SHOWN_OF_MANY = 10
# Pixels of the sheet. 128 is a whole number of times the side of most small images.
THUMB, GAP, MARGIN, CAPTION, TITLE = 128, 12, 28, 20, 58
FEWEST_COLUMNS, MOST_COLUMNS = 6, 12
LONGEST_CAPTION = 18  # letters
PAPER, INK, FAINT, BAD = "#ffffff", "#1d2733", "#7a8594", "#c0392b"


@dataclass
class SetView:
    """The shards of a set with their records, and what the index says of them if there is one."""

    title: str
    directory: Path
    files: list[str]
    shards: list[np.ndarray]
    bytes: int
    classes: list[str] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)

    def records(self) -> np.ndarray:
        return np.concatenate(self.shards) if self.shards else np.zeros(0)

    def class_name(self, label: int) -> str:
        return self.classes[label] if 0 <= label < len(self.classes) else ""


def view_set(shard_set: ShardSet) -> SetView:
    """Open a set by its index, or by its shards' headers."""
    title, directory = shard_set.title, shard_set.directory
    if shard_set.index is None:
        files = shard_set.files or []
        paths = [directory / file for file in files]
        shards = [beton_records(p) if p.suffix == ".beton" else scan_tar(p)[0] for p in paths]
        return SetView(title, directory, files, shards, sum(p.stat().st_size for p in paths))
    index = read_index(shard_set.index)
    records = map_records(index_paths(directory, shard_set.name)[1], index.samples)
    facts = {"source": index.source, "converter": index.converter, "skipped": len(index.skipped)}
    view = SetView(title, directory, [], [], 0, index.classes, facts)
    first = 0
    for entry in index.shards:
        if shard_set.files is None or entry.file in shard_set.files:
            view.files.append(entry.file)
            view.shards.append(records[first : first + entry.samples])
            view.bytes += entry.bytes
        first += entry.samples
    return view


# --------------------------------------------------------------------------------------------------
# The figures.


def statistics(view: SetView) -> dict[str, Any]:
    """From the records alone: no image is decoded."""
    records = view.records()
    shards = {"shards": len(view.files), "bytes": view.bytes}
    values: dict[str, Any] = {"set": view.title, "samples": len(records), **shards}
    if not len(records):
        return values
    labels, counts = np.unique(records["label"], return_counts=True)
    return values | {
        "kinds": _counted(records["kind"], {number: name for name, number in KINDS.items()}),
        "channels": _counted(records["channels"], {0: "not known"}),
        "height": _spread(records["height"]),
        "width": _spread(records["width"]),
        "image_bytes": _spread(records["size"]),
        "class_names": view.classes,
        "class_counts": dict(zip(labels.tolist(), counts.tolist(), strict=True)),
        "shuffling": _shuffling(view, counts),
        **view.facts,
    }


def _counted(values: np.ndarray, names: dict[int, str]) -> dict[str, int]:
    found, counts = np.unique(values, return_counts=True)
    pairs = zip(found.tolist(), counts.tolist(), strict=True)
    return {names.get(value, str(value)): count for value, count in pairs}


def _spread(values: np.ndarray) -> dict[str, float] | None:
    """Smallest, median and largest of those that are known; None if none is."""
    known = values[values > 0]
    if not len(known):
        return None
    return {"min": int(known.min()), "median": float(np.median(known)), "max": int(known.max())}


def _shuffling(view: SetView, counts: np.ndarray) -> dict[str, Any]:
    """How often two samples of a shard are of one class, beside two samples of the set: about as
    often where the shards are shuffled."""
    expected, found = _same_class(counts), []
    for file, records in zip(view.files, view.shards, strict=True):
        if pairs := len(records) * (len(records) - 1) // 2:
            share = _same_class(np.unique(records["label"], return_counts=True)[1])
            found.append((share - 2 * expected - CHANCE / pairs, share, file))
    excess, share, file = max(found, default=(0.0, 0.0, ""))
    same = sum(int((r["label"][1:] == r["label"][:-1]).sum()) for r in view.shards)
    return {
        "same_class_pairs": expected,
        "same_class_pairs_of_shards": float(np.mean([s for _, s, _ in found])) if found else 0.0,
        "least_diverse": {"shard": file, "same_class_pairs": share},
        "same_class_neighbours": same / max(1, sum(max(len(r) - 1, 0) for r in view.shards)),
        "shards_shuffled": excess <= 0,
    }


def _same_class(counts: np.ndarray) -> float:
    """Of the pairs of samples the share that is of one class."""
    total = int(counts.sum())
    return float((counts * (counts - 1)).sum() / max(1, total * (total - 1)))


def describe(view: SetView, values: dict[str, Any]) -> str:
    """The statistics as text, with a bar for each class."""
    hidden = ("set", "class_names", "class_counts")
    lines = [view.title]
    lines += [f"  {key:12} {_text(value)}" for key, value in values.items() if key not in hidden]
    if counts := values.get("class_counts"):
        if not values["shuffling"]["shards_shuffled"]:
            lines.append("  The shards are NOT SHUFFLED: training needs shards of mixed classes.")
        missing = [label for label in range(len(view.classes)) if label not in counts]
        if missing:
            some = ", ".join(f"{label} {view.class_name(label)}" for label in missing[:5])
            lines.append(f"  {len(missing):,} named classes have no samples: {some}")
        lines += _histogram(view, counts)
    return "\n".join(lines)


def _text(value: Any) -> str:
    if value is None:
        return "not known; python -m data_prep.index reads it"
    if isinstance(value, dict):
        parts = {k: f"({_text(v)})" if isinstance(v, dict) else _text(v) for k, v in value.items()}
        return ", ".join(f"{name}: {part}" for name, part in parts.items()) or "-"
    if isinstance(value, float):
        return f"{value:,.4g}"
    return f"{value:,}" if type(value) is int else str(value)


def _histogram(view: SetView, counts: dict[int, int]) -> list[str]:
    """By label, or by size where there are many classes."""
    rows, most = sorted(counts.items()), max(counts.values())
    if many := len(rows) > MOST_CLASSES:
        rows.sort(key=lambda row: -row[1])
    width = max(len(str(label)) for label in counts)
    lines = [
        f"    {label:{width}} {view.class_name(label)[:24]:24} {count:9,} "
        + "█" * round(BAR * count / most)
        for label, count in rows
    ]
    if many:
        between = f"    … {len(rows) - 2 * SHOWN_OF_MANY:,} classes between them …"
        lines[SHOWN_OF_MANY:-SHOWN_OF_MANY] = [between]
    return lines


# --------------------------------------------------------------------------------------------------
# The sheet: some samples with their classes.


def write_sheet(path: Path, views: list[SetView], samples: int) -> None:
    """One picture with a section for each set."""
    sections = [_section(view, samples) for view in views if sum(map(len, view.shards))]
    if not sections:
        raise UserError(f"--sheet {path}: the shards hold no samples to show")
    size = max(s.width for s in sections), sum(s.height for s in sections)
    sheet, top = Image.new("RGB", size, PAPER), 0
    for section in sections:
        sheet.paste(section, (0, top))
        top += section.height
    with writing(f"--sheet {path}"), atomic_file(path) as file:
        sheet.save(file, format="PNG")
    print(f"{path}: {sheet.width}×{sheet.height} pixels")


def _section(view: SetView, samples: int) -> Image.Image:
    records = view.records()
    chosen = choose(records, samples)
    columns = min(MOST_COLUMNS, max(FEWEST_COLUMNS, int(np.ceil(np.sqrt(len(chosen))))))
    across, down = THUMB + GAP, THUMB + CAPTION + GAP
    size = (2 * MARGIN + columns * across, TITLE + -(-len(chosen) // columns) * down + 2 * MARGIN)
    picture = Image.new("RGB", size, PAPER)
    draw = ImageDraw.Draw(picture)
    draw.text((MARGIN, MARGIN - 6), Path(view.title).name, INK, _font(20))
    classes = len(np.unique(records["label"]))
    text = f"{len(records):,} samples, {classes:,} classes, {len(view.files):,} shards"
    draw.text((MARGIN, MARGIN + 22), f"{text}; {len(chosen)} shown", FAINT, _font(13))
    starts = np.cumsum([0, *map(len, view.shards)])
    for place, sample in enumerate(chosen.tolist()):
        left = MARGIN + place % columns * across
        top = MARGIN + TITLE + place // columns * down
        file = view.files[int(np.searchsorted(starts, sample, side="right")) - 1]
        record = Record(*records[sample].item())
        try:
            picture.paste(_thumbnail(view.directory / file, record), (left, top))
        except (BadSample, OSError):
            draw.line((left, top, left + THUMB, top + THUMB), BAD, 2)
            draw.line((left + THUMB, top, left, top + THUMB), BAD, 2)
        caption = printable(f"{record.label} {view.class_name(record.label)}")[:LONGEST_CAPTION]
        draw.text((left, top + THUMB + 4), caption, INK, _font(12))
    return picture


def choose(records: np.ndarray, samples: int) -> np.ndarray:
    """Numbers of samples to show: spread evenly over the classes, drawn at random within them."""
    order = np.random.default_rng(0).permutation(len(records))
    order = order[np.argsort(records["label"][order], kind="stable")]
    count = min(samples, len(records))
    return order[np.arange(count) * len(records) // count]


def _thumbnail(path: Path, record: Record) -> Image.Image:
    """Small images are enlarged by a whole factor, so that their pixels can be counted."""
    with path.open("rb") as file:
        encoded = os.pread(file.fileno(), record.size, record.offset)
    channels = record.channels or channels_of(encoded, record.kind)
    pixels = decode(encoded, record.kind, channels, (record.height, record.width, record.channels))
    image = Image.fromarray(pixels[:, :, 0] if channels == 1 else pixels).convert("RGB")
    if factor := THUMB // max(image.size):
        size = (image.width * factor, image.height * factor)
        return image.resize(size, Image.Resampling.NEAREST)
    image.thumbnail((THUMB, THUMB), Image.Resampling.LANCZOS)
    return image


@cache
def _font(size: int) -> ImageFont.FreeTypeFont:
    """matplotlib carries a font with most alphabets; Pillow's own has few letters."""
    path = Path(matplotlib.get_data_path()) / "fonts" / "ttf" / "DejaVuSans.ttf"
    return ImageFont.truetype(str(path), size)


@command
def main(argv: list[str] | None = None) -> None:
    parser = command_parser("inspect", __doc__)
    parser.add_argument("sets", nargs="+", metavar="SET", help="an index, a directory or shards")
    parser.add_argument("--sheet", type=Path, metavar="OUT.png", help="write a contact sheet")
    images = "images of the sheet, of each set (default 64)"
    parser.add_argument("--samples", type=number(1, 2000), default=64, help=images)
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    arguments = parser.parse_args(argv)
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
