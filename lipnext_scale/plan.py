"""Show how a configuration would be spread over processes, without any of them.

    python -m lipnext_scale.plan --config configs/imagenet_1b.yaml --ranks 64 --ranks-per-node 8

The model is built on the meta device and sharded over torch's fake process group, once as every
rank of a replica: what is printed are the shapes that FSDP made, and no weight is ever in memory.
"""

from itertools import groupby

from torch import nn

from lipnext_scale.config.recipe import Recipe, load_recipe
from lipnext_scale.distributed import Engine, FSDPEngine, build_engine
from lipnext_scale.distributed.estimate import RankEstimate, estimate
from lipnext_scale.distributed.fsdp import SHARD
from lipnext_scale.distributed.processes import fake_group
from lipnext_scale.models import LipNeXt
from lipnext_scale.optim import local_part
from lipnext_scale.utils.config import ConfigError
from lipnext_scale.utils.errors import ArgumentParser, UserError, command

MEMORY = ("parameters", "gradients", "optimizer", "kept", "gathered", "buffers")
TRAFFIC = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "sent")
UNITS = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3))


@command
def main(argv: list[str] | None = None) -> None:
    parser = ArgumentParser(prog="lipnext_scale.plan", description="Plan a run over processes.")
    parser.add_argument("--config", required=True, help="YAML file, such as configs/digits.yaml")
    parser.add_argument("--ranks", type=int, required=True, help="processes in all")
    parser.add_argument("--ranks-per-node", type=int, default=8, help="processes of a node (8)")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    arguments = parser.parse_intermixed_args(argv)
    for name in ("ranks", "ranks_per_node"):
        if getattr(arguments, name) < 1:
            option = "--" + name.replace("_", "-")
            raise UserError(f"{option} {getattr(arguments, name)}: must be at least 1")
    recipe = load_recipe(arguments.config, arguments.overrides)
    if recipe.parallel.engine == "deepspeed":
        right = "is not planned; plan 'fsdp', which is like ZeRO-3"
        raise ConfigError("parallel.engine", "deepspeed", right)
    ranks = arguments.ranks
    recipe.require_batch_for(ranks)
    described, estimates = plan(recipe, ranks, min(ranks, arguments.ranks_per_node))
    note = "kept: parameters, gradients and optimizer. Activations come on top"
    memory = _table(estimates, ("matrices", *MEMORY), "on each rank", note)
    traffic = "nothing is sent"
    if any(values.sent for values in estimates):
        traffic = _table(estimates, TRAFFIC, "sent by each rank in a step", "")
    print("\n\n".join([described, memory, traffic, balance(estimates)]))


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
        f"{_count(count, 'process', 'processes')}: {engine.describe()}",
        f"batch of {recipe.data.batch_size}: {_count(each, 'image')} a process"
        + (f", in {parts} parts" if parts > 1 else ""),
        "",
        "whole → on rank 0",
    ]
    for shapes, same in groupby(model.block_groups(), _shapes):
        lines.append(f"{_count(len(list(same)), 'group')} of blocks with")
        lines += [f"    {line}" for line in shapes]
    lines += ["head with", *(f"    {line}" for line in _shapes(model.head))]
    return "\n".join(lines)


def _count(number: int, one: str, many: str = "") -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"


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


def _table(estimates: list[RankEstimate], names: tuple[str, ...], title: str, note: str) -> str:
    """A line for all ranks that look alike; columns that are zero everywhere are left out."""
    names = tuple(name for name in names if any(getattr(e, name) for e in estimates))
    sizes = [getattr(e, name) for e in estimates for name in names if name != "matrices"]
    unit, scale = _unit(max(sizes))
    alike: dict[tuple[str, ...], list[int]] = {}
    for rank, values in enumerate(estimates):
        sizes = [f"{getattr(values, name) / scale:.3f}" for name in names if name != "matrices"]
        share = [f"{values.matrices:.2f}"] if "matrices" in names else []
        alike.setdefault((*share, *sizes), []).append(rank)
    ranks = [_ranges(same) for same in alike.values()]
    first = max(len(text) for text in ["ranks", *ranks])
    titles = [name.replace("_", "-") for name in names]
    lines = [f"{title}, {unit}" + (f" ({note})" if note else "")]
    for head, row in [("ranks", tuple(titles)), *zip(ranks, alike, strict=True)]:
        widths = [max(10, len(title) + 2) for title in titles]
        cells = "".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True))
        lines.append(f"  {head:<{first}}{cells}")
    return "\n".join(lines)


def _unit(largest: float) -> tuple[str, float]:
    """In which the largest of some sizes has three digits or more."""
    return next((unit for unit in UNITS if largest >= unit[1] / 10), UNITS[-1])


def _ranges(ranks: list[int]) -> str:
    """0-3, 8-11, …: as many as fit, and how many they are in all."""
    runs = [
        [rank for _, rank in run] for _, run in groupby(enumerate(ranks), lambda x: x[1] - x[0])
    ]
    texts = [f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs]
    if len(texts) <= 3:
        return ", ".join(texts)
    return f"{', '.join(texts[:3])}, … ({len(ranks)})"


def balance(estimates: list[RankEstimate]) -> str:
    kept = [e.kept for e in estimates]
    mean = sum(kept) / len(kept)
    unit, scale = _unit(max(kept))
    return (
        f"kept: {max(kept) / scale:.3f} {unit} on the fullest rank, {mean / scale:.3f} on average "
        f"({100 * (max(kept) / mean - 1):.1f} % above), {min(kept) / scale:.3f} on the emptiest"
    )


if __name__ == "__main__":
    main()
