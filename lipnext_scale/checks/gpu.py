"""`bench gpu`: rates of products, kernels and copies on a GPU, and the times of a step.

The names of figures end in their unit. Kernels are also compared with their references, which are
the same operators on a CPU. With `--device cpu` all of it runs there, to try the code.
"""

import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from lipnext_scale.checks.environment import ask_driver
from lipnext_scale.config.recipe import Recipe
from lipnext_scale.data import to_unit_range
from lipnext_scale.distributed import Engine, build_engine, is_out_of_memory
from lipnext_scale.distributed.engine import DTYPES
from lipnext_scale.losses import class_distances, compute_loss
from lipnext_scale.manifold import kernels as step_kernels
from lipnext_scale.manifold import skew, tensor_core
from lipnext_scale.models import kernels as block_kernels
from lipnext_scale.models.blocks import shift_width
from lipnext_scale.utils.errors import UserError

Figures = dict[str, Any]
STEPS = 6  # one of them is a Lookahead step
COPIED = {"cuda": 1 << 29, "cpu": 1 << 22}  # bytes


def measure(recipe: Recipe, ranks: int, device: str) -> tuple[Figures, Engine]:
    """ranks: of which this is one, if no launcher has started more."""
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("torch sees no GPU here; --device cpu tries the code without one")
    engine = build_engine(recipe.parallel, device)
    here, model, parts = engine.processes.device, recipe.model, recipe.parallel.accumulation
    ranks = max(ranks, engine.processes.world_size)
    recipe.require_batch_for(ranks)
    share, side = recipe.data.batch_size // ranks, model.image_size // model.patch_size
    shape = (share // parts, side, side, model.width)
    figures = {**versions(here), "engine": engine.describe(), "width": model.width, "images": share}
    figures |= copy_rates(here) | product_rates(here, model.width, share // parts * side**2)
    figures |= kernel_rates(recipe, here, shape)
    try:
        figures |= step_times(recipe, engine, share)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        figures["step_error"] = f"out of memory with {share} images"
    return {k: float(f"{v:.4g}") if isinstance(v, float) else v for k, v in figures.items()}, engine


def predicted(path: str) -> Figures:
    """The step's times by what `plan --json` has written."""
    try:
        times = json.loads(Path(path).read_text(encoding="utf-8"))["milliseconds"]
        times = {"all": sum(times.values()), "optimizers": times["manifold"] + times["nadam"]} | {
            phase: times[phase] for phase in ("forward", "backward", "norm")
        }
    except (OSError, ValueError, KeyError, TypeError):
        right = "must be a file that `python -m lipnext_scale.plan --json` has written"
        raise UserError(f"--predicted = {path!r}: {right}") from None
    return {f"step_{phase}_predicted_ms": float(f"{ms:.4g}") for phase, ms in times.items()}


def versions(device: torch.device) -> Figures:
    found: Figures = {"device": device.type, "torch": torch.__version__, "triton": "none"}
    if block_kernels._has_triton():
        found["triton"] = version("triton")
    if device.type == "cuda":
        found |= {"device": torch.cuda.get_device_name(device), "cuda": torch.version.cuda}
        if (asked := ask_driver()) is not None:
            found["driver"] = (asked.stdout.split() or [""])[0]
    return found


def seconds_of(action: Callable[[], Any], device: torch.device) -> float:
    """Of a call. A GPU gets all calls before it begins, so that the host's time does not count."""
    repeats = 20 if device.type == "cuda" else 1
    for _ in range(2):  # compiles
        action()
    if device.type == "cuda":
        torch.cuda._sleep(10**8)  # cycles
    marks = [_now(device)]
    for _ in range(repeats):
        action()
    marks.append(_now(device))
    return _milliseconds(*marks) / 1e3 / repeats


def _now(device: torch.device) -> Any:
    if device.type == "cpu":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _milliseconds(begin: Any, end: Any) -> float:
    if isinstance(begin, float):
        return 1e3 * (end - begin)
    end.synchronize()
    return float(begin.elapsed_time(end))


def copy_rates(device: torch.device) -> Figures:
    size = COPIED[device.type]
    pageable = torch.zeros(size, dtype=torch.uint8)
    one, other = pageable.to(device, copy=True), pageable.to(device, copy=True)
    pinned = pageable.pin_memory() if device.type == "cuda" else pageable
    figures = {}
    for name, to, source, moved in (
        ("memory_copy", one, other, 2 * size),
        ("host_to_device_pinned", one, pinned, size),
        ("host_to_device_pageable", one, pageable, size),
        ("device_to_host_pinned", pinned, one, size),
    ):
        seconds = seconds_of(partial(to.copy_, source, non_blocking=True), device)
        figures[f"{name}_gb_per_second"] = moved / 1e9 / seconds
    return figures


def product_rates(device: torch.device, width: int, rows: int) -> Figures:
    """Of stacks of width × width matrices, and of rows of tokens with one. bf16x3 counts as the
    product that it stands for."""
    count, figures = 4, {}
    x, y, total = (torch.randn(count, width, width, device=device) for _ in range(3))
    a, b = x.bfloat16(), y.bfloat16()
    left, right = step_kernels.split_left(x, 2), step_kernels.split_right(y, 1)
    tokens = torch.randn(rows, width, device=device).bfloat16()
    exact = x[0].double() @ y[0].double()
    for name, action in {
        "fp32": lambda: torch.bmm(x, y),
        "tf32": lambda: torch.bmm(x, y),
        "bf16": lambda: torch.bmm(a, b),
        "bf16_to_fp32": lambda: tensor_core.product(a, b),
        "bf16x3": lambda: tensor_core.product(left, right),
        "bf16x3_added": lambda: tensor_core.add_product_(total, left, right),
        "bf16_tokens": lambda: tokens @ b[0].mT,
    }.items():
        torch.backends.cuda.matmul.allow_tf32 = name == "tf32"
        flops = 2 * width**2 * (rows if name == "bf16_tokens" else count * width)
        figures[f"product_{name}_tflops"] = flops / 1e12 / seconds_of(action, device)
        if name not in ("bf16x3_added", "bf16_tokens"):
            error = (action()[0] - exact).norm() / exact.norm()
            figures[f"product_{name}_relative_error"] = float(error)
    return figures


Case = tuple[str, Any, tuple[Any, ...], float]  # name, operator, arguments, bytes


def kernel_cases(recipe: Recipe, device: torch.device, shape: tuple[int, ...]) -> Iterator[Case]:
    """shape: of the tokens [N, H, W, C]. Bytes: what the kernel reads and writes."""
    d, plane, model = shape[-1], shape[1] * shape[2], recipe.model
    x, entries = torch.randn(2, d, d, device=device), 2 * d**2
    a, b, c = (skew(torch.randn_like(x)) for _ in range(3))
    e, t, usable = a.bfloat16(), x.new_ones(2), x.new_ones((), dtype=torch.bool)
    adam = (0.9, 0.999, 1e-8, -1e-3, False)
    yield "split_left", step_kernels.split_left, (x, 2), 10 * entries
    yield "split_right", step_kernels.split_right, (x, 1), 10 * entries
    yield "scaled_cast", step_kernels.scaled_cast, (x, t[0], usable), 6 * entries
    yield "moments", step_kernels.moments_, (x.bfloat16(), a, b * b, c, usable, *adam), 16 * entries
    yield "tail_operands", step_kernels.tail_operands, (x, e, t), 7 * entries
    yield "change_right", step_kernels.change_right, (x, e, e, t, 1), 11 * entries

    tokens = torch.randn(shape, device=device).to(DTYPES[recipe.parallel.precision])
    rows, pos, size = tokens.view(-1, d), tokens[0, ..., :1].contiguous(), tokens.element_size()
    part, count = shift_width(d, model.shift_ratio), int(d * model.beta)
    arguments = (tokens.clone(), part, model.padding, False)
    yield "shift", block_kernels.shift_, arguments, 8 * part * size * len(rows)
    activated = (rows.clone(), rows[0].clone(), pos, count)
    signs = block_kernels.activate_(rows.clone(), *activated[1:])
    moved = 2 * size * rows.numel() + signs.numel()
    yield "activate", block_kernels.activate_, activated, moved
    parts = block_kernels.bias_parts(rows, plane), block_kernels.pos_parts(rows, plane)
    back = (rows, signs, torch.empty_like(rows), *parts, plane)
    yield "activate_backward", block_kernels.activate_backward, back, moved


def kernel_rates(recipe: Recipe, device: torch.device, shape: tuple[int, ...]) -> Figures:
    """Differences at the run's shape and at one that fills no block; rates at the former."""
    figures: Figures = {}
    if device.type == "cuda" and not block_kernels._has_triton():
        return figures
    for tried in ((3, 5, 7, 130), shape):
        for name, operator, arguments, moved in kernel_cases(recipe, device, tried):
            agrees = f"kernel_{name}_agrees"
            figures[agrees] = figures.get(agrees, True) and agree(operator, arguments)
            if tried == shape:
                seconds = seconds_of(partial(operator, *arguments), device)
                figures[f"kernel_{name}_gb_per_second"] = moved / 1e9 / seconds
    return figures


def agree(operator: Any, arguments: tuple[Any, ...]) -> bool:
    """With the operator on a CPU: to the last place of bfloat16, and to the order of sums."""
    same = tree_map_only(Tensor, lambda x: x.to("cpu", copy=True), arguments)
    for found, wanted in zip(_outcome(operator, arguments), _outcome(operator, same), strict=True):
        limit = {torch.bfloat16: 2**-7, torch.float32: 1e-4}.get(wanted.dtype, 0.0)
        found, wanted = found.cpu().double(), wanted.double()
        if not (found - wanted).abs().max() <= limit * wanted.abs().max():
            return False
    return True


def _outcome(operator: Any, arguments: tuple[Any, ...]) -> list[Tensor]:
    """All that it was given and returns; instead of parts of sums the sums."""
    returned, given = operator(*arguments), list(arguments)
    if operator is step_kernels.moments_:  # of the state it keeps the upper halves
        given[1:4] = map(torch.triu, given[1:4])
        returned = returned[0], returned[1].sum(1)
    if operator is block_kernels.activate_backward:
        given[3:5] = [parts.sum(0) for parts in given[3:5]]
    return [x for x in tree_leaves((given, returned)) if isinstance(x, Tensor)]


def step_times(recipe: Recipe, engine: Engine, share: int) -> Figures:
    """Of steps as the trainer takes them, on images of noise; in the mean."""
    device, model, parts = engine.processes.device, recipe.model, recipe.parallel.accumulation
    engine.build(model, recipe.run.seed)
    optimizers = engine.optimizers(recipe.optim)
    shape = (share, model.image_size, model.image_size, model.in_channels)
    images = torch.randint(256, shape, dtype=torch.uint8).permute(0, 3, 1, 2)
    labels = torch.randint(model.num_classes, (share,), device=device).chunk(parts)
    images = images.pin_memory() if device.type == "cuda" else images
    marks: list[tuple[str, Any]] = []

    def step() -> None:
        optimizers.zero_grad()
        pixels = to_unit_range(images, device).chunk(parts)
        for index, (x, y) in enumerate(zip(pixels, labels, strict=True)):
            marks.append(("input and loss", _now(device)))
            logits, weight = engine.forward(x, last=index + 1 == parts)
            marks.append(("forward", _now(device)))
            distances = class_distances(weight)
            loss = compute_loss(recipe.loss, logits, y, distances, recipe.loss.epsilon) / parts
            marks.append(("input and loss", _now(device)))
            engine.backward(loss)
            marks.append(("backward", _now(device)))
        norm = engine.gradient_norm()
        marks.append(("norm", _now(device)))
        clip = (recipe.optim.clip_norm / (norm + 1e-6)).clamp(max=1.0)
        optimizers.step(clip, torch.isfinite(norm))
        marks.append(("optimizers", _now(device)))

    for _ in range(STEPS):  # compiles, and makes the optimizers' state
        step()
    del marks[:-1]
    for _ in range(STEPS):
        step()
    times: Counter[str] = Counter()
    for (_, begin), (phase, end) in pairwise(marks):
        times[phase] += _milliseconds(begin, end)  # type: ignore[assignment]
    total = sum(times.values())
    figures: Figures = {"step_all_ms": total / STEPS}
    for phase in ("forward", "backward", "norm", "optimizers"):
        figures[f"step_{phase}_ms"] = times[phase] / STEPS
    all_images = share * engine.processes.world_size * STEPS
    figures["step_images_per_second"] = 1e3 * all_images / total
    if device.type == "cuda":
        figures["step_memory_gb"] = torch.cuda.max_memory_allocated(device) / 1e9
    return figures
