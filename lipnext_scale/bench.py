"""Measure how fast this machine feeds a run and takes a step, and what layers cost.

    python -m lipnext_scale.bench data --config configs/imagenet_1b.yaml [section.key=value ...]
    python -m lipnext_scale.bench gpu --config configs/imagenet_1b.yaml --ranks 8 --out gpu.json
    python -m lipnext_scale.bench cpu --out cpu.json
    python -m lipnext_scale.bench layers [--widths 64,1024] --out layers.csv

data: opens the run's data and hands out batches of one rank without training on them: images/s in
all and of every stage, against decoding alone with as many processes.
gpu, cpu, layers: see checks/gpu.py, cpu.py, layers.py; the first two also under torchrun.
"""

import lipnext_scale.utils.passive  # noqa: F401

import csv
import json
import multiprocessing
import os
import time
from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch

from lipnext_scale.checks import cpu, gpu, layers
from lipnext_scale.config.recipe import Recipe, load_recipe
from lipnext_scale.data import DataSets, StreamLoader
from lipnext_scale.data.augment import augment, draw_params
from lipnext_scale.data.decode import BadSample
from lipnext_scale.data.index import Record
from lipnext_scale.data.loader import start_worker
from lipnext_scale.data.source import Source
from lipnext_scale.utils.errors import ArgumentParser, RunFailed, UserError, command, positive

_HELD = 512  # encoded images that bare decoding goes through again and again


@command
def main(argv: list[str] | None = None) -> None:
    parser = ArgumentParser(prog="lipnext_scale.bench", description=__doc__.split("\n")[0])
    parser.add_argument("what", nargs="?", choices=["data", "gpu", "cpu", "layers"])
    parser.add_configuration()
    parser.add_argument("--seconds", type=float, default=10.0, help="data: each measurement (10)")
    parser.add_argument("--ranks", type=positive, default=1, help="measure one rank of so many")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="gpu, layers")
    parser.add_argument("--out", help="the file of rates (gpu.json, cpu.json, layers.csv)")
    parser.add_argument("--predicted", help="gpu: times to compare with, of `plan --json`")
    parser.add_argument("--widths", type=lambda w: [*map(positive, w.split(","))], help="layers")
    arguments = parser.parse_intermixed_args(argv)
    if arguments.what is None or arguments.what in ("data", "gpu") and arguments.config is None:
        parser.error("give `cpu` or `layers`, or `data` or `gpu` and --config")
    kind = "csv" if arguments.what == "layers" else "json"
    out = Path(arguments.out or f"{arguments.what}.{kind}")
    if not out.parent.is_dir():
        parser.error(f"argument --out: {out}: there is no folder {out.parent}")
    if arguments.what == "layers":
        return measure_layers(arguments.widths or layers.WIDTHS, arguments.device, out)
    if arguments.what == "cpu":
        return measure_cpu(out)
    if arguments.seconds <= 0:
        parser.error(f"argument --seconds: {arguments.seconds:g} must be above 0")
    recipe = load_recipe(arguments.config, arguments.overrides)
    recipe.require_batch_for(arguments.ranks)
    if arguments.what == "data":
        measure_data(recipe, arguments.ranks, arguments.seconds)
    else:
        expected = gpu.predicted(arguments.predicted) if arguments.predicted else {}
        measure_gpu(recipe, arguments.ranks, arguments.device, out, expected)


def measure_gpu(
    recipe: Recipe, ranks: int, device: str, out: Path, expected: dict[str, Any]
) -> None:
    figures, engine = gpu.measure(recipe, ranks, device)
    if engine.processes.rank == 0:
        print_table(figures | expected)
        out.write_text(json.dumps(figures | expected, indent=1) + "\n", encoding="utf-8")
    engine.processes.close()
    wrong = [name for name, value in figures.items() if value is False]
    if wrong:
        raise RunFailed(f"{', '.join(wrong)}: no, these kernels differ from their references")


def measure_cpu(out: Path) -> None:
    rates, processes = cpu.measure()
    if processes.rank == 0:
        print_table({k: v for k, v in rates.items() if not isinstance(v, dict)} | {"rates": out})
        out.write_text(json.dumps(rates, indent=1) + "\n", encoding="utf-8")
    processes.close()


def measure_layers(widths: list[int], device: str, out: Path) -> None:
    here = torch.device(device if torch.cuda.is_available() else "cpu")
    rows: list[Any] = []
    for row in chain([layers.COLUMNS], layers.measure(widths, here)):
        print("".join(f"  {value:>9}" for value in row), flush=True)
        rows.append(row)
    with out.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows(rows)


def measure_data(recipe: Recipe, ranks: int, seconds: float) -> None:
    model, data = recipe.model, recipe.data
    sets = DataSets(data, model.image_size, model.in_channels, model.num_classes)
    loader, processes = sets.training_loader(recipe.run.seed, 0, ranks), max(1, data.workers)
    source = loader.sources[0]
    rate, bare = pipeline_rate(loader, seconds), bare_rate(source, processes, seconds)
    rows = {
        "samples": f"{len(source.catalog):,} in {len(source.catalog.shards)} shards",
        "batch": f"{data.batch_size}, of it here {loader.share}",
        f"images/s, {data.workers} workers": f"{rate:.0f}",
        f"decoding alone, {processes} process(es)": f"{bare:.0f}",
        "share of that": f"{rate / bare:.2f}",
    }
    for stage, per_second in stage_rates(source).items():
        rows[f"{stage}, images/s of one process"] = f"{per_second:.0f}"
    print_table(rows)


def print_table(rows: dict[str, Any]) -> None:
    width = max(len(name) for name in rows)
    print("\n".join(f"  {name:<{width}}  {value}" for name, value in rows.items()))


def pipeline_rate(loader: StreamLoader, seconds: float) -> float:
    """Images/s that a loader hands out when nothing else computes."""
    batches: Iterator[Any] = iter(loader)
    for _ in islice(batches, 5):  # the workers' first batches come all at once
        pass
    images, began = 0, time.perf_counter()
    while time.perf_counter() - began < seconds:
        images += len(next(batches).labels)
    return images / (time.perf_counter() - began)


def stage_rates(source: Source) -> dict[str, float]:
    """Images/s of one process that only reads, decodes or augments."""
    held, options = _decodable(source), source.options
    drawn = draw_params(options.augment, options.seed, 0, np.arange(len(held)))
    out = np.empty((options.image_size, options.image_size, options.channels), dtype=np.uint8)
    spent = np.zeros(3)
    for params, (sample, encoded, record) in zip(drawn, held, strict=True):
        began = time.perf_counter()
        source.store.read(sample)
        read = time.perf_counter()
        image = source.decode(encoded, record)
        decoded = time.perf_counter()
        augment(image, options.augment, params, out)
        spent += (read - began, decoded - read, time.perf_counter() - decoded)
    return dict(zip(("read", "decode", "augment"), len(held) / spent, strict=True))


def bare_rate(source: Source, processes: int, seconds: float) -> float:
    """Images/s of decoding, cropping and resizing from memory, in so many processes: the limit.

    As the loader does it, into an array of a batch; but no reading, no random numbers, no order,
    nothing sent.
    """
    options, held = source.options, _decodable(source)
    low, high = options.augment.resize
    shape = (options.batch_size, options.image_size, options.image_size, options.channels)
    out = np.zeros(shape, dtype=np.uint8)

    def decode_one(number: int) -> None:
        _, encoded, record = held[number % len(held)]
        image = source.decode(encoded, record)
        short_side = low + number % (high - low + 1) if high else options.image_size
        side = min(image.shape[:2]) * options.image_size // short_side
        cv2.resize(image[:side, :side], out.shape[1:3], dst=out[number % len(out)])

    context = multiprocessing.get_context("fork")
    barrier, done = context.Barrier(processes), context.Value("l", 0)

    def measure(process: int) -> None:
        start_worker(os.getppid(), process)
        number = process * 100
        for warm_up in range(20):
            decode_one(number + warm_up)
        barrier.wait(timeout=60)  # a process that failed never comes
        end, first = time.perf_counter() + seconds, number
        while time.perf_counter() < end:
            number += 1
            decode_one(number)
        with done.get_lock():
            done.value += number - first

    workers = [context.Process(target=measure, args=(i,), daemon=True) for i in range(processes)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if any(worker.exitcode for worker in workers):
        raise RunFailed("a measuring process has ended early")
    return done.value / seconds


def _decodable(source: Source) -> list[tuple[int, bytes, Record]]:
    """Some samples throughout the set with their content, without bad ones; there must be one."""
    held, reason, count = [], "", len(source.catalog)
    for sample in range(0, count, count // min(_HELD, count)):
        try:
            encoded, record = source.store.read(sample)
            source.decode(encoded, record)
            held.append((sample, encoded, record))
        except BadSample as bad:
            reason = f"{source.catalog.key}: {source.store.name(sample)} {bad}"
    if not held:
        raise UserError(reason)
    return held


if __name__ == "__main__":
    main()
