"""Measure how fast this machine feeds a run.

    python -m lipnext_scale.bench data --config configs/imagenet_1b.yaml [section.key=value ...]

Opens the run's data and hands out batches of one rank without training on them: images/s in all
and of every stage, against decoding alone with as many processes, and how well batches are mixed.
"""

import time

from lipnext_scale.bench.loading import bare_rate, mixing, pipeline_rate, resume_seconds
from lipnext_scale.data import DataSets, StreamLoader
from lipnext_scale.errors import ArgumentParser, UserError, command
from lipnext_scale.recipe import Recipe, load_recipe

LATE_STEP = 100_000


@command
def main(argv: list[str] | None = None) -> None:
    parser = ArgumentParser(prog="lipnext_scale.bench", description=__doc__.split("\n")[0])
    parser.add_argument("what", choices=["data"], help="what is measured")
    parser.add_argument("--config", required=True, help="YAML file, such as configs/digits.yaml")
    parser.add_argument("--seconds", type=float, default=10.0, help="for each measurement (10)")
    parser.add_argument("--ranks", type=int, default=1, help="measure the share of one of so many")
    parser.add_argument(
        "overrides", nargs="*", metavar="section.key=value", help="set over the file"
    )
    arguments = parser.parse_intermixed_args(argv)
    if arguments.seconds <= 0 or arguments.ranks < 1:
        raise UserError("--seconds and --ranks must be positive")
    recipe = load_recipe(arguments.config, arguments.overrides)
    recipe.require_batch_for(arguments.ranks)
    measure_data(recipe, arguments.ranks, arguments.seconds)


def measure_data(recipe: Recipe, ranks: int, seconds: float) -> None:
    began = time.perf_counter()
    model, data = recipe.model, recipe.data
    sets = DataSets(data, model.image_size, model.in_channels, model.num_classes)
    opened = time.perf_counter() - began

    def make_loader() -> StreamLoader:
        return sets.training_loader(recipe.run.seed, 0, ranks)

    loader = make_loader()
    processes = max(1, data.workers)
    rate, told = pipeline_rate(loader, seconds)
    source = loader.sources[0]
    bare = bare_rate(source, processes, seconds)
    found, ideal = mixing(source)
    placed, handed_out = resume_seconds(make_loader, LATE_STEP)
    rows = [("samples", f"{len(source.catalog):,} in {len(source.catalog.shards)} shards")]
    rows += [(f"opened in {opened:.2f} s, batch", f"{data.batch_size}, of it here {loader.share}")]
    rows += [(f"images/s, {data.workers} workers", f"{rate:.0f}")]
    rows += [(f"decoding alone, {processes} process(es)", f"{bare:.0f}")]
    rows += [("share of that", f"{rate / bare:.2f}")]
    for stage in ("read", "decode", "augment"):
        per_second = told.get(f"data/{stage}_images_per_second")
        rows += [(f"{stage}, images/s of one process", f"{per_second:.0f}" if per_second else "-")]
    rows += [("batches ready when asked for", f"{told['data/ready_batches']:.1f}")]
    rows += [("class entropy of a batch", f"{found:.3f} bits; at random {ideal:.3f}")]
    rows += [(f"put to step {LATE_STEP:,}", f"{placed:.3f} s; first batch {handed_out:.3f} s")]
    width = max(len(name) for name, _ in rows)
    print("\n".join(f"  {name:<{width}}  {value}" for name, value in rows))


if __name__ == "__main__":
    main()
