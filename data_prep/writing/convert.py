"""From collections to shards with their index: in parallel, after any kill to the same bytes."""

import argparse
import json
import os
import shutil
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.sources.listing import Collection
from data_prep.writing.encoding import BadImage, ImageRules, stored_image
from data_prep.writing.shard_jobs import (
    Journal,
    ShardMaker,
    ShardNote,
    make_shards,
    only_conversion_in,
    printable,
    writing,
)
from lipnext_scale import __version__
from lipnext_scale.data.index import SetIndex, index_paths, read_index, write_index
from lipnext_scale.errors import UserError
from lipnext_scale.progress import Progress

# --------------------------------------------------------------------------------------------------
# The options that all converters share.

LARGEST_SEED = 2**32 - 1


@dataclass(frozen=True)
class ConversionOptions:
    """How a set is written; `converter` is the command's name, such as data_prep.cifar."""

    converter: str
    out: Path
    seed: int = 0
    shard_samples: int = 0  # 0: by the samples' size
    workers: int = field(default_factory=lambda: os.cpu_count() or 1)
    rules: ImageRules = ImageRules()
    on_bad: str = "fail"
    dry_run: bool = False

    def __post_init__(self) -> None:
        _require("--seed", self.seed, 0, LARGEST_SEED)
        _require("--shard-samples", self.shard_samples, 0)
        _require("--workers", self.workers, 0)
        _require("--short-side", self.rules.short_side, 0)
        _require("--quality", self.rules.quality, 1, 100)
        _require("--max-pixels", self.rules.max_pixels, 1)

    def settings(self) -> dict[str, Any]:
        """All that the bytes of a set follow from beside its source, and nothing else: --workers
        changes none, and --quality none where nothing is scaled."""
        settings = {"seed": self.seed, "shard_samples": self.shard_samples}
        settings |= {"short_side": self.rules.short_side, "max_pixels": self.rules.max_pixels}
        return settings | ({"quality": self.rules.quality} if self.rules.short_side else {})


def _require(name: str, value: int, lowest: int, highest: int | None = None) -> None:
    if value < lowest or (highest is not None and value > highest):
        allowed = f"at least {lowest}" if highest is None else f"{lowest} to {highest}"
        raise UserError(f"{name} {value}: must be {allowed}")


def add_conversion_options(parser: argparse.ArgumentParser) -> None:
    """--out and all that changes how, not what, is converted."""
    rules = ImageRules()
    add = parser.add_argument_group("the shards").add_argument
    add("--out", type=Path, required=True, help="directory for the shards; made if need be")
    add("--seed", type=int, default=0, help="of the order of the samples (default 0)")
    add(
        "--shard-samples",
        type=int,
        default=0,
        help="samples in a shard (default: about 100 MB of them, but eight shards at least where "
        "that leaves 100 samples in each)",
    )
    add(
        "--workers",
        type=int,
        default=os.cpu_count() or 1,
        help="processes, each on a shard of its own (default: one for each CPU; 0: none beside "
        "this one). The bytes do not depend on it",
    )
    add(
        "--short-side",
        type=int,
        default=rules.short_side,
        metavar="N",
        help="scale images down to N pixels on their shorter side; smaller ones stay as they are "
        "(default 0: keep every image's own bytes)",
    )
    add(
        "--quality",
        type=int,
        default=rules.quality,
        help=f"of JPEGs that are scaled down (default {rules.quality})",
    )
    add(
        "--max-pixels",
        type=int,
        default=rules.max_pixels,
        help=f"an image that claims more is bad (default {rules.max_pixels})",
    )
    add(
        "--on-bad",
        choices=("fail", "skip"),
        default="fail",
        help="images that are damaged or of an unknown kind: name them all and fail (default), or "
        "leave them out and list them in the index",
    )
    add("--dry-run", action="store_true", help="say what would be written, and write nothing")


def conversion_options(arguments: argparse.Namespace, converter: str) -> ConversionOptions:
    """What the parser found, checked."""
    return ConversionOptions(
        converter=converter,
        out=arguments.out,
        seed=arguments.seed,
        shard_samples=arguments.shard_samples,
        workers=arguments.workers,
        rules=ImageRules(arguments.short_side, arguments.quality, arguments.max_pixels),
        on_bad=arguments.on_bad,
        dry_run=arguments.dry_run,
    )


# --------------------------------------------------------------------------------------------------
# What lies where a set is to be written: nothing, a part of it, all of it, or something else.


@dataclass(frozen=True)
class SetState:
    """`complete`: the index of the finished set. Else `notes`: the shards that are finished."""

    complete: SetIndex | None = None
    unfinished: bool = False
    notes: dict[int, ShardNote] = field(default_factory=dict)


def find_state(out: Path, name: str, identity: dict[str, Any], shards: int) -> SetState:
    """What is there of the set that `identity` describes; of anything else, a UserError."""
    journal = Journal(out, name)
    plan = journal.plan()
    if plan is not None:
        _require_same(journal.directory, "an unfinished set", plan, identity)
        return SetState(unfinished=True, notes=journal.finished(shards))
    path = index_paths(out, name)[0]
    if path.exists():
        index = read_index(path)
        _require_same(path, "another set", _identity_of(index), _without_version(identity))
        _require_shards(path, index)
        return SetState(complete=index)
    for stray in sorted(out.glob(f"{name}-*.tar*")):
        raise UserError(
            f"{stray}: is in the way and of no known set; remove it, or give another --out"
        )
    return SetState()


def _identity_of(index: SetIndex) -> dict[str, Any]:
    converter = {key: index.converter.get(key) for key in ("name", "settings")}
    return {"converter": converter, "source": index.source, "classes": index.classes}


def _without_version(identity: dict[str, Any]) -> dict[str, Any]:
    """A finished set may be an earlier version's; an unfinished one must not become two's."""
    converter = {key: value for key, value in identity["converter"].items() if key != "version"}
    return identity | {"converter": converter}


def _require_same(where: Path, what: str, there: dict[str, Any], identity: dict[str, Any]) -> None:
    asked = _flat(json.loads(json.dumps(identity)))
    found = _flat(there)
    names = [name for name in {**asked, **found} if asked.get(name) != found.get(name)]
    if names:
        told = ", ".join(_difference(name, found.get(name), asked.get(name)) for name in names)
        raise UserError(
            f"{where}: {what} is there: {told}; give another --out, or remove it with its shards"
        )


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat


def _difference(name: str, found: Any, asked: Any) -> str:
    if name == "classes":
        return "its classes differ"
    if name == "source.fingerprint":
        return "the names, labels or sizes in its source differ"
    short = name.removeprefix("converter.").removeprefix("settings.")
    return f"its {short} is {found}, asked for {asked}"


def _require_shards(path: Path, index: SetIndex) -> None:
    for shard in index.shards:
        file = path.parent / shard.file
        if not file.exists() or file.stat().st_size != shard.bytes:
            raise UserError(
                f"{file}: is missing or not of the size in {path.name}; remove {path.name} and the "
                "set's shards to convert it again"
            )


# --------------------------------------------------------------------------------------------------
# One set before it is written: what goes into which shard, and how many bytes that takes.
#
# The order of the samples follows from the seed, a shard's samples from the order, its bytes from
# its samples. So shards can be made in any order, by any number of processes, now or later.

SHARD_BYTES = 100_000_000
FEWEST_SHARDS, FEWEST_SAMPLES = 8, 100
# Bytes a tar takes beside the images: two headers and the class for a sample, its end for a shard.
BLOCK = 512
SAMPLE_OVERHEAD, SHARD_OVERHEAD = 3 * BLOCK, 20 * BLOCK
PROBES = 50
RECORD_BYTES = 64  # in the journal and the index


@dataclass(frozen=True)
class SetSource:
    """A set to be written: its name ("train", "test"), its samples, what its index tells of it."""

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
    before = after = 0
    places = np.linspace(0, len(collection) - 1, PROBES if rules.short_side else 0).astype(int)
    for i in sorted(set(places.tolist())):
        try:
            after += len(stored_image(collection.load(i), rules).content)
        except (BadImage, OSError):  # in its turn it will be told of
            continue
        before += collection.estimated_bytes(i)
    return round(after / before, 2) or 0.01 if before else 1.0


class SetPlan:
    """A set as the options want it written; `converter` and `source` go into its index."""

    def __init__(self, one: SetSource, options: ConversionOptions) -> None:
        self.name, self.options, self._collection = one.name, options, one.collection
        self.samples = len(one.collection)
        if not self.samples:
            raise UserError(f"{one.name}: the source holds no samples")
        estimates = (one.collection.estimated_bytes(i) for i in range(self.samples))
        sizes = np.fromiter(estimates, np.int64, self.samples) * _share(
            one.collection, options.rules
        )
        self._bytes = np.ceil(sizes / BLOCK).astype(np.int64) * BLOCK + SAMPLE_OVERHEAD
        self.shard_samples = options.shard_samples or default_shard_samples(self._bytes)
        self.shards = -(-self.samples // self.shard_samples)
        settings = options.settings() | {"shard_samples": self.shard_samples}
        self.converter = {"name": options.converter, "version": __version__, "settings": settings}
        listed = {"samples": self.samples, "fingerprint": one.collection.fingerprint()}
        self.source = one.source | listed
        self.classes = [printable(name) for name in one.collection.classes]

    @property
    def identity(self) -> dict[str, Any]:
        return {"converter": self.converter, "source": self.source, "classes": self.classes}

    @cached_property
    def _order(self) -> np.ndarray:
        # Of numpy's generators the one whose numbers are promised never to change.
        return np.random.RandomState(self.options.seed).permutation(self.samples)

    def numbers(self, shard: int) -> np.ndarray:
        """The samples of a shard, in their order there."""
        return self._order[shard * self.shard_samples : (shard + 1) * self.shard_samples]

    def maker(self) -> ShardMaker:
        return ShardMaker(self._collection, self.options.out, self.name, self.options.rules)

    def state(self) -> SetState:
        """What is there of the set. Where bad images are to fail, a shard that was finished without
        some is made again: they may have been mended."""
        state = find_state(self.options.out, self.name, self.identity, self.shards)
        strict = self.options.on_bad == "fail"
        if strict and state.complete and state.complete.skipped:
            raise UserError(
                f"{self.name}: is complete, but for {len(state.complete.skipped)} bad images that "
                "were left out; say --on-bad skip to let it be so, or remove it"
            )
        notes = {k: note for k, note in state.notes.items() if not (strict and note.skipped)}
        return SetState(state.complete, state.unfinished, notes)

    def estimated_bytes(self, shards: Iterable[int]) -> int:
        """About as many as these shards will take."""
        return sum(
            int(self._bytes[numbers].sum()) + SHARD_OVERHEAD + RECORD_BYTES * len(numbers)
            for numbers in map(self.numbers, shards)
        )

    def described(self) -> str:
        return (
            f"{self.name}: {self.samples:,} samples of {len(self.classes):,} classes in "
            f"{self.shards:,} shards of {self.shard_samples:,}, "
            f"about {self.estimated_bytes(range(self.shards)):,} bytes"
        )


NAMED_BAD = 20
LOG_SECONDS = 10


def run_conversion(
    collection: Collection, name: str, source: dict[str, Any], options: ConversionOptions
) -> None:
    """Write one set: `name` is "train" or "test", `source` what its index tells of its origin."""
    run_conversions([SetSource(name, collection, source)], options)


def run_conversions(sets: Sequence[SetSource], options: ConversionOptions) -> None:
    """Write several sets; all are looked at, and the disk, before the first byte is written."""
    plans = [SetPlan(one, options) for one in sets]
    needed, free = sum(map(_bytes_to_write, plans)), _free_bytes(options.out)
    if options.dry_run:
        for plan in plans:
            print(plan.described())
        print(f"about {needed:,} bytes to write, {free:,} free; nothing was written (--dry-run)")
    elif needed > free:
        raise UserError(
            f"--out {options.out}: about {needed:,} bytes are needed, {free:,} are free there"
        )
    else:
        _write_sets(plans, options.out)


def _bytes_to_write(plan: SetPlan) -> int:
    state = plan.state()
    return 0 if state.complete else plan.estimated_bytes(set(range(plan.shards)) - set(state.notes))


def _free_bytes(out: Path) -> int:
    """On the disk that `out` is or will be on."""
    there = next(path for path in (out.absolute(), *out.absolute().parents) if path.exists())
    return shutil.disk_usage(there).free


def _write_sets(plans: Sequence[SetPlan], out: Path) -> None:
    with writing(out):
        out.mkdir(parents=True, exist_ok=True)
        with only_conversion_in(out):
            for plan in plans:
                _write_set(plan)


def _write_set(plan: SetPlan) -> None:
    """The state is looked at again: only now nobody else can change it."""
    journal = Journal(plan.options.out, plan.name)
    journal.clean()
    state = plan.state()
    if state.complete:
        bad = len(state.complete.skipped)
        left_out = f"; {bad:,} bad images were left out" if bad else ""
        print(f"{plan.name}: already complete, {state.complete.samples:,} samples{left_out}")
        return
    if state.unfinished:
        print(f"{plan.name}: goes on, {len(state.notes)} of {plan.shards} shards are finished")
    else:
        journal.begin(plan.identity)
    begun = time.monotonic()
    notes = _all_notes(plan, state.notes)
    _finish(plan, journal, notes)
    made = [note for shard, note in notes.items() if shard not in state.notes]
    _summarise(plan, notes, sum(n.entry.samples for n in made), time.monotonic() - begun)


def _all_notes(plan: SetPlan, finished: dict[int, ShardNote]) -> dict[int, ShardNote]:
    """Make the shards that are not there; the notes of all, in their order."""
    jobs = {shard: plan.numbers(shard) for shard in range(plan.shards) if shard not in finished}
    done = plan.samples - sum(map(len, jobs.values()))
    progress = Progress(plan.samples, done, "image", plan.name, LOG_SECONDS)
    notes, told = dict(finished), 0
    try:
        for shard, note in make_shards(plan.maker(), jobs, plan.options.workers, progress.advance):
            notes[shard] = note
            for bad in note.skipped:
                told += 1
                if plan.options.on_bad == "skip" or told <= NAMED_BAD:
                    progress.say(f"{plan.name}: bad: {bad['name']}: {bad['reason']}")
    finally:
        progress.close()
    return dict(sorted(notes.items()))


def _finish(plan: SetPlan, journal: Journal, notes: dict[int, ShardNote]) -> None:
    """The index, and then no journal."""
    skipped = [bad for note in notes.values() for bad in note.skipped]
    if skipped and plan.options.on_bad == "fail":
        raise UserError(
            f"{plan.name}: {_bad_images(skipped)}; mend the source, or say --on-bad skip to leave "
            "them out; finished shards are kept"
        )
    if len(skipped) == plan.samples:
        raise UserError(f"{plan.name}: no image is left, {_bad_images(skipped)}")
    write_index(
        plan.options.out,
        plan.name,
        [note.entry for note in notes.values()],
        np.concatenate([note.records for note in notes.values()]),
        plan.classes,
        plan.source,
        plan.converter | {"changed": _changes(notes)},
        skipped,
    )
    journal.remove()


def _bad_images(skipped: list[dict[str, str]]) -> str:
    named = ", ".join(f"{bad['name']} ({bad['reason']})" for bad in skipped[:NAMED_BAD])
    more = f" and {len(skipped) - NAMED_BAD} more" if len(skipped) > NAMED_BAD else ""
    return f"{len(skipped)} bad image{'s'[: len(skipped) > 1]}: {named}{more}"


def _changes(notes: dict[int, ShardNote]) -> dict[str, int]:
    """How many images were changed in which way."""
    total: Counter[str] = Counter()
    for note in notes.values():
        total.update(note.changes)
    return dict(sorted(total.items()))


def _summarise(plan: SetPlan, notes: dict[int, ShardNote], made: int, seconds: float) -> None:
    for change, count in _changes(notes).items():
        print(f"{plan.name}: {count:,} × {change}")
    if bad := sum(len(note.skipped) for note in notes.values()):
        print(f"{plan.name}: {bad:,} bad images were left out, {plan.name}.index.json lists them")
    samples = sum(note.entry.samples for note in notes.values())
    size = sum(note.entry.bytes for note in notes.values())
    print(
        f"{plan.name}: {samples:,} samples in {plan.shards:,} shards, {size:,} bytes; "
        f"{made:,} images in {seconds:.1f} s ({made / max(seconds, 1e-9):,.0f} a second)"
    )
