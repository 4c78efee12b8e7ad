"""Compare shards with their index and tell every fault.

    python -m data_prep.verify DIRECTORY | INDEX | SHARDS … [--decode] [--workers N]

Each shard must be there with its size and sha256; the index's records must be those of the tar's
own headers and labels, and its class counts those of the records. With --decode every image is
decoded as in training. Shards without an index are looked at for what they are. The end is one
line; the exit code is 0 if all is sound, 1 if anything is damaged.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from data_prep.checking.shard_sets import (
    LOG_SECONDS,
    ShardReport,
    ShardSet,
    ShardTask,
    add_workers_option,
    check_shard,
    find_sets,
    in_threads,
)
from lipnext_scale.data.index import SetIndex, index_paths, map_records, read_index, set_name
from lipnext_scale.errors import ArgumentParser, RunFailed, UserError, command
from lipnext_scale.files import file_sha256
from lipnext_scale.progress import Progress


@dataclass
class SetPlan:
    """What is known of a set before its shards are opened, and which of them are to be."""

    tasks: list[ShardTask] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def plan_set(shard_set: ShardSet, decode: bool) -> SetPlan:
    """The index itself is looked at here, the shards are left to the tasks."""
    if shard_set.index is None:
        if shard_set.name.endswith(".beton"):
            how = f"python -m data_prep.ffcv --index {shard_set.title} writes it"
            raise UserError(f"{shard_set.title}: has no index to be compared with; {how}")
        plan = SetPlan([ShardTask(shard_set.directory / f, decode) for f in shard_set.files or []])
        plan.warnings.append(f"{shard_set.title}: has no index; nothing to compare the shards with")
        return plan
    try:
        index = read_index(shard_set.index)
    except UserError as error:
        return SetPlan(faults=[str(error)])
    plan = SetPlan()
    _, records = index_paths(shard_set.directory, shard_set.name)
    plan.faults += _record_faults(shard_set, index)
    usable = not plan.faults
    first = 0
    for entry in index.shards:
        if shard_set.files is None or entry.file in shard_set.files:
            path = shard_set.directory / entry.file
            own = records if usable else None
            plan.tasks.append(ShardTask(path, decode, entry, own, index.samples, first))
        first += entry.samples
    unknown = [f"{path}: is not in {shard_set.index}" for path in _unknown_shards(shard_set, index)]
    if shard_set.files is None:
        plan.warnings += [f"{told}, and is not looked at" for told in unknown]
    else:
        plan.faults += unknown
    return plan


def _record_faults(shard_set: ShardSet, index: SetIndex) -> Iterator[str]:
    """The sha256 first: of damaged bytes numpy could say only what it makes of them."""
    _, path = index_paths(shard_set.directory, shard_set.name)
    try:
        if file_sha256(path) != index.records:
            yield f"{path}: its sha256 is not that of {shard_set.index}: bytes in it have changed"
        else:
            map_records(path, index.samples)
    except OSError as error:
        yield f"{path}: cannot be read: {error.strerror}"
    except UserError as error:
        yield str(error)


def _unknown_shards(shard_set: ShardSet, index: SetIndex) -> list[Path]:
    """Shards that the index does not know, of an older conversion say: those that were asked for,
    or all in the directory that have the set's name."""
    known = {entry.file for entry in index.shards}
    files = shard_set.files
    if files is None:
        found = sorted(path.name for path in shard_set.directory.glob("*.tar"))
        files = [file for file in found if set_name(file) == shard_set.name]
    return [shard_set.directory / file for file in files if file not in known]


def verify(sets: list[ShardSet], decode: bool, workers: int) -> tuple[int, str]:
    """(how many faults there are, a summary), telling each fault as it is found."""
    plans = [plan_set(shard_set, decode) for shard_set in sets]
    tasks = [task for plan in plans for task in plan.tasks]
    progress = Progress(len(tasks), unit="shard", title="verifying", log_seconds=LOG_SECONDS)

    def tell(report: ShardReport) -> None:
        for fault in report.faults:
            progress.say(f"fault: {report.path}: {fault}")

    for plan in plans:
        for warning in plan.warnings:
            progress.say(f"warning: {warning}")
        for fault in plan.faults:
            progress.say(f"fault: {fault}")
    try:
        reports = in_threads(check_shard, tasks, workers, progress, tell)
    finally:
        progress.close()
    faults = sum(len(p.faults) for p in plans) + sum(len(r.faults) for r in reports)
    samples, size = sum(r.samples for r in reports), sum(r.bytes for r in reports)
    return faults, f"{len(tasks)} shards, {samples:,} samples, {size:,} bytes"


@command
def main(argv: list[str] | None = None) -> None:
    assert __doc__ is not None
    parser = ArgumentParser(prog="data_prep.verify", description=__doc__.split("\n")[0])
    parser.add_argument("sets", nargs="+", metavar="SET", help="an index, a directory or shards")
    parser.add_argument("--decode", action="store_true", help="decode every image too")
    add_workers_option(parser)
    arguments = parser.parse_args(argv)
    sets = find_sets(arguments.sets)
    faults, summary = verify(sets, arguments.decode, arguments.workers)
    if faults:
        raise RunFailed(f"{faults} fault{'s' if faults > 1 else ''} in {summary}")
    print(f"sound: {summary}{', every image decoded' if arguments.decode else ''}")


if __name__ == "__main__":
    main()
