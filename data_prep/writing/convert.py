"""From collections to shards with their index: in parallel, after any kill to the same bytes."""

import shutil
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.sources.collection import Collection
from data_prep.writing.journal import Journal, ShardNote, only_conversion_in
from data_prep.writing.options import ConversionOptions
from data_prep.writing.set_plan import SetPlan, SetSource
from data_prep.writing.shard_jobs import make_shards, writing
from lipnext_scale.data.index import write_index
from lipnext_scale.errors import UserError
from lipnext_scale.progress import Progress

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
