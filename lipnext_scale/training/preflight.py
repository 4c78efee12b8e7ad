"""What can be wrong with a run before its first step: settings, devices, data.

A launcher that starts failed processes again would repeat a mistake of the user over and over; so
launch/shared/node.sh asks one process a node first (`train --check`).
"""

from pathlib import Path

from lipnext_scale.checkpoint import latest_checkpoint
from lipnext_scale.config.recipe import Recipe
from lipnext_scale.config.run_directory import RunDirectory
from lipnext_scale.data import Catalog, DataSets
from lipnext_scale.data.catalog import check_shards, unchecked_shards
from lipnext_scale.distributed import build_engine
from lipnext_scale.distributed.deepspeed import require_deepspeed
from lipnext_scale.distributed.processes import Processes, choose_device, fake_group
from lipnext_scale.training.checkpointer import starting_point
from lipnext_scale.utils.config import ConfigError
from lipnext_scale.utils.progress import Progress

_MEGABYTE = 1_000_000


def check_run(recipe: Recipe, ranks: int, ranks_per_node: int) -> None:
    """A UserError where a run of so many processes could not begin; nothing is written.

    Shards that are to be copied to this node (remote ones, data.stage_dir) are copied, so that no
    process group has to wait for them.
    """
    recipe.require_batch_for(ranks)
    choose_device(recipe.run.device, local_rank=ranks_per_node - 1)
    require_engine(recipe, ranks, ranks_per_node)
    # Not kept: its lock would stand in the way of other nodes' checks.
    directory, model = RunDirectory(recipe.run.dir), recipe.model
    directory.require_free_or_same(recipe)
    if recipe.run.init_from and latest_checkpoint(directory.checkpoints) is None:
        starting_point(Path(recipe.run.init_from), model)
    DataSets(recipe.data, model.image_size, model.in_channels, model.num_classes)


def require_engine(recipe: Recipe, ranks: int, ranks_per_node: int) -> None:
    """The model can be shared by so many processes: it is placed on them without memory."""
    if recipe.parallel.engine == "deepspeed":
        require_deepspeed()
    with fake_group(0, ranks):
        build_engine(recipe.parallel, "cpu", ranks_per_node).place(recipe.model)


def require_same_samples(catalogs: list[Catalog], processes: Processes) -> None:
    """A node with another copy of the data would train or evaluate out of step."""
    for catalog in catalogs:
        prints = processes.gather_objects(catalog.fingerprint())
        for rank, fingerprint in enumerate(prints):
            if fingerprint != prints[0]:
                right = f"rank {rank} reads other samples than rank 0"
                raise ConfigError(catalog.key, catalog.pattern, right)


def require_intact_shards(
    catalogs: list[Catalog], processes: Processes, known: frozenset[str]
) -> list[str]:
    """Hash every shard that has an index, shared out over the ranks of a node, and compare.

    known: stamps of files that an earlier start of the run found intact; those that have not
    changed since are not read again. Returns all stamps of this start, of all nodes, with those of
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
