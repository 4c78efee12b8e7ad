"""Before a run: the shards are whole, and all ranks read the same samples."""

from pathlib import Path

from lipnext_scale.config import ConfigError
from lipnext_scale.data import Catalog
from lipnext_scale.data.integrity import check_shards, unchecked_shards
from lipnext_scale.parallel.processes import Processes
from lipnext_scale.progress import Progress

_MEGABYTE = 1_000_000


def require_same_samples(catalogs: list[Catalog], processes: Processes) -> None:
    """A node with another copy of the data would train or evaluate out of step."""
    for catalog in catalogs:
        prints = processes.gather_objects(catalog.fingerprint())
        for rank, fingerprint in enumerate(prints):
            if fingerprint != prints[0]:
                right = f"rank {rank} reads other samples than rank 0"
                raise ConfigError(catalog.key, catalog.pattern, right)


def require_whole_shards(
    catalogs: list[Catalog], processes: Processes, remembered: Path
) -> list[str]:
    """Hash every shard that has an index, the ranks of a node in turns, and compare.

    remembered: the stamps of shards that an earlier start of the run found whole; those that have
    not changed since are not read again. Returns all stamps of this start, of all nodes.
    """
    known = set(remembered.read_text("utf-8").splitlines()) if remembered.is_file() else set()
    shards = unchecked_shards(catalogs, known)
    mine = shards[processes.local_rank :: processes.local_world_size]
    total = sum(shard.bytes for shard in mine)
    silent = processes.rank != 0 or not mine
    progress = Progress(
        total // _MEGABYTE, unit="MB", title="checking shards", log_seconds=10, silent=silent
    )
    done = 0

    def advance(size: int) -> None:
        nonlocal done
        progress.advance((done + size) // _MEGABYTE - done // _MEGABYTE)
        done += size

    found = processes.everywhere(lambda: check_shards(mine, advance))
    progress.close()
    return sorted(known.union(*found))
