"""Before a run: the shards are whole, and all ranks read the same samples."""

from lipnext_scale.config import ConfigError
from lipnext_scale.data import Catalog
from lipnext_scale.data.catalog import check_shards, unchecked_shards
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
    catalogs: list[Catalog], processes: Processes, known: frozenset[str]
) -> list[str]:
    """Hash every shard that has an index, the ranks of a node in turns, and compare.

    known: the stamps of files that an earlier start of the run found whole; those that have not
    changed since are not read again. Returns all stamps of this start, of all nodes, also those of
    the indexes, which were compared when the catalogs were opened.
    """
    indexes = [stamp for catalog in catalogs for stamp in catalog.index_stamps]
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

    found = processes.everywhere(lambda: indexes + check_shards(mine, advance))
    progress.close()
    return sorted(known.union(*found))
