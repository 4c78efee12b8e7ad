"""What can be known to be wrong with a run before its processes are started.

A launcher that starts failed processes again would make a mistake of the user over and over; so it
asks one process a node first (launch/shared/node.sh).
"""

from lipnext_scale.data import DataSets
from lipnext_scale.parallel import build_engine
from lipnext_scale.parallel.processes import choose_device, fake_group
from lipnext_scale.parallel.zero import require_deepspeed
from lipnext_scale.recipe import Recipe
from lipnext_scale.run_directory import RunDirectory


def check_run(recipe: Recipe, ranks: int, ranks_per_node: int) -> None:
    """A UserError where a run of so many processes could not begin; nothing is written.

    Shards that are to be copied to this node (remote ones, data.stage_dir) are copied, so that no
    process group has to wait for them.
    """
    recipe.require_batch_for(ranks)
    choose_device(recipe.run.device, local_rank=ranks_per_node - 1)
    require_engine(recipe, ranks, ranks_per_node)
    # Not kept: its lock would stand in the way of other nodes' checks.
    RunDirectory(recipe.run.dir).require_free_or_same(recipe)
    model = recipe.model
    DataSets(recipe.data, model.image_size, model.in_channels, model.num_classes)


def require_engine(recipe: Recipe, ranks: int, ranks_per_node: int) -> None:
    """Whether so many processes could share the model: it is placed on them without memory."""
    if recipe.parallel.engine == "deepspeed":
        require_deepspeed()
    with fake_group(0, ranks):
        build_engine(recipe.parallel, "cpu", ranks_per_node).place(recipe.model)
