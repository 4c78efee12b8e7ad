"""`bench cpu`: how long this CPU takes for products and passes, by size.

What a step does between its products is measured by class, with operators of the step itself. All
are measured in turn, again and again, and the lower quartile of each counts: alone, an operator
wakes threads and meets interrupts that a running step mostly does not. Products with warm caches,
for what they read has just been written; passes half with cold ones, for they also read what was
kept, and write what is new. Under torchrun all ranks measure at the same time, as in a run.
"""

import platform
import re
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lipnext_scale.distributed import replicas
from lipnext_scale.distributed.processes import Processes
from lipnext_scale.losses import class_distances, emma_loss
from lipnext_scale.planning.ledger import Ledger
from lipnext_scale.utils.cpu import keep_freed_memory
from lipnext_scale.utils.products import product

SECONDS = 40.0  # for all
WIDTHS = (16, 32, 64, 128, 256, 512, 1024)
ROWS = 2048
STACK = 4 << 20  # bytes, as the chunks of the manifold step
SIZES = tuple(1 << shift for shift in (12, 16, 18, 20, 22, 24, 26))  # bytes of a tensor
CACHES = 1 << 26  # bytes that leave nothing else in them
Case = tuple[str, str, float, float, Callable[[], Any]]  # group, name, x, FLOPs, action
Times = dict[int, tuple[list[float], list[float]]]  # of each case, with cold and warm caches
Clock = Callable[[], float]
Figures = dict[str, Any]


def measure() -> tuple[Figures, Processes]:
    """What `planning.cpu.read_rates` reads."""
    keep_freed_memory()
    processes = Processes("cpu", alone=True)
    cases, end = all_cases(processes.world_size), time.perf_counter() + SECONDS
    times: Times = {}
    while not times or processes.sum(torch.tensor(time.perf_counter() < end)) > 0:
        time_once(cases, times)
    found = {"device": cpu_name(), "torch": torch.__version__, "ranks": processes.world_size}
    return found | {"threads": torch.get_num_threads()} | figures(cases, times), processes


def all_cases(ranks: int = 1) -> list[Case]:
    return [*products(), *passes(), *collectives(ranks), loss()]


def figures(cases: list[Case], times: Times) -> Figures:
    found: Figures = {"products": {}, "passes": {}, "collectives": {}, "host": {}}
    for index, (group, name, x, flops, _) in enumerate(cases):
        cold, warm = (sorted(found)[len(found) // 4] for found in times[index])
        seconds = warm if group == "products" else (cold + warm) / 2
        y = flops / seconds if group == "products" else seconds
        found[group].setdefault(name, []).append([x, float(f"{y:.4g}")])
    for curve in (*found["passes"].values(), *found["collectives"].values()):
        for (_, most), point in pairwise(reversed(curve)):
            point[1] = min(point[1], most)  # fewer bytes take no more
    ((count, seconds),), ((_, call),) = found["host"]["loss"], found["host"]["call"]
    return found | {"host": seconds / count, "call": call}


def cpu_name() -> str:
    """As Linux shows it."""
    info = Path("/proc/cpuinfo")
    found = re.search("model name.*: (.*)", info.read_text("utf-8")) if info.exists() else None
    return found[1] if found else platform.machine()


def time_once(cases: list[Case], times: Times, clock: Clock = time.perf_counter) -> None:
    """Every action with cold and with warm caches."""
    other = torch.zeros(CACHES // 4)
    for index, (*_, action) in enumerate(cases):
        other.add_(1)
        for found in times.setdefault(index, ([], [])):
            began = clock()
            action()
            found.append(clock() - began)


def products() -> Iterator[Case]:
    """x: the smallest dimension."""
    for d in WIDTHS:
        rows, weight = torch.randn(ROWS, d), torch.randn(d, d)
        stack = torch.randn(max(1, STACK // (4 * d * d)), d, d)
        flops = 2 * ROWS * d * d
        yield "products", "tall", d, flops, partial(product, rows, weight)
        columns = rows.mT.contiguous()  # a step's copies of that kind are rows of its ledger
        yield "products", "inner", d, flops, partial(product, columns, rows.mT)
        flops = 2 * len(stack) * d**3
        yield "products", "stack", d, flops, partial(torch.bmm, stack, stack, out=stack.clone())
    small = torch.randn(64, 64)  # little more than a call, with the threads' start
    yield "host", "call", 1, 0.0, partial(product, small, small)


def passes() -> Iterator[Case]:
    """x: bytes read and written, as the ledger counts them."""
    most = SIZES[-1] // 4
    x, y, z, signs = (*(torch.rand(most) for _ in range(3)), torch.ones(most, dtype=torch.int8))
    for size in SIZES:
        a, b, c = x[: size // 4], y[: size // 4], z[: size // 4]
        side = min(256, int(len(a) ** 0.5))
        square, tokens = a.view(-1, side, side), a.view(-1, 8, 8, min(256, len(a) // 64))
        shifted = x[: 4 * size].view(-1, 4, 4, 256)[..., :16]  # some of the channels
        for name, moved, action in (
            ("plain", 3, partial(torch.add, a, b, out=c)),
            ("transposed", 3, partial(torch.sub, square, square.mT, out=c.view(square.shape))),
            ("strided", 2, partial(torch.roll, shifted, 1, 1)),
            ("reduction", 1, partial(torch.sum, a.view(-1, side), dim=0)),
            ("pool", 1, partial(torch.linalg.vector_norm, tokens, dim=(1, 2))),
            ("bytes", 2.25, partial(a.mul_, signs[: len(a)])),
        ):
            if name != "strided" or 16 * size <= SIZES[-1]:
                yield "passes", name, moved * size, 0.0, action


def loss() -> Case:
    """Operators on few numbers, forward and backward: they take the host's time. x: how many."""
    weight, logits = (torch.randn(10, 10, requires_grad=True) for _ in range(2))
    labels = torch.arange(10)

    def both_ways() -> None:
        emma_loss(logits, labels, class_distances(weight), 0.5).backward()

    with Ledger("cpu", 1) as ledger:
        both_ways()
    return "host", "loss", len(ledger.rows), 0.0, both_ways


def collectives(ranks: int) -> Iterator[Case]:
    """x: bytes that a rank sends."""
    for size in SIZES[::2] if ranks > 1 else ():
        whole, part = torch.zeros(size // 4), torch.zeros(size // 4 // ranks)
        sent = size * (ranks - 1) / ranks
        for name, factor, action in (
            ("all_gather", 1, partial(replicas._all_gather, whole, part)),
            ("reduce_scatter", 1, partial(replicas._reduce_scatter, part, whole)),
            ("all_reduce", 2, partial(dist.all_reduce, whole)),
        ):
            yield "collectives", name, factor * sent, 0.0, action
