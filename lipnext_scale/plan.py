"""Show how a configuration would be spread over processes, without any of them.

    python -m lipnext_scale.plan --config configs/imagenet_1b.yaml --ranks 64 --ranks-per-node 8

The model is built on the meta device and sharded over torch's fake process group, once as every
rank of a replica: what is printed follows from the shapes that FSDP made, and no weight is ever in
memory.
"""

from lipnext_scale.checks import size
from lipnext_scale.config.recipe import Recipe, load_recipe
from lipnext_scale.distributed import build_engine
from lipnext_scale.distributed.estimate import RankEstimate, estimate
from lipnext_scale.distributed.processes import fake_group
from lipnext_scale.utils.config import ConfigError
from lipnext_scale.utils.errors import ArgumentParser, command, positive

MEMORY = ("matrices", "parameters", "gradients", "optimizer", "kept", "gathered", "buffers")
TRAFFIC = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "sent")


@command
def main(argv: list[str] | None = None) -> None:
    parser = ArgumentParser(prog="lipnext_scale.plan", description="Plan a run over processes.")
    parser.add_configuration(required=True)
    parser.add_argument("--ranks", type=positive, required=True, help="processes in all")
    parser.add_argument(
        "--ranks-per-node", type=positive, default=8, help="processes of a node (8)"
    )
    arguments = parser.parse_intermixed_args(argv)
    recipe = load_recipe(arguments.config, arguments.overrides)
    if recipe.parallel.engine == "deepspeed":
        right = "is not planned; plan 'fsdp', which is like ZeRO-3"
        raise ConfigError("parallel.engine", "deepspeed", right)
    ranks = arguments.ranks
    recipe.require_batch_for(ranks)
    engine, estimates = plan(recipe, ranks, min(ranks, arguments.ranks_per_node))
    model, batch, parts = recipe.model, recipe.data.batch_size, recipe.parallel.accumulation
    print(f"LipNeXt L{model.depth}W{model.width}: {model.bank_parameters:,} orthogonal parameters")
    print(f"{ranks} process(es): {engine}")
    print(f"batch of {batch}: {batch // ranks} image(s) a process, in {parts} part(s)\n")
    note = "kept: parameters, gradients and optimizer; activations come on top"
    print(_table(estimates, MEMORY, f"on each rank ({note})") + "\n")
    if any(values.sent for values in estimates):
        print(_table(estimates, TRAFFIC, "sent by each rank in a step"))
    else:
        print("nothing is sent")


def plan(recipe: Recipe, ranks: int, per_node: int) -> tuple[str, list[RankEstimate]]:
    """The engine in effect, and what every rank holds and sends."""
    described, shards, shard = "", 1, 0
    estimates: dict[int, RankEstimate] = {}
    while shard < shards:
        with fake_group(shard, ranks):
            engine = build_engine(recipe.parallel, "cpu", per_node)
            model, replicas = engine.place(recipe.model), engine.replicas()
            described, shards = engine.describe(), ranks // replicas
            for replica in range(replicas):  # its fellows, with other shares of the step
                rank = replica * shards + shard
                estimates[rank] = estimate(engine, model, recipe.optim, replica)
        shard += 1
    return described, [estimates[rank] for rank in range(ranks)]


def _table(estimates: list[RankEstimate], names: tuple[str, ...], title: str) -> str:
    """A line for all ranks that look alike; columns that are zero everywhere are left out."""
    names = tuple(name for name in names if any(getattr(e, name) for e in estimates))
    alike: dict[tuple[str, ...], list[int]] = {}
    for rank, values in enumerate(estimates):
        cells = (
            f"{values.matrices:.2f}" if name == "matrices" else size(getattr(values, name))
            for name in names
        )
        alike.setdefault(tuple(cells), []).append(rank)
    rows = [("ranks", *(name.replace("_", "-") for name in names))]
    rows += [(_ranges(ranks), *cells) for cells, ranks in alike.items()]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.rjust, row, widths)) for row in rows]
    return "\n  ".join([title, *lines])


def _ranges(ranks: list[int]) -> str:
    """3, 0-7, or 0-13 (6) where others lie in between."""
    first, last = ranks[0], ranks[-1]
    text = f"{first}-{last}" if last > first else f"{first}"
    return text if len(ranks) == last - first + 1 else f"{text} ({len(ranks)})"


if __name__ == "__main__":
    main()
