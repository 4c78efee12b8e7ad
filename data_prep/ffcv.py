"""Shards as one FFCV file, with the index by which training reads it where there is no FFCV.

    python -m data_prep.ffcv --shards 'data/train-*.tar' --out data/train.beton --write-mode jpg
    python -m data_prep.ffcv --index data/other.beton       # of a file that FFCV wrote elsewhere

Samples keep the order of the shards. FFCV stores pixels (raw) or JPEGs that it encodes again. With
--workers 1 the file's bytes follow from shards and options alone; with several workers the samples
are the same, but lie at other places in it. Shards without an index are read twice.
"""

import lipnext_scale.utils.passive  # noqa: F401

import multiprocessing
import os
import queue
from argparse import Namespace
from collections.abc import Callable, Sequence
from copy import copy
from importlib.metadata import version
from pathlib import Path
from typing import Any

import cv2
import numpy as np

from data_prep.common import (
    LOG_SECONDS,
    LONGEST_SIDE,
    class_counts,
    command_parser,
    in_processes,
    number,
    require_space,
    writing,
)
from lipnext_scale import __version__
from lipnext_scale.data.catalog import open_catalog
from lipnext_scale.data.decode import BadSample, decode
from lipnext_scale.data.index import (
    KINDS,
    ShardEntry,
    beton_records,
    index_paths,
    require_ffcv,
    set_name,
    write_index,
)
from lipnext_scale.data.source import SampleStore
from lipnext_scale.utils.errors import UserError, command
from lipnext_scale.utils.files import atomic_file, file_sha256, free_bytes
from lipnext_scale.utils.progress import Progress

# FFCV's RGBImageField has these modes, and for each these options beside max_resolution.
MODES = {
    "raw": (),
    "jpg": ("jpeg_quality",),
    "smart": ("jpeg_quality", "smart_threshold"),
    "proportion": ("jpeg_quality", "compress_probability"),
}
SMALLEST_PAGE = 1 << 23  # FFCV's default; an image lies in one page


class Decoded:
    """The samples as FFCV takes them, by number: (RGB pixels, label)."""

    def __init__(self, store: SampleStore) -> None:
        self.store, self.current = store, 0
        self.advance: Callable[[], None] = lambda: None

    def __len__(self) -> int:
        return len(self.store.catalog)

    def __getitem__(self, number: int) -> tuple[np.ndarray, int]:
        self.current = number
        self.advance()
        # FFCV now draws for "proportion": by the sample, whichever worker has it.
        np.random.seed(number)
        try:
            encoded, record = self.store.read(number)
            return decode(encoded, record, 3), record.label
        except (BadSample, OSError) as error:
            raise UserError(f"{self.store.name(number)} {error}") from None

    def column(self, *names: str) -> np.ndarray:
        """These numbers of every record, [N, names]."""
        shards = self.store.catalog.shards
        return np.concatenate([np.stack([s.records[n] for n in names], 1) for s in shards])


def written_sizes(samples: Decoded, longest: int) -> np.ndarray:
    """(height, width) of every image [N, 2] as FFCV writes it: no side longer than `longest`."""
    sizes = samples.column("height", "width").astype(np.int64)
    for i in np.flatnonzero(sizes.min(1) == 0).tolist():  # no index has them
        sizes[i] = samples[i][0].shape[:2]
    scale = np.minimum(1, longest / sizes.max(1, keepdims=True))
    return np.where(scale < 1, (sizes * scale).astype(np.int64), sizes)


def write_beton(writer: Any, samples: Decoded, workers: int, title: str) -> None:
    """FFCV's DatasetWriter.from_indexed_dataset, which waits forever if a worker fails.
    `writer` is FFCV's DatasetWriter."""
    from ffcv.memory_allocator import MemoryAllocator
    from ffcv.writer import worker_job_indexed_dataset

    writer.num_samples = len(samples)
    writer.prepare()
    allocator = MemoryAllocator(writer.fname, writer.data_region_start, writer.page_size)
    done = multiprocessing.get_context("fork").Value("Q", 0)

    def work(numbers: range, advance: Callable[[], None]) -> list[tuple[int, int, int]]:
        """What was allocated: (sample, place, bytes)."""
        cv2.setNumThreads(0)  # a forked process has none of OpenCV's threads, and needs none
        samples.advance = advance
        own = copy(allocator)  # of its pages, for a process may do several parts
        own.allocations = []
        chunks, results = queue.SimpleQueue[Any](), queue.SimpleQueue[Any]()
        chunks.put([(number, number) for number in numbers])  # in the file, in the shards
        chunks.put(None)
        shared = (writer.metadata_sm, writer.metadata_type, writer.fields, own, done)
        try:
            worker_job_indexed_dataset(chunks, *shared, results, samples)
        except (cv2.error, ValueError) as error:
            name, reason = samples.store.name(samples.current), " ".join(str(error).split())
            raise UserError(f"{name} cannot be written by FFCV: {reason}") from None
        return list(results.get())

    edges = [len(samples) * worker // workers for worker in range(workers + 1)]
    progress = Progress(len(samples), unit="image", title=title, log_seconds=LOG_SECONDS)
    try:
        parts = in_processes(work, [*map(range, edges, edges[1:])], workers, progress.advance)
        writer.finalize(sorted(allocation for _, part in parts for allocation in part))
    finally:
        progress.close()
        writer.metadata_sm.close()
        writer.metadata_sm.unlink()


def convert(pattern: str, out: Path, field: dict[str, Any], workers: int, dry_run: bool) -> None:
    """Shards to an FFCV file and its index; `field` are the options of FFCV's RGBImageField."""
    require_ffcv("writing FFCV files")
    samples = Decoded(SampleStore(open_catalog(pattern, "--shards")))
    raw = written_sizes(samples, field.get("max_resolution", LONGEST_SIDE)).prod(1) * 3
    encoded = samples.column("size")[:, 0]
    jpeg = field["write_mode"] == "jpg"
    needed = int((np.minimum(encoded, raw // 4) if jpeg else raw).sum())
    if dry_run:
        print(f"{out}: {len(samples):,} samples, as {field}, about {needed:,} bytes; ", end="")
        print(f"{free_bytes(out):,} are free; nothing was written (--dry-run)")
        return
    require_space(out, needed)
    from ffcv.fields import IntField, RGBImageField
    from ffcv.writer import DatasetWriter

    page = max(SMALLEST_PAGE, 1 << (int(raw.max()) - 1).bit_length())  # a power of two
    fields = {"image": RGBImageField(**field), "label": IntField()}
    names = {tuple(shard.classes) for shard in samples.store.catalog.shards}
    classes = names.pop() if len(names) == 1 else ()
    source = {"fingerprint": samples.store.catalog.fingerprint()}
    versions = {"ffcv": version("ffcv"), "opencv": cv2.__version__}
    with writing(f"--out {out}"):
        out.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(out) as file:  # FFCV writes it by its name
            writer = DatasetWriter(file.name, fields, page_size=page, num_workers=workers)
            write_beton(writer, samples, min(workers, len(samples)), out.name)
            records = beton_records(Path(file.name))
            assert np.array_equal(records["label"], samples.column("label")[:, 0]), "another order"
            # An index that is there describes the file which is about to go.
            index_paths(out.parent, set_name(out.name))[0].unlink(missing_ok=True)
        write_beton_index(out, records, classes, source, field | versions)


def write_beton_index(
    path: Path,
    records: np.ndarray,
    classes: Sequence[str] = (),
    source: dict[str, Any] | None = None,
    settings: dict[str, Any] | None = None,
) -> None:
    size, name = path.stat().st_size, set_name(path.name)
    entry = ShardEntry(path.name, len(records), size, file_sha256(path), class_counts(records))
    converter = {"command": "data_prep.ffcv", "version": __version__} | (settings or {})
    write_index(path.parent, name, [entry], records, classes, source, converter=converter)
    jpegs = int((records["kind"] == KINDS["jpeg"]).sum())
    print(f"{path}: {len(records):,} samples, {jpegs:,} of them JPEGs, {size:,} bytes; indexed")


def image_field(arguments: Namespace) -> dict[str, Any]:
    """The options of FFCV's RGBImageField that were given; they must fit the mode."""
    mode = arguments.write_mode or "raw"
    names = ("max_resolution", "jpeg_quality", "compress_probability", "smart_threshold")
    given = {name: value for name in names if (value := getattr(arguments, name)) is not None}
    for name, value in given.items():
        if name not in ("max_resolution", *MODES[mode]):
            option = f"--{name.replace('_', '-')} {value}"
            raise UserError(f"{option}: is not used with --write-mode {mode}")
    if mode == "smart" and "smart_threshold" not in given:
        raise UserError("--write-mode smart: needs --smart-threshold, the most bytes that stay raw")
    return {"write_mode": mode} | given


@command
def main(argv: list[str] | None = None) -> None:
    parser = command_parser("ffcv", __doc__)
    add = parser.add_argument
    add("--shards", metavar="PATTERN", help="what to read, as data.train names it")
    add("--out", type=Path, metavar="FILE", help="the .beton to write")
    add("--index", type=Path, metavar="FILE", help="write the index of this .beton, nothing else")
    add("--write-mode", choices=MODES, help="pixels, JPEGs or some of both (default raw)")
    longest, quality, share = number(1, LONGEST_SIDE), number(1, 100), number(0, 1, float)
    add("--max-resolution", type=longest, metavar="N", help="shrink to N pixels on the longer side")
    add("--jpeg-quality", type=quality, metavar="Q", help="of JPEGs (default 90)")
    add("--compress-probability", type=share, metavar="P", help="of proportion (default 0.5)")
    add("--smart-threshold", type=number(0), metavar="BYTES", help="smart: larger ones are JPEGs")
    add("--workers", type=number(1), metavar="N", help="processes (default: one for each CPU)")
    add("--dry-run", action="store_true", help="print what would be written")
    arguments = parser.parse_args(argv)
    path, index = arguments.out, arguments.index
    given = [name for name, value in vars(arguments).items() if value not in (None, False)]
    if index is None and (arguments.shards is None or path is None):
        raise UserError("--shards and --out are needed, or --index; data_prep.ffcv --help")
    if index is not None and given != ["index"]:
        raise UserError("--index: takes no other options")
    if (index or path).suffix != ".beton":
        raise UserError(f"{index or path}: must end in .beton, by which training knows FFCV files")
    if index is None:
        workers = arguments.workers or len(os.sched_getaffinity(0))
        convert(arguments.shards, path, image_field(arguments), workers, arguments.dry_run)
        return
    require_ffcv(f"--index {index}: reading it")
    with writing(f"--index {index}"):
        write_beton_index(index, beton_records(index))


if __name__ == "__main__":
    main()
