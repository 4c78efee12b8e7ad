"""From collections to shards with their index: in parallel, after any kill to the same bytes.

The order of the samples follows from the seed, a shard's samples from the order, its bytes from its
samples. So shards can be made in any order, by any number of processes, now or later. A journal has
what is finished:

    train.journal/plan.json                     what is being written: settings, source, classes
    train.journal/000012.index.json and .npy    shard 12 is finished: an index of it alone

A shard is noted after it is renamed into place. A shard without its note is written again, to the
same bytes. The journal goes when the index is there.
"""

import argparse
import fcntl
import gzip
import io
import json
import os
import re
import shutil
import tarfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from data_prep.common import (
    LARGEST_SEED,
    LOG_SECONDS,
    class_counts,
    command_parser,
    in_processes,
    number,
    reading,
    require_space,
    writing,
)
from data_prep.encoding import BadImage, ImageRules, StoredImage, stored_image
from data_prep.sources import Collection
from lipnext_scale import __version__
from lipnext_scale.data.index import (
    KINDS,
    RECORD,
    SetIndex,
    ShardEntry,
    index_paths,
    printable,
    read_index,
    write_index,
)
from lipnext_scale.utils.config import leaves
from lipnext_scale.utils.errors import ArgumentParser, UserError
from lipnext_scale.utils.files import (
    PARTIAL,
    atomic_file,
    file_sha256,
    free_bytes,
    write_atomically,
)
from lipnext_scale.utils.progress import Progress

SHARD_BYTES = 100_000_000
FEWEST_SHARDS, FEWEST_SAMPLES = 8, 100
# Bytes a tar takes beside the images: two headers and the class for a sample, its end for a shard.
BLOCK = 512
SAMPLE_OVERHEAD, SHARD_OVERHEAD = 3 * BLOCK, 20 * BLOCK
RECORD_BYTES = 64  # in the journal and the index
PROBES = 50
LOCK = ".data_prep.lock"
# Seconds. Workers of a conversion that was killed hold its lock until they notice.
PATIENCE = 5.0
LONGEST_KEY = 90  # with its suffix it fits the 100 bytes of a tar header
SUFFIXES = {"jpeg": "jpg", "png": "png"}
CONTINUES = "; finished shards are kept, the same command continues from there"
_NOT_IN_KEYS = re.compile(r"[^A-Za-z0-9_-]+")

# --------------------------------------------------------------------------------------------------
# The options that all converters share.


def conversion_parser(name: str, doc: str | None) -> ArgumentParser:
    """A converter's parser with --out and all that changes how, not what, is converted."""
    parser = command_parser(name, doc)
    rules, cpus = ImageRules(), os.cpu_count() or 1
    add = parser.add_argument_group("the shards").add_argument
    add("--out", type=Path, required=True, help="directory for the shards, created if missing")
    add("--seed", type=number(0, LARGEST_SEED), default=0, help="of the samples' order (default 0)")
    size = "samples in a shard (default: about 100 MB of them, eight shards where there are enough)"
    add("--shard-samples", type=number(0), default=0, help=size)
    processes = "each on a shard of its own (default: one for each CPU; 0: none beside this one)"
    add("--workers", type=number(0), default=cpus, help=f"processes, {processes}")
    side = "scale larger images down to N pixels on their shorter side (default 0: keep all bytes)"
    add("--short-side", type=number(0), default=rules.short_side, metavar="N", help=side)
    quality = "of JPEGs that are scaled down (default %(default)s)"
    add("--quality", type=number(1, 100), default=rules.quality, help=quality)
    limit = "an image that claims more is bad (default %(default)s)"
    add("--max-pixels", type=number(1), default=rules.max_pixels, help=limit)
    bad = "damaged or unknown images: name them and fail (default), or leave them out and list them"
    add("--on-bad", choices=("fail", "skip"), default="fail", help=bad)
    add("--dry-run", action="store_true", help="print what would be written, and write nothing")
    parser.set_defaults(converter=parser.prog)
    return parser


# --------------------------------------------------------------------------------------------------
# The journal.


class Journal:
    """The journal of the set `name` in the directory `out`."""

    def __init__(self, out: Path, name: str) -> None:
        self._out, self._name = out, name
        self.directory = out / f"{name}.journal"
        self._plan = self.directory / "plan.json"

    def plan(self) -> dict[str, Any] | None:
        """What the unfinished set here is, None if there is none."""
        return dict(json.loads(self._plan.read_bytes())) if self._plan.exists() else None

    def begin(self, plan: dict[str, Any]) -> None:
        self.directory.mkdir()
        write_atomically(self._plan, json.dumps(plan).encode())

    def finished(self) -> dict[int, SetIndex]:
        """The notes of shards that are here in their full size. A shard is synced before it is
        renamed, so its bytes are not read again."""
        notes = [read_index(path) for path in self.directory.glob("*.index.json")]
        return {int(note.name): note for note in notes if is_here(self._out, note.shards[0])}

    def remove(self) -> None:
        """The plan first: without it the rest is no journal."""
        self._plan.unlink()
        shutil.rmtree(self.directory)

    def clean(self) -> None:
        """Remove what a killed conversion of this set left half-written."""
        if not self._plan.exists():
            shutil.rmtree(self.directory, ignore_errors=True)
        of_set = (f"{self._name}-*.tar{PARTIAL}", f"{self._name}.index.*{PARTIAL}")
        for pattern in (*of_set, f"{self.directory.name}/*{PARTIAL}"):
            for path in self._out.glob(pattern):
                path.unlink()


def is_here(directory: Path, shard: ShardEntry) -> bool:
    path = directory / shard.file
    return path.exists() and path.stat().st_size == shard.bytes


@contextmanager
def only_conversion_in(out: Path) -> Iterator[None]:
    """Keep other conversions out of the directory until this one and all its workers have ended:
    forked workers share the lock."""
    path, deadline = out / LOCK, time.monotonic() + PATIENCE
    while True:
        lock = path.open("a")
        with suppress(BlockingIOError, FileNotFoundError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The lock of a file that was removed meanwhile excludes no process.
            if os.path.samestat(os.fstat(lock.fileno()), path.stat()):
                break
        lock.close()
        if time.monotonic() > deadline:
            raise UserError(
                f"--out {out}: another conversion is writing there; wait for it, or give another "
                "directory"
            )
        time.sleep(0.05)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        lock.close()


# --------------------------------------------------------------------------------------------------
# A shard is a tar.


def open_tar(file: BinaryIO | gzip.GzipFile) -> tarfile.TarFile:
    return tarfile.open(fileobj=file, mode="w", format=tarfile.USTAR_FORMAT)


def add_file(tar: tarfile.TarFile, name: str, content: bytes) -> int:
    """Add a file whose time, owner and mode are constants; returns where its content begins."""
    entry = tarfile.TarInfo(name)
    entry.size = len(content)
    place = tar.offset + tarfile.BLOCKSIZE
    tar.addfile(entry, io.BytesIO(content))
    return place


def sample_key(number: int, count: int, name: str) -> str:
    """The sample's number of `count` and what is safe of its name: no dot, at the first of which
    WebDataset ends a key; no slash, so that it never leaves a directory it is unpacked into."""
    digits = max(6, len(str(count - 1)))
    stem = _NOT_IN_KEYS.sub("_", PurePosixPath(name).stem).strip("_")
    return f"{number:0{digits}d}_{stem}"[:LONGEST_KEY].rstrip("_")


# --------------------------------------------------------------------------------------------------
# One set before it is written: what goes into which shard, and what of it is there already.


class SetSource(NamedTuple):
    """A set to be written: its name ("train", "test"), its samples, its index's `source`."""

    name: str
    collection: Collection
    source: dict[str, Any]


def default_shard_samples(sizes: np.ndarray) -> int:
    """Near SHARD_BYTES, but FEWEST_SHARDS at least where each then still has FEWEST_SAMPLES."""
    by_size = int(SHARD_BYTES // sizes.mean())
    by_count = max(FEWEST_SAMPLES, -(-len(sizes) // FEWEST_SHARDS))
    return max(1, min(by_size, by_count, len(sizes)))


def _share(collection: Collection, rules: ImageRules) -> float:
    """What is left of the bytes when images are scaled down, by some that are spread over the set:
    by their full size the disk would seem too small, and shards would become so."""
    before, after, sizes = 0, 0, collection.sizes()
    places = np.linspace(0, len(collection) - 1, PROBES if rules.short_side else 0).astype(int)
    for i in sorted(set(places.tolist())):
        try:
            after += len(stored_image(collection.load(i), rules).content)
        except (BadImage, OSError):  # the conversion reports it
            continue
        before += int(sizes[i])
    return round(after / before, 2) or 0.01 if before else 1.0


class SetPlan:
    """A set as the options of `conversion_parser` want it written; `converter` and `source` go into
    its index."""

    def __init__(self, one: SetSource, options: argparse.Namespace) -> None:
        self.name, self.options, self._collection = one.name, options, one.collection
        collection = self._collection
        self.samples = len(collection)
        if not self.samples:
            raise UserError(f"{one.name}: the source holds no samples")
        self._rules = rules = ImageRules(options.short_side, options.quality, options.max_pixels)
        sizes = collection.sizes() * _share(collection, rules)
        self._bytes = np.ceil(sizes / BLOCK).astype(np.int64) * BLOCK + SAMPLE_OVERHEAD
        self.shard_samples = options.shard_samples or default_shard_samples(self._bytes)
        self.shards = -(-self.samples // self.shard_samples)
        # What the bytes depend on: not --workers, and --quality only where images are scaled.
        settings = {"seed": options.seed, "shard_samples": self.shard_samples}
        settings |= {"short_side": rules.short_side, "max_pixels": rules.max_pixels}
        settings |= {"quality": rules.quality} if rules.short_side else {}
        self.converter = {"name": options.converter, "version": __version__, "settings": settings}
        listed = {"samples": self.samples, "fingerprint": collection.fingerprint()}
        self.source = one.source | listed
        self.classes = [printable(name) for name in collection.classes]
        # Of numpy's generators the one whose numbers are promised never to change.
        self._order = np.random.RandomState(options.seed).permutation(self.samples)

    @property
    def identity(self) -> dict[str, Any]:
        return {"converter": self.converter, "source": self.source, "classes": self.classes}

    def numbers(self, shard: int) -> np.ndarray:
        """The samples of a shard, in their order there."""
        return self._order[shard * self.shard_samples : (shard + 1) * self.shard_samples]

    def estimated_bytes(self, shards: Iterable[int]) -> int:
        """About as many as these shards will take."""
        return sum(
            int(self._bytes[numbers].sum()) + SHARD_OVERHEAD + RECORD_BYTES * len(numbers)
            for numbers in map(self.numbers, shards)
        )

    def bytes_to_write(self) -> int:
        state = self.state()
        if isinstance(state, SetIndex):
            return 0
        return self.estimated_bytes(set(range(self.shards)) - set(state or ()))

    def state(self) -> SetIndex | dict[int, SetIndex] | None:
        """What is there of the set: its index if it is complete, else the notes of the shards that
        are finished, or nothing; of anything else, a UserError. Where bad images are to fail, a
        shard that was finished without some is made again: they may have been fixed."""
        out = self.options.out
        journal = Journal(out, self.name)
        if (plan := journal.plan()) is not None:
            _require_same(journal.directory, "an unfinished set", plan, self.identity)
            notes = journal.finished().items()
            skips = self.options.on_bad == "skip"
            return {shard: note for shard, note in notes if skips or not note.skipped}
        path = index_paths(out, self.name)[0]
        if path.exists():
            return self._complete(path)
        for stray in sorted(out.glob(f"{self.name}-*.tar*")):
            raise UserError(f"{stray}: belongs to no known set; remove it, or give another --out")
        return None

    def _complete(self, path: Path) -> SetIndex:
        """The index that is there, of this set."""
        index = read_index(path)
        # An earlier version may have written it.
        converter = index.converter | {"version": __version__}
        converter.pop("changed", None)
        there = {"converter": converter, "source": index.source, "classes": index.classes}
        _require_same(path, "another set", there, self.identity)
        for shard in index.shards:
            if not is_here(path.parent, shard):
                raise UserError(
                    f"{path.parent / shard.file}: is missing or not of the size in {path.name}; "
                    f"remove {path.name} and the set's shards to convert it again"
                )
        if index.skipped and self.options.on_bad == "fail":
            raise UserError(
                f"{self.name}: is complete, but without {len(index.skipped)} bad images; accept it "
                "with --on-bad skip, or remove it"
            )
        return index

    def make(self, shard: int, advance: Callable[[], None]) -> SetIndex:
        """Write a shard, and its note; `advance` is called after each sample."""
        path = self.options.out / f"{self.name}-{shard:06d}.tar"
        rows: list[tuple[int, ...]] = []
        skipped: list[dict[str, str]] = []
        changes: Counter[str] = Counter()
        with writing(path, CONTINUES):
            with atomic_file(path) as file, open_tar(file) as tar:
                for number in self.numbers(shard).tolist():
                    try:
                        image = stored_image(self._loaded(number), self._rules)
                    except BadImage as error:
                        name = printable(self._collection.name(number))
                        skipped.append({"name": name, "reason": printable(str(error))})
                    else:
                        rows.append(self._add(tar, number, image))
                        changes.update([image.change] if image.change else [])
                    advance()
            records, size, digest = np.array(rows, RECORD), path.stat().st_size, file_sha256(path)
            entry = ShardEntry(path.name, len(rows), size, digest, class_counts(records))
            journal = Journal(self.options.out, self.name).directory
            return write_index(
                journal,
                f"{shard:06d}",
                [entry],
                records,
                converter={"changed": dict(changes)},
                skipped=skipped,
            )

    def _loaded(self, number: int) -> bytes | np.ndarray:
        try:
            return self._collection.load(number)
        except OSError as error:
            name, reason = printable(self._collection.name(number)), error.strerror or error
            raise UserError(f"{name}: cannot be read: {reason}") from None

    def _add(self, tar: tarfile.TarFile, number: int, image: StoredImage) -> tuple[int, ...]:
        label = int(self._collection.labels[number])
        key = sample_key(number, self.samples, self._collection.name(number))
        add_file(tar, f"{key}.cls", str(label).encode())
        place = add_file(tar, f"{key}.{SUFFIXES[image.kind]}", image.content)
        shape = (image.height, image.width, image.channels)
        return (place, len(image.content), label, *shape, KINDS[image.kind], 0)


def _require_same(where: Path, what: str, there: dict[str, Any], identity: dict[str, Any]) -> None:
    has, asked = leaves(there), leaves(json.loads(json.dumps(identity)))
    differences = []
    for key in {**asked, **has}:
        name = key.removeprefix("converter.").removeprefix("settings.")
        if has.get(key) == asked.get(key):
            continue
        if key == "source.fingerprint":
            differences.append("the names, labels or sizes in its source differ")
        elif key == "classes":
            differences.append("its classes differ")
        else:
            differences.append(f"its {name} differs: {has.get(key)}, asked for {asked.get(key)}")
    if differences:
        raise UserError(
            f"{where}: {what} is there: {', '.join(differences)}; give another --out, or remove it "
            "with its shards"
        )


# --------------------------------------------------------------------------------------------------
# Writing.


def run_conversions(sets: Sequence[SetSource], options: argparse.Namespace) -> None:
    """Write sets; all are planned, and the disk is looked at, before the first byte is written."""
    plans = [SetPlan(one, options) for one in sets]
    with reading(f"--out {options.out}"):
        needed = sum(plan.bytes_to_write() for plan in plans)
    if options.dry_run:
        for plan in plans:
            print(
                f"{plan.name}: {plan.samples:,} samples of {len(plan.classes):,} classes in "
                f"{plan.shards:,} shards of {plan.shard_samples:,}, "
                f"about {plan.estimated_bytes(range(plan.shards)):,} bytes"
            )
        free = free_bytes(options.out)
        print(f"about {needed:,} bytes to write, {free:,} free; nothing was written (--dry-run)")
        return
    require_space(options.out, needed)
    with writing(options.out, CONTINUES):
        options.out.mkdir(parents=True, exist_ok=True)
        with only_conversion_in(options.out):
            for plan in plans:
                _write_set(plan)


def _write_set(plan: SetPlan) -> None:
    """The state is looked at again: only now no other process can change it."""
    journal = Journal(plan.options.out, plan.name)
    journal.clean()
    state = plan.state()
    if isinstance(state, SetIndex):
        without = f"; {len(state.skipped):,} bad images were left out" if state.skipped else ""
        print(f"{plan.name}: already complete, {state.samples:,} samples{without}")
        return
    if state is None:
        journal.begin(plan.identity)
    else:
        print(f"{plan.name}: continues, {len(state)} of {plan.shards} shards are finished")
    begun = time.monotonic()
    index = _write_index(plan, _all_notes(plan, state or {}))
    journal.remove()
    for change, count in index.converter["changed"].items():
        print(f"{plan.name}: {count:,} × {change}")
    if index.skipped:
        bad = len(index.skipped)
        print(f"{plan.name}: {bad:,} bad images were left out, {plan.name}.index.json lists them")
    size, seconds = sum(shard.bytes for shard in index.shards), time.monotonic() - begun
    made = f"{index.samples:,} samples in {plan.shards:,} shards, {size:,} bytes"
    print(f"{plan.name}: {made}; it took {seconds:.1f} s")


def _all_notes(plan: SetPlan, finished: dict[int, SetIndex]) -> list[SetIndex]:
    """Make the shards that are not there; the notes of all, in their order."""
    jobs = [shard for shard in range(plan.shards) if shard not in finished]
    done = plan.samples - sum(len(plan.numbers(shard)) for shard in jobs)
    progress = Progress(plan.samples, done, "image", plan.name, LOG_SECONDS)
    workers = min(plan.options.workers, len(jobs))
    if workers > 1:
        made = in_processes(plan.make, jobs, workers, progress.advance)
    else:
        made = ((shard, plan.make(shard, progress.advance)) for shard in jobs)
    notes = dict(finished)
    with closing(progress):
        for shard, note in made:
            notes[shard] = note
            for bad in note.skipped:
                progress.say(f"{plan.name}: bad: {bad['name']}: {bad['reason']}")
    return [notes[shard] for shard in range(plan.shards)]


def _write_index(plan: SetPlan, notes: list[SetIndex]) -> SetIndex:
    skipped = [bad for note in notes for bad in note.skipped]
    if len(skipped) == plan.samples:
        raise UserError(f"{plan.name}: all {len(skipped)} images are bad")
    if skipped and plan.options.on_bad == "fail":
        bad = f"{skipped[0]['name']} ({skipped[0]['reason']})"
        raise UserError(
            f"{plan.name}: bad images: {len(skipped)}, the first is {bad}; fix the source, or "
            "leave them out with --on-bad skip; finished shards are kept"
        )
    changes: Counter[str] = Counter()
    for note in notes:
        changes.update(note.converter["changed"])
    journal = Journal(plan.options.out, plan.name).directory
    return write_index(
        plan.options.out,
        plan.name,
        [note.shards[0] for note in notes],
        np.concatenate([np.load(index_paths(journal, note.name)[1]) for note in notes]),
        plan.classes,
        plan.source,
        plan.converter | {"changed": dict(sorted(changes.items()))},
        skipped,
    )
