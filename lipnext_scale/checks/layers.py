"""`bench layers`: what a block of each family costs (docs/layers.md), in units of bare products.

A block has two mixers, so the unit is two products of tokens × width², one after the other: their
time, and the memory of their results. A block that did nothing else would take 3 of them forward
and backward, and 1 frozen. The unit is measured anew beside every layer, again and again, and the
median of the ratios counts: other work on the machine slows both.
"""

import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import accumulate, pairwise
from statistics import median
from typing import Any, get_args

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from lipnext_scale.models import LipNeXt, LipNeXtConfig, freeze
from lipnext_scale.models.layers import LayerName
from lipnext_scale.utils.cpu import keep_freed_memory

WIDTHS = [64, 128, 256, 512, 1024]
IMAGES, SIDE = 16, 16  # 4,096 tokens
ROUNDS, SECONDS = 5, 10.0  # of each width, at least
# training, memory: time and peak of a block forward and backward. frozen: time forward, stored.
COLUMNS = ("width", "layer", "training", "memory", "frozen", "unit_ms", "unit_mb")
Action = Callable[[], Any]


def measure(widths: list[int], device: torch.device) -> Iterator[list[Any]]:
    """The rows of the table, those of a width when it is measured."""
    keep_freed_memory()
    for width in widths:
        x = torch.randn(IMAGES, SIDE, SIDE, width, device=device, requires_grad=True)
        actions = {layer: passes(layer, x) for layer in get_args(LayerName)}
        unit_bytes = peak_bytes(actions["manifold"][0], device)
        peaks = {layer: peak_bytes(a[1], device) for layer, a in actions.items()}  # warms up
        seconds = interleaved(list(actions.values()), device)
        for (layer, peak), rounds in zip(peaks.items(), seconds, strict=True):
            unit = median(r[0] for r in rounds)
            training, frozen = (median(r[i] / r[0] for r in rounds) for i in (1, 2))
            figures = (training, peak / unit_bytes, frozen, 1e3 * unit, unit_bytes / 1e6)
            yield [width, layer, *(float(f"{figure:.4g}") for figure in figures)]


def passes(layer: LayerName, x: Tensor) -> tuple[Action, Action, Action]:
    """(two bare products, a block forward and backward, the same one frozen and forward)."""
    config = LipNeXtConfig(1, x.shape[-1], SIDE, patch_size=1, in_channels=1, layer=layer)
    model = LipNeXt(config, seed=0).to(x.device)
    (block,), (stored,) = model.block_groups(), freeze(model).block_groups()
    tokens, gradient = x.detach(), torch.randn_like(x)
    first, second = torch.randn(2, x.shape[-1], x.shape[-1], device=x.device)

    def bare() -> Any:
        mixed = tokens @ first.mT
        return mixed, mixed @ second.mT

    def training() -> Any:
        found = block(x)
        z, *norm = found if isinstance(found, tuple) else (found,)  # of lip_reg: with K
        return torch.autograd.grad([z, *norm], [x, *block.parameters()], [gradient, *norm])

    return bare, training, torch.inference_mode()(partial(stored, x))


def interleaved(actions: list[Any], device: torch.device) -> list[list[list[float]]]:
    """Of every row of actions their seconds, by round."""
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    seconds: list[list[list[float]]] = [[] for _ in actions]
    end = time.perf_counter() + SECONDS
    while len(seconds[-1]) < ROUNDS or time.perf_counter() < end:
        for found, row in zip(seconds, actions, strict=True):
            times = [time.perf_counter()]
            for action in row:
                action()
                wait()
                times.append(time.perf_counter())
            found.append([later - now for now, later in pairwise(times)])
    return seconds


def peak_bytes(action: Action, device: torch.device) -> int:
    """The most that an action has at a time, beside what was there before."""
    if device.type == "cpu":
        return allocated_by(action)[1]
    action()  # cuBLAS takes a workspace once
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    action()
    return torch.cuda.max_memory_allocated() - before


def allocated_by(region: Action) -> tuple[int, int, Any]:
    """(bytes of CPU tensors that a region left, the most it had at a time, its result).

    The allocator itself reports to the profiler, so views, temporaries and what C++ code keeps are
    all in it, each once. But it reports of this thread alone.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it writes a line when it starts, and ends
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = region()
    assert profiler.profiler is not None
    events = profiler.profiler.kineto_results.events()
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    totals = list(accumulate((change for _, change in changes), initial=0))
    return totals[-1], max(totals), result
