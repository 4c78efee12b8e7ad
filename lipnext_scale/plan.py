"""What a run will take, before it is paid for: memory, times, data, checkpoints, cost.

    python -m lipnext_scale.plan --config configs/imagenet_2b.yaml --nodes 2 --gpu h100

One rank's real step is walked at full size on devices and processes that are not there (planning/),
and its ledger is timed with the rates of planning/devices.yaml or of `bench`. docs/scaling.md has
the model.
"""

import lipnext_scale.utils.passive  # noqa: F401

import json
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lipnext_scale.checks import size
from lipnext_scale.config.recipe import Recipe, load_recipe
from lipnext_scale.observe.console import duration, training_flops_per_image
from lipnext_scale.planning.ledger import Row
from lipnext_scale.planning.prediction import (
    PAPER,
    WRITE_RATE,
    Prediction,
    count_images,
    is_papers,
    variants,
    warnings,
)
from lipnext_scale.planning.scaling import draw, scale
from lipnext_scale.planning.times import PARTS, Device, read_device, seconds
from lipnext_scale.planning.walk import IMAGENET, Walk, Walked, walk_all
from lipnext_scale.utils.errors import ArgumentParser, UserError, command, positive

WHAT = ("step", "lookahead", "retraction", "checkpoint")


@command
def main(argv: list[str] | None = None) -> None:
    parser = ArgumentParser(prog="lipnext_scale.plan", description=__doc__.split("\n")[0])
    parser.add_configuration(required=True)
    parser.add_argument("--nodes", type=positive, default=1, help="nodes (1)")
    parser.add_argument("--gpus-per-node", type=positive, default=8, help="processes a node (8)")
    parser.add_argument("--gpu", default="h100", help="h100, a100, b200, rtx4090 or cpu (h100)")
    parser.add_argument("--rates", help="a file of `bench gpu` or `bench cpu`: rates measured here")
    parser.add_argument("--images", type=positive, help="of an epoch, if data.train is not here")
    parser.add_argument("--images-per-core", type=positive, help="that `bench data` has measured")
    parser.add_argument("--price", type=float, default=0.0, help="of a GPU for an hour")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--compare", action="store_true", help="a table of other layouts")
    parser.add_argument("--scaling", type=Path, metavar="PNG", help="draw 1 to 1,024 GPUs")
    parser.add_argument("--operators", metavar="PHASE", help="list a phase: forward, manifold, …")
    arguments = parser.parse_intermixed_args(argv)
    for option, path in (("json", arguments.json), ("scaling", arguments.scaling)):
        if path and not path.parent.is_dir():
            raise UserError(f"--{option} = '{path}': {path.parent} must be a directory")
    device = read_device(arguments.gpu, arguments.rates)
    recipe = load_recipe(arguments.config, arguments.overrides)
    walk = Walk(
        arguments.config,
        arguments.overrides,
        arguments.nodes,
        arguments.gpus_per_node,
        "cpu" if arguments.gpu == "cpu" else "cuda",
        gpu=arguments.gpu,
        what=WHAT,
    )
    recipe.require_batch_for(walk.ranks)
    images = arguments.images or count_images(recipe)
    known = {"images": images or IMAGENET, "images_per_core": arguments.images_per_core or 0.0}
    if arguments.compare:
        compare(walk, recipe, device, known)
    elif arguments.scaling:
        points = scale(walk, recipe, device, known)
        draw(points, arguments.scaling)
        print(f"{arguments.scaling} and {arguments.scaling.with_suffix('.csv')}")
    else:
        show(walk, device, known, arguments)


# --------------------------------------------------------------------------------------------------
# The page of one plan.


def show(walk: Walk, device: Device, known: dict[str, Any], arguments: Namespace) -> None:
    alone = [s for s in walk.settings if not s.startswith("parallel.")]
    whole = ["parallel.engine=single", "parallel.weight_layout=bank", "parallel.shard_size=0"]
    one = replace(walk, settings=alone + whole, nodes=1, per_node=1, what=())
    walked, of_one = walk_all([walk, one])  # one process has all of a checkpoint
    if isinstance(walked, UserError):
        raise walked
    assert isinstance(of_one, Walked), of_one
    found = Prediction(walk, walked, device, **known)
    if arguments.operators:
        operators(walked.rows["step"], arguments.operators, device)
        return
    print(page(found, of_one.checkpoint, arguments.price))
    if arguments.json:
        figures = as_figures(found, of_one.checkpoint)
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


def page(found: Prediction, checkpoint: int, price: float) -> str:
    recipe, walk, walked, device = found.recipe, found.walk, found.walked, found.device
    model, batch = recipe.model, recipe.data.batch_size
    kinds, phase, place = found.peak
    head = [
        f"LipNeXt L{model.depth}W{model.width} ({model.layer}): "
        f"{model.bank_parameters:,} parameters of matrices",
        f"{walk.nodes} node(s) of {walk.per_node} {device.name}: {walked.engine}; batch {batch}, "
        f"{batch // walk.ranks} image(s) each, in {recipe.parallel.accumulation} part(s)",
        "a prediction: rank 0's step was walked without a device",
    ]
    memory = sorted(kinds.items(), key=lambda kind: -kind[1])
    shown = [(name, size(held)) for name, held in memory if held > 1e5]
    shown += [("not in tensors", size(device.overhead)), ("all", size(found.memory))]
    shown += [("there is", size(found.room))]
    title = (
        f"memory of a {'process' if walk.device == 'cpu' else 'GPU'}, at most in {phase} ({place})"
    )
    sections = [
        "\n".join(head),
        _table(title, shown),
        _table("a step: milliseconds of the main stream by cause, and its work", _phases(found)),
        _table("collectives of a step, as rank 0 sends", _collectives(found)),
        _table("what follows", list(_figures(found, checkpoint, price))),
        _table("assumed", list(_assumptions(found))),
    ]
    if lines := warnings(found):
        sections.append("\n  ".join(["look at", *lines]))
    return "\n\n".join(sections)


def _phases(found: Prediction) -> list[tuple[str, ...]]:
    """Rows of an ordinary step; times of the mean one."""
    times, rows = found.times, found.walked.rows["step"]
    columns = ("ms", *PARTS, "TFLOP", "GB", "launches", "waits")
    table: list[tuple[str, ...]] = [("phase", *columns)]
    for phase in [*times.parts, "all"]:
        here = [row for row in rows if phase in (row.phase, "all")]
        work = [row for row in here if row.kind in ("product", "kernel")]
        parts = times.parts.get(phase) or {part: times.of(part) for part in PARTS}
        table.append(
            (
                phase,
                *(f"{1e3 * x:.2f}" for x in (sum(parts.values()), *parts.values())),
                f"{sum(row.flops for row in work) / 1e12:.3g}",
                f"{sum(row.bytes for row in work) / 1e9:.3g}",
                str(len(work)),
                str(sum(row.kind == "wait" for row in here)),
            )
        )
    return table


def _collectives(found: Prediction) -> list[tuple[str, ...]]:
    count: Counter[tuple[str, ...]] = Counter()
    sent: Counter[tuple[str, ...]] = Counter()
    for row in found.walked.rows["step"]:
        if row.kind == "collective":
            axis = "across nodes" if row.across else "in the node"
            key = (row.phase, row.name, str(row.ranks), axis)
            count[key], sent[key] = count[key] + 1, sent[key] + row.bytes
    table: list[tuple[str, ...]] = [("phase", "", "ranks", "axis", "calls", "bytes")]
    table += [(*key, str(count[key]), size(sent[key])) for key in count]
    return table if count else [("none", "")]


def _figures(found: Prediction, checkpoint: int, price: float) -> Iterator[tuple[str, str]]:
    recipe, walk, times = found.recipe, found.walk, found.times
    copied, written = found.checkpoint(checkpoint)
    flops: Counter[str] = Counter()
    for row in found.walked.rows["step"]:
        flops[row.precision] += row.flops
    yield "TFLOP of a step", ", ".join(f"{v / 1e12:.3g} {k}" for k, v in flops.items() if v)
    sending = f"collectives take {1e3 * sum(times.sending.values()):.1f}"
    yield (
        "step",
        f"{1e3 * times.step:.1f} ms; {sending}, of which {1e3 * times.exposed:.1f} exposed",
    )
    yield "images/s", f"{found.images_per_second:,.0f}"
    yield "MFU", f"{found.mfu:.1%} of the data sheet's {recipe.parallel.precision}"
    minutes = f"{found.epoch / 60:.2f} ({found.steps_per_epoch:,} steps; retraction "
    yield "minutes per epoch", minutes + f"{1e3 * found.retraction:.0f} ms)"
    if is_papers(recipe) and found.device.name == "h100":
        paper = PAPER[recipe.model.width]
        rate = IMAGENET / (60 * paper) * training_flops_per_image(recipe.model)
        share = rate / (8 * found.device.peak["bf16"])
        ours = found.epoch / 60 * walk.ranks / 8
        yield (
            "of 8 GPUs",
            f"{ours:.1f} minutes predicted; the paper reports {paper} (MFU {share:.0%})",
        )
    needed = f"{found.images_per_second / walk.nodes:,.0f} images/s a node: {found.cores:.1f} cores"
    there = f"data.workers={recipe.data.workers} × {walk.per_node}"
    yield "data", f"{needed} at {found.loader_rate:,.0f} images/s; {there}"
    waits = copied if recipe.run.async_checkpoint else copied + written
    moved = f"{size(checkpoint)}: {copied:.2f} s to the host, {written:.1f} s to disks"
    yield "checkpoint", f"{moved}; the run waits {waits:.2f} s"
    run = found.whole_run(checkpoint)
    yield "all epochs", f"{duration(run)} for {recipe.optim.epochs}, without evaluations"
    hours = run / 3600 * walk.ranks
    yield (
        "GPU hours",
        f"{hours:,.0f}" + (f", at {price:g} an hour {hours * price:,.0f}" if price else ""),
    )


def _assumptions(found: Prediction) -> Iterator[tuple[str, str]]:
    device, precision = found.device, found.recipe.parallel.precision
    rates = f"{device.flops[precision] / 1e12:,.4g} TFLOPS {precision}, "
    yield "rates", f"{rates}{device.bandwidth / 1e12:.3g} TB/s of memory ({device.source})"
    links = f"{device.link / 1e9:g} GB/s in the node, {device.network / 1e9:g} a GPU between nodes"
    yield "collectives", f"{links}; kernels beside them lose {device.beside:.0%}"
    yield "host", f"{1e6 * device.launch:g} µs a launch; loader and disks keep up"
    yield "epoch", f"{found.images:,} images"
    yield "disks", f"{WRITE_RATE / 1e9:g} GB/s a node"


def as_figures(found: Prediction, checkpoint: int) -> dict[str, Any]:
    """milliseconds: by phase, as `bench gpu --predicted` reads them."""
    times, (kinds, phase, place) = found.times, found.peak
    return {
        "engine": found.walked.engine,
        "device": found.device.name,
        "milliseconds": {p: 1e3 * sum(parts.values()) for p, parts in times.parts.items()},
        "causes_ms": {part: 1e3 * times.of(part) for part in PARTS},
        "step_ms": 1e3 * times.step,
        "minutes_per_epoch": found.epoch / 60,
        "images_per_second": found.images_per_second,
        "mfu": found.mfu,
        "memory": kinds | {"not in tensors": found.device.overhead},
        "memory_peak": {"bytes": found.memory, "phase": phase, "place": place},
        "fits": found.fits,
        "cores_per_node": found.cores,
        "checkpoint_bytes": checkpoint,
        "run_seconds": found.whole_run(checkpoint),
        "warnings": warnings(found),
    }


def operators(rows: list[Row], phase: str, device: Device) -> None:
    """Those of a phase by name and place, the dearest first."""
    found: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if row.phase == phase and row.kind in ("product", "kernel", "copy"):
            found.setdefault((row.name, row.place), []).append(row)
    if not found:
        phases = ", ".join(dict.fromkeys(row.phase for row in rows))
        raise UserError(f"--operators = {phase!r}: must be one of {phases}")
    spent = {key: sum(seconds(row, device)[0] for row in of_key) for key, of_key in found.items()}
    table = [("operator", "place", "calls", "ms", "GFLOP", "MB")]
    for key in sorted(found, key=spent.__getitem__, reverse=True):
        flops, moved = (sum(getattr(r, what) for r in found[key]) for what in ("flops", "bytes"))
        calls, ms = str(len(found[key])), f"{1e3 * spent[key]:.3f}"
        table.append((*key, calls, ms, f"{flops / 1e9:.1f}", f"{moved / 1e6:.1f}"))
    print(_table(f"{phase}, an ordinary step", table))


# --------------------------------------------------------------------------------------------------
# Many plans.


def compare(walk: Walk, recipe: Recipe, device: Device, known: dict[str, Any]) -> None:
    """The quickest that fits is marked, of those with these GPUs and this batch."""
    walks = list(variants(walk, recipe).items())
    table = [("", "variant", "GPUs", "min/epoch", "MFU", "exposed", "memory", "")]
    alike: dict[int, float] = {}
    for (name, one), walked in zip(walks, walk_all(w for _, w in walks), strict=True):
        if isinstance(walked, UserError):
            why = f"refused: {walked}"[:110]
            table.append(("", name, str(one.ranks), "-", "-", "-", "-", why))
            continue
        found = Prediction(one, walked, device, **known)
        if found.fits and one.ranks == walk.ranks:
            if found.recipe.data.batch_size == recipe.data.batch_size:
                alike[len(table)] = found.epoch
        why = "" if found.fits else f"memory full: there is {size(found.room)}"
        exposed = f"{found.times.exposed / found.times.step:.0%}"
        figures = (f"{found.epoch / 60:.2f}", f"{found.mfu:.1%}", exposed, size(found.memory))
        table.append(("", name, str(one.ranks), *figures, why))
    if alike:
        best = min(alike, key=alike.__getitem__)
        table[best] = ("*", *table[best][1:])
    print(_table(f"{walk.config} on {device.name}, predicted; * the quickest as given", table))
    print("\na precision, parametrisation or batch size is another training, not only another pace")


def _table(title: str, rows: Sequence[tuple[str, ...]]) -> str:
    """Columns of numbers to the right."""
    columns = []
    for number, column in enumerate(zip(*rows, strict=True)):
        width = max(map(len, column))
        numbers = (
            len(rows[0]) > 2 and number and all(c[:1].isdigit() or c == "-" for c in column[1:])
        )
        columns.append([cell.rjust(width) if numbers else cell.ljust(width) for cell in column])
    lines = ("  ".join(cells).rstrip() for cells in zip(*columns, strict=True))
    return "\n  ".join([title, *lines])


if __name__ == "__main__":
    main()
