"""Shards as one FFCV file, with the index by which training reads it where there is no FFCV.

    python -m data_prep.ffcv --shards 'data/train-*.tar' --out data/train.beton --write-mode jpg
    python -m data_prep.ffcv --index data/other.beton       # of a file that FFCV wrote elsewhere

Samples keep the order of the shards. FFCV stores pixels (raw) or JPEGs that it encodes anew. With
--workers 1 the file's bytes follow from shards and options alone; several workers fill its pages as
they get on, so that samples are the same and lie elsewhere. Shards without an index are read twice.
"""

import io
import multiprocessing
import os
import queue
import shutil
import signal
import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from PIL import Image

from data_prep.checking.shard_sets import class_counts
from lipnext_scale import __version__
from lipnext_scale.data.catalog import open_catalog
from lipnext_scale.data.decode import BadSample
from lipnext_scale.data.index import (
    KINDS,
    ShardEntry,
    beton_records,
    index_paths,
    read_index,
    require_ffcv,
    set_name,
    write_index,
)
from lipnext_scale.data.source import SampleStore
from lipnext_scale.errors import ArgumentParser, RunFailed, UserError, command
from lipnext_scale.files import atomic_file, file_sha256
from lipnext_scale.progress import Progress

MODES = ("raw", "jpg", "smart", "proportion")
LOG_SECONDS = 10
LONGEST_SIDE = 2**16 - 1  # what FFCV and the index can say
SMALLEST_PAGE = 1 << 23  # FFCV's default; an image lies in one page
CHUNK = 100  # samples that a worker takes at a time
_PATIENCE = 0.2  # seconds between two looks at the workers


@dataclass(frozen=True)
class Encoding:
    """FFCV's RGBImageField, whose names these are; None: not given, and of no meaning then."""

    write_mode: str = "raw"
    max_resolution: int | None = None
    jpeg_quality: int | None = None
    compress_probability: float | None = None
    smart_threshold: int | None = None

    def __post_init__(self) -> None:
        mode = f"--write-mode {self.write_mode}"
        if self.smart_threshold is None and self.write_mode == "smart":
            raise UserError(f"{mode}: needs --smart-threshold, the most bytes that stay raw")
        of_one_mode = {
            "--jpeg-quality": (self.jpeg_quality, MODES[1:], 1, 100),
            "--compress-probability": (self.compress_probability, ("proportion",), 0, 1),
            "--smart-threshold": (self.smart_threshold, ("smart",), 0, 2**32),
            "--max-resolution": (self.max_resolution, MODES, 1, LONGEST_SIDE),
        }
        for option, (value, modes, lowest, highest) in of_one_mode.items():
            if value is not None and self.write_mode not in modes:
                raise UserError(f"{option} {value}: means nothing with {mode}")
            if value is not None and not lowest <= value <= highest:
                raise UserError(f"{option} {value}: must be from {lowest} to {highest}")

    def given(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if value is not None}

    def estimate(self, raw: np.ndarray, encoded: np.ndarray) -> int:
        """About the bytes of images that have `raw` bytes of pixels and came in `encoded` bytes."""
        as_jpeg = np.minimum(encoded, raw // 4)
        if self.write_mode == "proportion":
            share = 0.5 if self.compress_probability is None else self.compress_probability
            return int(share * as_jpeg.sum() + (1 - share) * raw.sum())
        above = {"raw": 2**63, "jpg": 0, "smart": self.smart_threshold}[self.write_mode]
        return int(np.where(raw > above, as_jpeg, raw).sum())


# --- what FFCV is given -----------------------------------------------------------------------


class Decoded:
    """The samples as FFCV takes them, by number: (RGB pixels, label)."""

    def __init__(self, store: SampleStore) -> None:
        self.store, self.current = store, 0

    def __len__(self) -> int:
        return len(self.store.catalog)

    def __getitem__(self, number: int) -> tuple[np.ndarray, int]:
        self.current = number
        # FFCV now tosses its coin for "proportion": one of the sample, whichever worker has it.
        np.random.seed(number)
        try:
            encoded, record = self.store.read(number)
            return self.store.decode(encoded, record, 3), record.label
        except (BadSample, OSError) as error:
            raise UserError(f"{self.store.name(number)} {error}") from None


def stored_sizes(store: SampleStore) -> np.ndarray:
    """(height, width) of every image [N, 2], by the index or else by its own header."""
    sizes = np.concatenate(
        [np.stack([s.records["height"], s.records["width"]], 1) for s in store.catalog.shards]
    ).astype(np.int64)
    for number in np.flatnonzero(sizes.min(1) == 0).tolist():
        try:
            with Image.open(io.BytesIO(store.read(number)[0])) as image:
                sizes[number] = image.height, image.width
        except (BadSample, OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
            raise UserError(f"{store.name(number)} cannot be decoded: {error}") from None
    return sizes


def written_sizes(sizes: np.ndarray, encoding: Encoding) -> np.ndarray:
    """What FFCV makes of them: no side longer than --max-resolution."""
    longest = encoding.max_resolution or LONGEST_SIDE
    scale = np.minimum(1, longest / sizes.max(1, keepdims=True))
    return np.where(scale < 1, (sizes * scale).astype(np.int64), sizes)


def page_size(largest: int) -> int:
    """A power of two, as FFCV wants it, that holds the largest image."""
    return max(SMALLEST_PAGE, 1 << (largest - 1).bit_length())


# --- writing ----------------------------------------------------------------------------------


class Chunks:
    """The sample numbers in pieces, for whichever worker asks: what FFCV takes for its queue."""

    def __init__(self, samples: int) -> None:
        self._samples, self._parent = samples, os.getpid()
        self._next = multiprocessing.get_context("fork").Value("Q", 0)

    def get(self) -> list[tuple[int, int]] | None:
        """[(number in the file, number in the shards), …]; None at the end."""
        if os.getppid() != self._parent:
            sys.exit(1)  # the command was killed
        with self._next:
            start = self._next.value
            self._next.value += CHUNK
        return [(i, i) for i in range(start, min(start + CHUNK, self._samples))] or None


def write_beton(writer: Any, samples: Decoded, workers: int, title: str) -> None:
    """FFCV's DatasetWriter.from_indexed_dataset, which waits for ever where a worker has failed;
    here the worker's reason is told. `writer` is FFCV's DatasetWriter."""
    from ffcv.memory_allocator import MemoryAllocator

    writer.num_samples = len(samples)
    writer.prepare()
    try:
        context = multiprocessing.get_context("fork")
        allocator = MemoryAllocator(writer.fname, writer.data_region_start, writer.page_size)
        done, results = context.Value("Q", 0), context.Queue()
        work = (Chunks(len(samples)), writer.metadata_sm, writer.metadata_type, writer.fields)
        arguments = (*work, allocator, done, results, samples)
        processes = [
            context.Process(target=_work, args=arguments, daemon=True) for _ in range(workers)
        ]
        allocations = _watch(processes, results, done, len(samples), title)
        writer.finalize(sorted(allocations))
    finally:
        writer.metadata_sm.close()
        writer.metadata_sm.unlink()


def _work(*arguments: Any) -> None:
    """A worker's process: FFCV's own job. What it fails of is put where its result would be."""
    from ffcv.writer import worker_job_indexed_dataset

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it is the parent's to end its workers
    cv2.setNumThreads(0)  # a forked process has none of OpenCV's threads, and needs none
    results, samples = arguments[-2:]
    try:
        worker_job_indexed_dataset(*arguments)
    except (UserError, OSError) as error:
        results.put(error)
    except (cv2.error, ValueError) as error:
        name, reason = samples.store.name(samples.current), " ".join(str(error).split())
        results.put(UserError(f"{name} cannot be written by FFCV: {reason}"))


def _watch(
    processes: Sequence[BaseProcess], results: Any, done: Any, samples: int, title: str
) -> list[tuple[int, int, int]]:
    """Start the workers and gather what they allocated: (sample, place, bytes)."""
    allocations: list[tuple[int, int, int]] = []
    waiting, told = len(processes), 0
    for process in processes:
        process.start()
    progress = Progress(samples, unit="image", title=title, log_seconds=LOG_SECONDS)
    try:
        while waiting:
            try:
                result = results.get(timeout=_PATIENCE)
            except queue.Empty:
                _require_alive(processes)
            else:
                if isinstance(result, Exception):
                    raise result
                allocations += result
                waiting -= 1
            progress.advance(done.value - told)
            told = done.value
    finally:
        progress.close()
        for process in processes:
            process.terminate()
            process.join()
    return allocations


def _require_alive(processes: Sequence[BaseProcess]) -> None:
    for process in processes:
        if process.exitcode:
            how = f"signal {-process.exitcode}" if process.exitcode < 0 else "an error, see above"
            raise RunFailed(f"a worker process was ended by {how}; memory or /dev/shm may be full")


# --- the commands -----------------------------------------------------------------------------


def convert(pattern: str, out: Path, encoding: Encoding, workers: int, dry_run: bool) -> None:
    """Shards to an FFCV file and its index; nothing of them is there before they are whole."""
    _require_suffix("--out", out)
    require_ffcv("writing FFCV files")
    samples = Decoded(SampleStore(open_catalog(pattern, "--shards")))
    sizes = written_sizes(stored_sizes(samples.store), encoding)
    raw = sizes.prod(1) * 3
    if sizes.max() > LONGEST_SIDE or sizes.min() < 1:
        bad = int(np.argmax((sizes.max(1) > LONGEST_SIDE) | (sizes.min(1) < 1)))
        height, width = sizes[bad].tolist()
        raise UserError(
            f"{samples.store.name(bad)} would have {height}×{width} pixels; FFCV takes 1 to "
            f"{LONGEST_SIDE} a side"
        )
    encoded = np.concatenate([shard.records["size"] for shard in samples.store.catalog.shards])
    needed, free = encoding.estimate(raw, encoded), free_bytes(out)
    if dry_run:
        print(f"{out}: {len(samples):,} samples, as {encoding.given()}")
        print(f"about {needed:,} bytes to write, {free:,} free; nothing was written (--dry-run)")
        return
    if needed > free:
        raise UserError(f"--out {out}: needs about {needed:,} bytes, {free:,} are free")
    try:
        _write(samples, out, encoding, page_size(int(raw.max())), min(workers, len(samples)))
    except OSError as error:
        raise UserError(f"--out {out}: cannot be written: {error.strerror or error}") from None


def _require_suffix(option: str, path: Path) -> None:
    if path.suffix != ".beton":
        raise UserError(f"{option} {path}: must end in .beton, by which training knows FFCV files")


def free_bytes(path: Path) -> int:
    """Where `path` is or would be made."""
    there = next(parent for parent in path.absolute().parents if parent.exists())
    return shutil.disk_usage(there).free


def _write(samples: Decoded, out: Path, encoding: Encoding, page: int, workers: int) -> None:
    from ffcv.fields import IntField, RGBImageField
    from ffcv.writer import DatasetWriter

    out.parent.mkdir(parents=True, exist_ok=True)
    fields = {"image": RGBImageField(**encoding.given()), "label": IntField()}
    with atomic_file(out) as file:  # FFCV writes it by its name
        writer = DatasetWriter(file.name, fields, page_size=page, num_workers=workers)
        write_beton(writer, samples, workers, out.name)
        records = beton_records(Path(file.name))
        labels = [shard.records["label"] for shard in samples.store.catalog.shards]
        assert np.array_equal(records["label"], np.concatenate(labels)), "FFCV lost the order"
        # An index that is there describes the file which is about to go.
        index_paths(out.parent, set_name(out.name))[0].unlink(missing_ok=True)
    source = {"fingerprint": samples.store.catalog.fingerprint()}
    versions = {"ffcv": version("ffcv"), "opencv": cv2.__version__}
    write_beton_index(out, records, class_names(samples.store), source, encoding.given() | versions)


def class_names(store: SampleStore) -> list[str]:
    """Those of the shards' indexes, if all have the same."""
    found = set()
    for directory, name in {(Path(s.path).parent, set_name(s.path)) for s in store.catalog.shards}:
        path = index_paths(directory, name)[0]
        found.add(tuple(read_index(path).classes) if path.exists() else ())
    return list(found.pop()) if len(found) == 1 else []


def write_beton_index(
    path: Path,
    records: np.ndarray,
    classes: Sequence[str] = (),
    source: dict[str, Any] | None = None,
    settings: dict[str, Any] | None = None,
) -> None:
    size, digest = path.stat().st_size, file_sha256(path)
    entry = ShardEntry(path.name, len(records), size, digest, dict(class_counts(records)))
    converter = {"command": "data_prep.ffcv", "version": __version__} | (settings or {})
    write_index(
        path.parent, set_name(path.name), [entry], records, classes, source, converter=converter
    )
    jpegs = int((records["kind"] == KINDS["jpeg"]).sum())
    print(f"{path}: {len(records):,} samples, {jpegs:,} of them JPEGs, {size:,} bytes; indexed")


def index(path: Path) -> None:
    """The index of an FFCV file that is there."""
    _require_suffix("--index", path)
    require_ffcv(f"--index {path}: reading it")
    try:
        write_beton_index(path, beton_records(path))
    except OSError as error:
        raise UserError(f"--index {path}: cannot be written: {error.strerror}") from None


def _parser() -> ArgumentParser:
    assert __doc__ is not None
    parser = ArgumentParser(prog="data_prep.ffcv", description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--shards", metavar="PATTERN", help="what to read, as data.train names it")
    add("--out", type=Path, metavar="FILE", help="the .beton to write")
    add("--index", type=Path, metavar="FILE", help="write the index of this .beton, nothing else")
    add("--write-mode", choices=MODES, help="pixels, JPEGs or some of both (default raw)")
    add("--max-resolution", type=int, metavar="N", help="shrink to N pixels on the longer side")
    add("--jpeg-quality", type=int, metavar="Q", help="of jpg, smart, proportion (default 90)")
    add("--compress-probability", type=float, metavar="P", help="of proportion (default 0.5)")
    add("--smart-threshold", type=int, metavar="BYTES", help="smart: larger images become JPEGs")
    add("--workers", type=int, metavar="N", help="processes (default: one for each CPU)")
    add("--dry-run", action="store_true", help="tell what would be written")
    return parser


@command
def main(argv: list[str] | None = None) -> None:
    arguments: Namespace = _parser().parse_args(argv)
    left_out = (None, False)
    given = {k: v for k, v in vars(arguments).items() if not any(v is none for none in left_out)}
    if arguments.index is not None:
        if others := given.keys() - {"index"}:
            raise UserError(f"--index: goes without --{min(others).replace('_', '-')}")
        index(arguments.index)
        return
    if arguments.shards is None or arguments.out is None:
        raise UserError("--shards and --out are needed, or --index; data_prep.ffcv --help")
    workers = arguments.workers if arguments.workers is not None else len(os.sched_getaffinity(0))
    if workers < 1:
        raise UserError(f"--workers {workers}: must be at least 1")
    names = Encoding.__dataclass_fields__
    encoding = Encoding(**{name: value for name, value in given.items() if name in names})
    convert(arguments.shards, arguments.out, encoding, workers, arguments.dry_run)


if __name__ == "__main__":
    main()
