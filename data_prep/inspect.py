"""Print what is in a set of shards: samples, sizes, classes, and whether the shards are shuffled.

    python -m data_prep.inspect DIRECTORY | INDEX | SHARDS … [--sheet OUT.png] [--json]

With --sheet a picture of some samples with their classes is written: look at it before you train.
"""

import lipnext_scale.utils.passive  # noqa: F401

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from data_prep.common import INDEX, command_parser, find_sets, number, writing
from lipnext_scale.data.catalog import Catalog, open_catalog
from lipnext_scale.data.decode import BadSample, decode
from lipnext_scale.data.index import KINDS, printable
from lipnext_scale.data.source import SampleStore
from lipnext_scale.utils.errors import UserError, command
from lipnext_scale.utils.files import atomic_file

CHANCE = 20  # pairs of one class that a shuffled shard may have beyond twice its share
BAR = 40
SHOWN = 20  # classes at either end of a histogram
# Pixels of the sheet. 128 is a whole number of times the side of most small images.
THUMB, CAPTION, GAP, COLUMNS = 128, 20, 12, 8
LONGEST_CAPTION = 18  # letters
PAPER, INK, BAD = "#ffffff", "#1d2733", "#c0392b"


def open_sets(argument: str) -> list[Catalog]:
    patterns = [argument]
    if Path(argument).is_dir() or argument.endswith(INDEX):
        patterns = [shard_set.pattern for shard_set in find_sets([argument])]
    return [open_catalog(pattern, "SET") for pattern in patterns]


def all_records(catalog: Catalog) -> np.ndarray:
    return np.concatenate([shard.records for shard in catalog.shards])


def class_name(catalog: Catalog, label: int) -> str:
    classes = catalog.shards[0].classes
    return classes[label] if 0 <= label < len(classes) else ""


# --------------------------------------------------------------------------------------------------
# The figures.


def statistics(catalog: Catalog) -> dict[str, Any]:
    """From the records alone: no image is decoded."""
    records = all_records(catalog)
    labels, counts = np.unique(records["label"], return_counts=True)
    return {
        "set": catalog.pattern,
        "samples": len(records),
        "shards": len(catalog.shards),
        "bytes": sum(shard.bytes for shard in catalog.shards),
        "kinds": _counted(records["kind"], {number: name for name, number in KINDS.items()}),
        "channels": _counted(records["channels"], {0: "not known"}),
        "height": _spread(records["height"]),
        "width": _spread(records["width"]),
        "image_bytes": _spread(records["size"]),
        "class_names": catalog.shards[0].classes,
        "class_counts": dict(zip(labels.tolist(), counts.tolist(), strict=True)),
        "shuffling": _shuffling(catalog, counts),
    }


def _counted(values: np.ndarray, names: dict[int, str]) -> dict[str, int]:
    found, counts = np.unique(values, return_counts=True)
    pairs = zip(found.tolist(), counts.tolist(), strict=True)
    return {names.get(value, str(value)): count for value, count in pairs}


def _spread(values: np.ndarray) -> dict[str, float] | None:
    """Smallest, median and largest of the known values; None if none is known."""
    known = values[values > 0]
    if not len(known):
        return None
    return {"min": int(known.min()), "median": float(np.median(known)), "max": int(known.max())}


def _shuffling(catalog: Catalog, counts: np.ndarray) -> dict[str, Any]:
    """How often two samples of a shard are of one class, beside two samples of the set: about as
    often where the shards are shuffled."""
    expected, found = _same_class(counts), []
    for shard in catalog.shards:
        if pairs := len(shard.records) * (len(shard.records) - 1) // 2:
            share = _same_class(np.unique(shard.records["label"], return_counts=True)[1])
            found.append((share - 2 * expected - CHANCE / pairs, share, shard.name))
    excess, share, name = max(found, default=(0.0, 0.0, ""))
    return {
        "same_class_pairs": expected,
        "most_in_a_shard": share,
        "shard": name,
        "shards_shuffled": excess <= 0,
    }


def _same_class(counts: np.ndarray) -> float:
    """The share of pairs of samples that are of one class."""
    total = int(counts.sum())
    return float((counts * (counts - 1)).sum() / max(1, total * (total - 1)))


def describe(catalog: Catalog, values: dict[str, Any]) -> str:
    """The statistics as text, with a bar for each class."""
    hidden, counts = ("set", "class_names", "class_counts"), values["class_counts"]
    lines = [values["set"]]
    lines += [f"  {key:12} {_text(value)}" for key, value in values.items() if key not in hidden]
    if not values["shuffling"]["shards_shuffled"]:
        lines.append("  The shards are NOT SHUFFLED: training needs shards of mixed classes.")
    if missing := [i for i in range(len(values["class_names"])) if i not in counts]:
        some = ", ".join(f"{label} {class_name(catalog, label)}" for label in missing[:5])
        lines.append(f"  {len(missing):,} named classes have no samples: {some}")
    most = max(counts.values())
    bars = [
        f"    {label:5} {class_name(catalog, label)[:24]:24} {count:9,} "
        + "█" * round(BAR * count / most)
        for label, count in sorted(counts.items(), key=lambda row: -row[1])
    ]
    if len(bars) > 2 * SHOWN:
        bars[SHOWN:-SHOWN] = [f"    … {len(bars) - 2 * SHOWN:,} classes between them …"]
    return "\n".join(lines + bars)


def _text(value: Any) -> str:
    if value is None:
        return "not known; python -m data_prep.index reads it"
    if isinstance(value, dict):
        return ", ".join(f"{name}: {_text(part)}" for name, part in value.items())
    if isinstance(value, float):
        return f"{value:,.4g}"
    return f"{value:,}" if type(value) is int else str(value)


# --------------------------------------------------------------------------------------------------
# The sheet: some samples with their classes.


def write_sheet(path: Path, catalogs: list[Catalog], samples: int) -> None:
    tiles = [tile for catalog in catalogs for tile in _tiles(catalog, samples)]
    across, down = THUMB + GAP, THUMB + CAPTION + GAP
    size = (GAP + COLUMNS * across, GAP + -(-len(tiles) // COLUMNS) * down)
    sheet = Image.new("RGB", size, PAPER)
    for place, tile in enumerate(tiles):
        sheet.paste(tile, (GAP + place % COLUMNS * across, GAP + place // COLUMNS * down))
    with writing(f"--sheet {path}"), atomic_file(path) as file:
        sheet.save(file, format="PNG")
    print(f"{path}: {sheet.width}×{sheet.height} pixels")


def _tiles(catalog: Catalog, samples: int) -> Iterator[Image.Image]:
    """The name of the set, then some of its images; a bad image is red."""
    yield _tile(Image.new("RGB", (THUMB, THUMB), PAPER), Path(catalog.pattern).name)
    records, store = all_records(catalog), SampleStore(catalog)
    for sample in choose(records, samples).tolist():
        try:
            image = _thumbnail(decode(*store.read(sample)))
        except BadSample:
            image = Image.new("RGB", (THUMB, THUMB), BAD)
        label = int(records["label"][sample])
        yield _tile(image, f"{label} {class_name(catalog, label)}")


def _tile(image: Image.Image, caption: str) -> Image.Image:
    tile = Image.new("RGB", (THUMB, THUMB + CAPTION), PAPER)
    tile.paste(image)
    text, font = printable(caption)[:LONGEST_CAPTION], ImageFont.load_default(12)
    ImageDraw.Draw(tile).text((0, THUMB + 4), text, INK, font)
    return tile


def choose(records: np.ndarray, samples: int) -> np.ndarray:
    """Numbers of samples to show: spread evenly over the classes, drawn at random within them."""
    order = np.random.default_rng(0).permutation(len(records))
    order = order[np.argsort(records["label"][order], kind="stable")]
    count = min(samples, len(records))
    return order[np.arange(count) * len(records) // count]


def _thumbnail(pixels: np.ndarray) -> Image.Image:
    """Small images are enlarged by a whole factor, so that their pixels can be counted."""
    image = Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels)
    if factor := THUMB // max(image.size):
        size = (image.width * factor, image.height * factor)
        return image.resize(size, Image.Resampling.NEAREST)
    image.thumbnail((THUMB, THUMB), Image.Resampling.LANCZOS)
    return image


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
    catalogs = [catalog for argument in arguments.sets for catalog in open_sets(argument)]
    values = [statistics(catalog) for catalog in catalogs]
    if arguments.json:
        print(json.dumps(values, indent=1, ensure_ascii=False))
    else:
        print("\n\n".join(describe(c, v) for c, v in zip(catalogs, values, strict=True)))
    if arguments.sheet is not None:
        write_sheet(arguments.sheet, catalogs, arguments.samples)


if __name__ == "__main__":
    main()
