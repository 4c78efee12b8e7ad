"""`bench cpu`: how long this CPU takes for products and passes of different sizes.

What a step does between its products is measured by class, with the operators of the step itself.
All are measured in turn, again and again, and the shortest time of each counts: other processes may
work now and then. Under torchrun all ranks measure at the same time, as they work in a run.
"""

import os
import platform
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lipnext_scale.distributed.processes import Processes
from lipnext_scale.utils.cpu import keep_freed_memory

SECONDS = 40.0  # for all
WIDTHS = (16, 32, 64, 128, 256, 512, 1024)
ROWS = 2048
SMALL = WIDTHS.index(64)  # a product (64, 256, 64), which takes a call and little more
STACK = 4 << 20  # bytes, as the manifold step's chunks
SIZES = tuple(1 << shift for shift in (12, 16, 18, 20, 22, 24, 26))  # bytes of a tensor
SMALL_FLOPS = 2 * 64 * 256 * 64
Case = tuple[str, str, float, float, Callable[[], Any]]  # group, name, x, FLOPs or bytes, action
Figures = dict[str, Any]


def measure() -> tuple[Figures, Processes]:
    keep_freed_memory()
    processes = Processes("cpu", alone=True)
    cases = [*products(), *passes(), *collectives(processes.world_size)]
    found: Figures = {"device": cpu_name(), "torch": torch.__version__}
    found |= {"threads": torch.get_num_threads(), "ranks": processes.world_size}
    found |= {"products": {}, "passes": {}, "collectives": {}}
    for (group, name, x, amount, _), seconds in zip(cases, shortest(cases), strict=True):
        curve = found[group].setdefault(name, [])
        if group == "products":
            curve.append([x, amount / seconds])
        else:  # more bytes take no less
            curve.append([x, max([seconds, *(y for _, y in curve)])])
    small, rate = found["products"].pop("small")[0][1], found["products"]["tall"][SMALL][1]
    found["call"] = max(1e-7, SMALL_FLOPS / small - SMALL_FLOPS / rate)
    return found, processes


def cpu_name() -> str:
    """As Linux shows it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.split(": ")[1] for line in lines if line.startswith("model name"))
    except (OSError, StopIteration, IndexError):
        return platform.processor() or platform.machine()


def shortest(cases: list[Case]) -> list[float]:
    """Seconds of each action."""
    best = [float("inf")] * len(cases)
    end = time.perf_counter() + SECONDS
    while time.perf_counter() < end:
        for index, (*_, action) in enumerate(cases):
            action()
            for _ in range(3):
                began = time.perf_counter()
                action()
                best[index] = min(best[index], time.perf_counter() - began)
    return best


def products() -> Iterator[Case]:
    for d in WIDTHS:
        x, out, weight = torch.randn(ROWS, d), torch.empty(ROWS, d), torch.randn(d, d)
        stack = torch.randn(max(1, STACK // (4 * d * d)), d, d)
        flops = 2 * ROWS * d * d
        yield "products", "tall", d, flops, partial(torch.mm, x, weight.mT, out=out)
        yield "products", "inner", d, flops, partial(torch.mm, x.mT, x, out=weight.clone())
        flops = 2 * len(stack) * d**3
        yield "products", "stack", d, flops, partial(torch.bmm, stack, stack, out=stack.clone())


    a, b = torch.randn(64, 256), torch.randn(256, 64)
    yield "products", "small", 64, SMALL_FLOPS, partial(torch.mm, a, b, out=torch.empty(64, 64))


def passes() -> Iterator[Case]:
    """x: bytes read and written, as the ledger counts them."""
    most = SIZES[-1] // 4
    x, y, z, m = (torch.rand(most) for _ in range(4))
    counted, signs = torch.tensor(10.0), torch.ones(most, dtype=torch.int8)
    adam = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "weight_decay": 0.0, "eps": 1e-8}
    for size in SIZES:
        n = size // 4
        a, b, c = x[:n], y[:n], z[:n]

        def case(name: str, tensors: float, action: Any, *arguments: Any, **options: Any) -> Case:
            moved = size * tensors  # noqa: B023
            return "passes", name, moved, moved, partial(action, *arguments, **options)

        yield case("plain", 3, torch.add, a, b, out=c)
        side = min(256, int(n**0.5))
        square = a.view(-1, side, side)
        yield case("transposed", 3, torch.sub, square, square.mT, out=c.view(square.shape))
        yield case("reduction", 1, torch.sum, a.view(-1, side), dim=0)
        yield case("bytes", 2.25, a.mul_, signs[:n])
        yield case("norm", 1, torch._foreach_norm, [a], 2, torch.float64)
        fused = partial(torch._fused_adam_, [a], [b], [c], [m[:n]], [], [counted])
        yield case("adam", 8, fused, amsgrad=False, maximize=False, **adam)
        if size <= SIZES[-3]:
            channels = x[: 16 * n].view(-1, 4, 4, 256)[..., :16]
            yield case("strided", 2, torch.roll, channels, 1, 1)


def collectives(ranks: int) -> Iterator[Case]:
    """x: bytes that a rank sends."""
    for size in SIZES[::2] if ranks > 1 else ():
        whole, part = torch.zeros(size // 4), torch.zeros(size // 4 // ranks)
        sent = size * (ranks - 1) / ranks
        for name, factor, action in (
            ("all_gather", 1, partial(dist.all_gather_into_tensor, whole, part)),
            ("reduce_scatter", 1, partial(dist.reduce_scatter_tensor, part, whole)),
            ("all_reduce", 2, partial(dist.all_reduce, whole)),
        ):
            yield "collectives", name, factor * sent, factor * sent, action
