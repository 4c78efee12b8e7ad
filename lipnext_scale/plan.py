"""Show how a configuration would be spread over processes, without any of them.

    python -m lipnext_scale.plan --config configs/imagenet_1b.yaml --ranks 64 --ranks-per-node 8

The model is built on the meta device and sharded over torch's fake process group, once as every
rank of a replica: what is printed follows from the shapes that FSDP made, and no weight is ever in
memory. With the rates that `bench gpu` has measured it also says how long a step's products take.
"""

import lipnext_scale.utils.passive  # noqa: F401

from types import SimpleNamespace
from typing import Any

from lipnext_scale.checks import size
from lipnext_scale.checks.gpu import Figures, read_rates
from lipnext_scale.config.recipe import Recipe, load_recipe
from lipnext_scale.distributed import Engine, build_engine
from lipnext_scale.distributed.estimate import RankEstimate, estimate
from lipnext_scale.distributed.processes import fake_group
from lipnext_scale.distributed.replicas import bank_sharings
from lipnext_scale.models import LipNeXt
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
    parser.add_argument("--rates", help="a file of `bench gpu`: print the time of products too")
    arguments = parser.parse_intermixed_args(argv)
    recipe = load_recipe(arguments.config, arguments.overrides)
    if recipe.parallel.engine == "deepspeed":
        right = "is not planned; plan 'fsdp', which is like ZeRO-3"
        raise ConfigError("parallel.engine", "deepspeed", right)
    rates = read_rates(arguments.rates) if arguments.rates else None
    if rates and recipe.optim.products == "fp32":
        right = "is not timed: its products depend on the gradients; --rates times 'auto'"
        raise ConfigError("optim.products", "fp32", right)
    if rates and recipe.model.layer != "manifold":
        raise ConfigError("model.layer", recipe.model.layer, "is not timed: --rates has 'manifold'")
    ranks = arguments.ranks
    recipe.require_batch_for(ranks)
    engine, estimates, stepped = plan(recipe, ranks, min(ranks, arguments.ranks_per_node))
    model, batch, parts = recipe.model, recipe.data.batch_size, recipe.parallel.accumulation
    numbers = f"{model.bank_parameters:,} orthogonal parameters"
    what = numbers if model.layer == "manifold" else model.layer
    print(f"LipNeXt L{model.depth}W{model.width}: {what}")
    print(f"{ranks} process(es): {engine}")
    print(f"batch of {batch}: {batch // ranks} image(s) a process, in {parts} part(s)\n")
    note = "kept: parameters, gradients and optimizer; activations come on top"
    print(_table(estimates, MEMORY, f"on each rank ({note})") + "\n")
    if any(values.sent for values in estimates):
        print(_table(estimates, TRAFFIC, "sent by each rank in a step"))
    else:
        print("nothing is sent")
    if rates:
        times = [product_times(recipe, ranks, blocks, rates) for blocks in stepped]
        phases = ("forward", "backward", "manifold", "all")
        title = f"products of a step, at the rates of {rates['device']}, width {rates['width']}"
        print("\n" + _table(times, phases, title, "{:.2f} ms".format))
        print("elementwise passes, collectives, the head, Lookahead and the loader come on top")


def plan(recipe: Recipe, ranks: int, per_node: int) -> tuple[str, list[RankEstimate], list[float]]:
    """The engine in effect, what every rank holds and sends, and how many blocks it steps."""
    described, shards, shard = "", 1, 0
    estimates: dict[int, RankEstimate] = {}
    blocks: dict[int, float] = {}
    while shard < shards:
        with fake_group(shard, ranks):
            engine = build_engine(recipe.parallel, "cpu", per_node)
            model, replicas = engine.place(recipe.model), engine.replicas()
            described, shards = engine.describe(), ranks // replicas
            for replica in range(replicas):  # its fellows, with other shares of the step
                rank = replica * shards + shard
                estimates[rank] = estimate(engine, model, recipe.optim, replica)
                blocks[rank] = _stepped(engine, model, estimates[rank], replica)
        shard += 1
    return described, [estimates[r] for r in range(ranks)], [blocks[r] for r in range(ranks)]


def _stepped(engine: Engine, model: LipNeXt, values: RankEstimate, replica: int) -> float:
    if not engine.shares_step:
        return values.matrices / 2
    shares = (s.share(replica) for s in bank_sharings(model, engine.replicas()).values())
    return sum(run.stop - run.start for runs in shares for run in runs)


def product_times(recipe: Recipe, ranks: int, blocks: float, rates: Figures) -> SimpleNamespace:
    """Milliseconds on a rank that steps so many blocks; rates: in TFLOPS, from `bench gpu`."""
    model, parallel = recipe.model, recipe.parallel
    tokens = recipe.data.batch_size // ranks * (model.image_size // model.patch_size) ** 2
    rate = rates[f"product_{'bf16_tokens' if parallel.precision == 'bf16' else 'fp32'}_tflops"]
    product = 2e-9 * tokens * model.width**2 * model.depth / rate  # every block's, with one matrix
    backward = (6 if parallel.recompute_activations else 4) * product
    # Of a block. bf16: XᵀG, A² and the tail, of two matrices; bf16x3: X·C. With M also its
    # gradient, R's, and W = M·Rᵀ.
    once, thrice = (8, 3) if recipe.optim.parametrisation == "product" else (6, 2)
    each = once / rates["product_bf16_to_fp32_tflops"] + thrice / rates["product_bf16x3_tflops"]
    manifold = 2e-9 * model.width**3 * blocks * each
    whole = 2 * product + backward + manifold
    return SimpleNamespace(forward=2 * product, backward=backward, manifold=manifold, all=whole)


def _table(of_ranks: list[Any], names: tuple[str, ...], title: str, show: Any = size) -> str:
    """A line for all ranks that look alike; columns that are zero everywhere are left out."""
    names = tuple(name for name in names if any(getattr(e, name) for e in of_ranks))
    alike: dict[tuple[str, ...], list[int]] = {}
    for rank, values in enumerate(of_ranks):
        cells = (
            f"{values.matrices:.2f}" if name == "matrices" else show(getattr(values, name))
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
