"""Show how a configuration would be spread over processes, without any of them.

    python -m lipnext_scale.plan --config configs/imagenet_1b.yaml --ranks 64 --ranks-per-node 8

The model is built on the meta device and sharded over torch's fake process group, once as every
rank of a replica: what is printed are the shapes that FSDP made, and no weight is ever in memory.
"""

from itertools import groupby

from torch import nn

from lipnext_scale.checks import size
from lipnext_scale.config.recipe import Recipe, load_recipe
from lipnext_scale.distributed import Engine, FSDPEngine, build_engine
from lipnext_scale.distributed.estimate import RankEstimate, estimate
from lipnext_scale.distributed.fsdp import SHARD
from lipnext_scale.distributed.processes import fake_group
from lipnext_scale.models import LipNeXt
from lipnext_scale.optim import local_part
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
    described, estimates = plan(recipe, ranks, min(ranks, arguments.ranks_per_node))
    note = "kept: parameters, gradients and optimizer; activations come on top"
    memory = _table(estimates, MEMORY, f"on each rank ({note})")
    traffic = "nothing is sent"
    if any(values.sent for values in estimates):
        traffic = _table(estimates, TRAFFIC, "sent by each rank in a step")
    print("\n\n".join([described, memory, traffic]))


def plan(recipe: Recipe, ranks: int, per_node: int) -> tuple[str, list[RankEstimate]]:
    """What the model is like on rank 0, and what every rank holds and sends."""
    described, estimates, distinct = "", [], 1
    for rank in range(ranks):
        if rank < distinct:
            with fake_group(rank, ranks):
                engine = build_engine(recipe.parallel, "cpu", per_node)
                model = engine.place(recipe.model)
                assert all(p.is_meta for p in model.parameters()), "a plan allocates nothing"
                estimates.append(estimate(engine, model, recipe.optim))
                if rank == 0:
                    described = introduction(recipe, engine, model)
                    if isinstance(engine, FSDPEngine):
                        distinct = engine.mesh[SHARD].size()
        else:  # as its fellow in the first replica
            estimates.append(estimates[rank % distinct])
    return described, estimates


def introduction(recipe: Recipe, engine: Engine, model: LipNeXt) -> str:
    config, count = recipe.model, engine.processes.world_size
    each, parts = recipe.data.batch_size // count, recipe.parallel.accumulation
    lines = [
        f"LipNeXt L{config.depth}W{config.width}: {config.bank_parameters:,} orthogonal parameters",
        f"{count} process(es): {engine.describe()}",
        f"batch of {recipe.data.batch_size}: {each} image(s) a process, in {parts} part(s)",
        "",
        "whole → on rank 0",
    ]
    for shapes, same in groupby(model.block_groups(), _shapes):
        lines.append(f"{len(list(same))} group(s) of blocks with")
        lines += [f"    {line}" for line in shapes]
    lines += ["head with", *(f"    {line}" for line in _shapes(model.head))]
    return "\n".join(lines)


def _shapes(module: nn.Module) -> list[str]:
    """Each distinct parameter's whole and local shape."""
    lines = []
    named = ((name.split(".")[0], p) for name, p in module.named_parameters())
    for (name, whole, local), same in groupby(
        (name, tuple(p.shape), tuple(local_part(p).shape)) for name, p in named
    ):
        count = len(list(same))
        times = f"{count} × " if count > 1 else ""
        lines.append(f"{times}{name} {list(whole)} → {list(local)}")
    return lines


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
    """0-3, 8-11, …: as many as fit, and how many they are in all."""
    runs = [
        [rank for _, rank in run] for _, run in groupby(enumerate(ranks), lambda x: x[1] - x[0])
    ]
    texts = [f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs]
    more = f", … ({len(ranks)})" if len(texts) > 3 else ""
    return ", ".join(texts[:3]) + more


if __name__ == "__main__":
    main()
