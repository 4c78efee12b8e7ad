"""How fast a loader is, and how fast decoding alone could be with as many processes."""

import multiprocessing
import time
from collections.abc import Callable, Iterator
from itertools import islice
from multiprocessing.sharedctypes import Synchronized
from typing import Any

import cv2
import numpy as np

from lipnext_scale.data import StreamLoader
from lipnext_scale.data.decode import BadSample, Scratch
from lipnext_scale.data.index import Record
from lipnext_scale.data.source import Source
from lipnext_scale.data.workers import start_worker
from lipnext_scale.errors import RunFailed, UserError

_HELD = 512  # encoded images that bare decoding goes through again and again


def pipeline_rate(loader: StreamLoader, seconds: float) -> tuple[float, dict[str, float]]:
    """Images/s that a loader hands out when nobody computes, and what its stages say."""
    batches: Iterator[Any] = iter(loader)
    first = next(batches)
    for _ in islice(batches, 4):  # the workers' first batches come all at once
        pass
    loader.stats.take()
    images, began = 0, time.perf_counter()
    while time.perf_counter() - began < seconds:
        images += len(next(batches).labels)
    rate = images / (time.perf_counter() - began)
    told = loader.stats.take()
    del batches, first
    return rate, told


def bare_rate(source: Source, processes: int, seconds: float) -> float:
    """Images/s of decoding, cropping and resizing from memory, in so many processes: the limit.

    As the loader does it, by way of memory that is used again into an array of a batch; but no
    reading, no chance, no order, nothing told to anybody.
    """
    count = min(_HELD, len(source.catalog))
    chosen = range(0, len(source.catalog), len(source.catalog) // count)
    held, options = decodable(source, chosen), source.options
    low, high = options.augment.resize

    def decode_one(number: int) -> None:
        encoded, record = held[number % len(held)]
        at_least = options.augment.resize[1]
        image = source.store.decode(encoded, record, options.channels, at_least, scratch)
        short_side = low + number % (high - low + 1) if at_least else options.image_size
        side = min(image.shape[:2]) * options.image_size // short_side
        cv2.resize(image[:side, :side], out.shape[1:3], dst=out[number % len(out)])

    shape = (options.batch_size, options.image_size, options.image_size, options.channels)
    out, scratch = np.zeros(shape, dtype=np.uint8), Scratch()
    return rate_in_processes(decode_one, processes, seconds)


def decodable(source: Source, samples: range) -> list[tuple[bytes, Record]]:
    """Those of the samples, encoded, that are not bad; there must be one."""
    held, reason = [], ""
    for sample in samples:
        try:
            encoded, record = source.store.read(sample)
            source.store.decode(encoded, record, source.options.channels)
            held.append((encoded, record))
        except BadSample as bad:
            reason = f"{source.catalog.key}: {source.store.name(sample)} {bad}"
    if not held:
        raise UserError(reason)
    return held


def rate_in_processes(work: Callable[[int], object], processes: int, seconds: float) -> float:
    """How often work(number) is done in a second by forked processes together."""
    context = multiprocessing.get_context("fork")
    barrier, done = context.Barrier(processes), context.Value("l", 0)
    workers = [
        context.Process(target=_work, args=(work, number, barrier, done, seconds), daemon=True)
        for number in range(processes)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if any(worker.exitcode for worker in workers):
        raise RunFailed("a measuring process has ended early")
    return done.value / seconds


def _work(
    work: Callable[[int], object],
    process: int,
    barrier: Any,
    done: "Synchronized[int]",
    seconds: float,
) -> None:
    start_worker(process)
    number = process * 100
    for _ in range(20):
        work(number)
        number += 1
    barrier.wait(timeout=60)  # a process that failed never comes
    end, images = time.perf_counter() + seconds, 0
    while time.perf_counter() < end:
        work(number)
        number += 1
        images += 1
    with done.get_lock():
        done.value += images


def class_entropy(labels: np.ndarray) -> float:
    """Of the classes of a batch, in bits."""
    shares = np.unique(labels, return_counts=True)[1] / len(labels)
    return float(-(shares * np.log2(shares)).sum())


def mixing(source: Source, batches: int = 200) -> tuple[float, float]:
    """(mean class entropy of the first batches of an epoch, that of batches drawn at random)."""
    labels = np.concatenate([shard.records["label"] for shard in source.catalog.shards])
    size, random = source.options.batch_size, np.random.default_rng(0)
    steps = range(min(batches, source.order.steps_per_epoch))
    found = [class_entropy(labels[source.order.ids(0, step)]) for step in steps]
    ideal = [class_entropy(labels[random.choice(len(labels), size, replace=False)]) for _ in steps]
    return float(np.mean(found)), float(np.mean(ideal))


def resume_seconds(make_loader: Callable[[], StreamLoader], step: int) -> tuple[float, float]:
    """(until a new loader is put to a step, until it hands out its first batch from there)."""
    began = time.perf_counter()
    loader = make_loader()
    state = loader.state_dict()
    state["step"] = step
    loader.load_state_dict(state)
    placed = time.perf_counter()
    next(iter(loader))
    return placed - began, time.perf_counter() - began
