"""What a set of shards is like, from its records alone: no image is decoded."""

import os
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from PIL import Image, ImageDraw, ImageFont

from data_prep.checking.shard_sets import ShardSet
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
from lipnext_scale.errors import UserError
from lipnext_scale.files import atomic_file

# A shard is taken for shuffled if its classes are at least so diverse beside a random draw's.
SHUFFLED = 0.9
_DRAWS = 4


@dataclass
class SetView:
    """The shards of a set with their records, and what the index says of them if there is one."""

    title: str
    directory: Path
    files: list[str]
    records: list[np.ndarray]
    bytes: int
    classes: list[str] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)

    def all_records(self) -> np.ndarray:
        return np.concatenate(self.records) if self.records else np.zeros(0)

    def class_name(self, label: int) -> str:
        return self.classes[label] if 0 <= label < len(self.classes) else ""


def view_set(shard_set: ShardSet) -> SetView:
    """Open a set by its index, or by its shards' headers."""
    if shard_set.index is None:
        files = shard_set.files or []
        paths = [shard_set.directory / file for file in files]
        records = [beton_records(p) if p.suffix == ".beton" else scan_tar(p)[0] for p in paths]
        size = sum(path.stat().st_size for path in paths)
        return SetView(shard_set.title, shard_set.directory, files, records, size)
    index = read_index(shard_set.index)
    everything = map_records(index_paths(shard_set.directory, shard_set.name)[1], index.samples)
    facts = {
        "source": index.source,
        "converter": index.converter,
        "skipped": len(index.skipped),
    }
    view = SetView(shard_set.title, shard_set.directory, [], [], 0, index.classes, facts)
    first = 0
    for entry in index.shards:
        if shard_set.files is None or entry.file in shard_set.files:
            view.files.append(entry.file)
            view.records.append(everything[first : first + entry.samples])
            view.bytes += entry.bytes
        first += entry.samples
    return view


def statistics(view: SetView) -> dict[str, Any]:
    """Everything that inspect tells, as plain values."""
    records = view.all_records()
    if not len(records):
        return {"set": view.title, "samples": 0, "shards": len(view.files), "bytes": view.bytes}
    labels, counts = np.unique(records["label"], return_counts=True)
    return {
        "set": view.title,
        "samples": len(records),
        "shards": len(view.files),
        "bytes": view.bytes,
        "kinds": _counted(records["kind"], {number: name for name, number in KINDS.items()}),
        "channels": _counted(records["channels"], {0: "not known"}),
        "height": _spread(records["height"]),
        "width": _spread(records["width"]),
        "image_bytes": _spread(records["size"]),
        "class_names": view.classes,
        "class_counts": {int(a): int(b) for a, b in zip(labels, counts, strict=True)},
        "shuffling": _shuffling(view, labels, counts),
        **view.facts,
    }


def _counted(values: np.ndarray, names: dict[int, str]) -> dict[str, int]:
    found, counts = np.unique(values, return_counts=True)
    pairs = zip(found, counts, strict=True)
    return {names.get(int(value), str(value)): int(count) for value, count in pairs}


def _spread(values: np.ndarray) -> dict[str, float] | None:
    """Smallest, median and largest of those that are known; None if none is."""
    known = values[values > 0]
    if not len(known):
        return None
    return {
        "min": int(known.min()),
        "median": float(np.median(known)),
        "max": int(known.max()),
    }


def _shuffling(view: SetView, labels: np.ndarray, counts: np.ndarray) -> dict[str, Any]:
    """How diverse the classes of each shard are beside those of as many samples drawn at random:
    the bits of entropy of few samples are fewer than those of the set, shuffled or not."""
    generator = np.random.default_rng(0)
    expected: dict[int, float] = {}  # by the number of samples
    shards = []
    for file, records in zip(view.files, view.records, strict=True):
        size = len(records)
        if size and size not in expected:
            draws = generator.multivariate_hypergeometric(
                counts, size, size=_DRAWS, method="marginals"
            )
            expected[size] = float(np.mean([entropy(draw) for draw in draws]))
        if size:
            own = np.bincount(np.searchsorted(labels, records["label"]), minlength=len(labels))
            shards.append((entropy(own), expected[size], file))
    bits, of_random, file = min(shards, key=lambda shard: _share(*shard[:2]))
    share = _share(bits, of_random)
    return {
        "set_entropy": entropy(counts),
        "mean_entropy": float(np.mean([shard[0] for shard in shards])),
        "random_entropy": float(np.mean([shard[1] for shard in shards])),
        "least_diverse": {"shard": file, "entropy": bits, "of_random": share},
        "same_class_neighbours": _same_neighbours(view.records),
        "same_class_pairs": float(((counts / counts.sum()) ** 2).sum()),
        "shards_shuffled": bool(share >= SHUFFLED),
    }


def entropy(counts: np.ndarray) -> float:
    """Bits, of the distribution that the counts are."""
    shares = counts[counts > 0] / counts.sum()
    return abs(float(-(shares * np.log2(shares)).sum()))  # one class: 0, not -0


def _share(bits: float, of_random: float) -> float:
    return bits / of_random if of_random > 0 else 1.0


def _same_neighbours(shards: list[np.ndarray]) -> float:
    """The share of neighbours inside shards that are of one class."""
    same = sum(int((r["label"][1:] == r["label"][:-1]).sum()) for r in shards)
    return same / max(1, sum(max(len(r) - 1, 0) for r in shards))


# --------------------------------------------------------------------------------------------------
# A picture of a set: some samples with their classes, and how many each class has.

# Pixels. 128 is a whole number of times the side of most small images.
THUMB, GAP, MARGIN = 128, 12, 28
CAPTION, TITLE, BARS = 20, 58, 170
FEWEST_COLUMNS, MOST_COLUMNS = 6, 12
TICK_ROOM = 56
PAPER, INK, FAINT, FRAME = "#ffffff", "#1d2733", "#7a8594", "#e6e9ee"
BAR, BAD = "#3b75af", "#c0392b"


def write_sheet(path: Path, views: list[SetView], samples: int) -> None:
    """One picture with a section for each set."""
    sections = [_section(view, samples) for view in views if sum(map(len, view.records))]
    if not sections:
        raise UserError(f"--sheet {path}: the shards hold no samples to show")
    sheet = Image.new(
        "RGB", (max(s.width for s in sections), sum(s.height for s in sections)), PAPER
    )
    top = 0
    for section in sections:
        sheet.paste(section, (0, top))
        top += section.height
    try:
        with atomic_file(path) as file:
            sheet.save(file, format="PNG")
    except OSError as error:
        raise UserError(f"--sheet {path}: cannot be written: {error.strerror}") from None
    print(f"{path}: {sheet.width}×{sheet.height} pixels")


def _section(view: SetView, samples: int) -> Image.Image:
    chosen = choose(view.all_records(), samples)
    columns = min(MOST_COLUMNS, max(FEWEST_COLUMNS, int(np.ceil(np.sqrt(len(chosen))))))
    rows = -(-len(chosen) // columns)
    width = 2 * MARGIN + columns * THUMB + (columns - 1) * GAP
    height = TITLE + rows * (THUMB + CAPTION + GAP) + BARS + 2 * MARGIN
    picture = Image.new("RGB", (width, height), PAPER)
    draw = ImageDraw.Draw(picture)
    _title(draw, view, len(chosen), width)
    for place, number in enumerate(chosen):
        left = MARGIN + place % columns * (THUMB + GAP)
        top = MARGIN + TITLE + place // columns * (THUMB + CAPTION + GAP)
        _cell(picture, draw, view, int(number), (left, top))
    top = MARGIN + TITLE + rows * (THUMB + CAPTION + GAP)
    _histogram(draw, view, (MARGIN, top, width - MARGIN, top + BARS))
    return picture


def choose(records: np.ndarray, samples: int) -> np.ndarray:
    """Numbers of samples to show: spread evenly over the classes, drawn at random within them."""
    order = np.random.default_rng(0).permutation(len(records))
    order = order[np.argsort(records["label"][order], kind="stable")]
    count = min(samples, len(records))
    return order[np.arange(count) * len(records) // count]


def _title(draw: ImageDraw.ImageDraw, view: SetView, shown: int, width: int) -> None:
    name = _fitting(Path(view.title).name, _font(20), width - 2 * MARGIN)
    draw.text((MARGIN, MARGIN - 6), name, INK, _font(20))
    records = view.all_records()
    classes = len(np.unique(records["label"]))
    text = (
        f"{len(records):,} samples, {classes:,} classes, {len(view.files):,} shards; {shown} shown"
    )
    draw.text(
        (MARGIN, MARGIN + 22), _fitting(text, _font(13), width - 2 * MARGIN), FAINT, _font(13)
    )


def _cell(
    picture: Image.Image,
    draw: ImageDraw.ImageDraw,
    view: SetView,
    number: int,
    corner: tuple[int, int],
) -> None:
    left, top = corner
    starts = np.cumsum([0, *map(len, view.records)])
    shard = int(np.searchsorted(starts, number, side="right")) - 1
    record = Record(*view.records[shard][number - starts[shard]].item())
    draw.rectangle((left - 1, top - 1, left + THUMB, top + THUMB), outline=FRAME)
    try:
        image = _thumbnail(view.directory / view.files[shard], record)
        place = (left + (THUMB - image.width) // 2, top + (THUMB - image.height) // 2)
        picture.paste(image, place)
    except (BadSample, OSError):
        draw.line((left, top, left + THUMB, top + THUMB), BAD, 2)
        draw.line((left + THUMB, top, left, top + THUMB), BAD, 2)
    label = f"{record.label} "
    draw.text((left, top + THUMB + 4), label, FAINT, _font(12))
    taken = int(_font(12).getlength(label))
    name = _fitting(view.class_name(record.label), _font(12), THUMB - taken)
    draw.text((left + taken, top + THUMB + 4), name, INK, _font(12))


def _thumbnail(path: Path, record: Record) -> Image.Image:
    """Small images are enlarged by a whole factor, so that their pixels can be counted."""
    with path.open("rb") as file:
        encoded = os.pread(file.fileno(), record.size, record.offset)
    channels = record.channels or channels_of(encoded, record.kind)
    pixels = decode(encoded, record.kind, channels, (record.height, record.width, record.channels))
    image = Image.fromarray(pixels[:, :, 0] if channels == 1 else pixels).convert("RGB")
    factor = THUMB // max(image.size)
    if factor > 0:
        size = (image.width * factor, image.height * factor)
        return image.resize(size, Image.Resampling.NEAREST)
    image.thumbnail((THUMB, THUMB), Image.Resampling.LANCZOS)
    return image


def _histogram(draw: ImageDraw.ImageDraw, view: SetView, box: tuple[int, int, int, int]) -> None:
    """A bar for each class from the lowest label to the highest; empty classes leave a hole."""
    left, top, right, bottom = box
    labels, counts = np.unique(view.all_records()["label"], return_counts=True)
    first, last, largest = int(labels[0]), int(labels[-1]), int(counts.max())
    draw.text((left, top), "samples by class", INK, _font(13))
    fewest = f"fewest {int(counts.min()):,}, most {largest:,}"
    draw.text((left, top + 20), fewest, FAINT, _font(12))
    base, high = bottom - 24, top + 46
    step = (right - left) / (last - first + 1)
    gap = int(0.3 * step)
    for label, count in zip(labels.tolist(), counts.tolist(), strict=True):
        start = int(left + (label - first) * step + gap / 2)
        end = max(start, int(left + (label - first + 1) * step + gap / 2) - gap - 1)
        draw.rectangle((start, base - (base - high) * count / largest, end, base), fill=BAR)
    draw.line((left, base + 1, right, base + 1), FAINT)
    for label in _ticks(first, last, (right - left) // TICK_ROOM):
        middle = left + (label - first + 0.5) * step
        text = f"{label} {view.class_name(label)}" if step > TICK_ROOM else str(label)
        text = _fitting(text, _font(11), max(TICK_ROOM, int(step)) - 4)
        draw.text((middle, base + 6), text, FAINT, _font(11), anchor="ma")


def _ticks(first: int, last: int, most: int) -> range:
    """Round numbers from first to last, no more than `most`."""
    for exponent in range(20):
        for factor in (1, 2, 5):
            step = factor * 10**exponent
            if (last - first) // step < most:
                return range(-(-first // step) * step, last + 1, step)
    raise AssertionError("labels have 32 bits")


@cache
def _font(size: int) -> ImageFont.FreeTypeFont:
    """matplotlib carries a font with most alphabets; Pillow's own has few letters."""
    path = Path(matplotlib.get_data_path()) / "fonts" / "ttf" / "DejaVuSans.ttf"
    return ImageFont.truetype(str(path), size)


def _fitting(text: str, font: ImageFont.FreeTypeFont, width: int) -> str:
    """The text, or as much of its start as has room."""
    text = text if text.isprintable() else repr(text)
    if font.getlength(text) <= width:
        return text
    while text and font.getlength(text + "…") > width:
        text = text[:-1]
    return text + "…"
