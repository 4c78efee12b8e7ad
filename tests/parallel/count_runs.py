"""Small runs on the ranks of a test, and what their steps say to each other and keep."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path
from statistics import median_low
from typing import Any
from unittest import mock

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.profiler import ProfilerActivity, profile

from lipnext_scale.data import datasets
from lipnext_scale.parallel.traffic import Collective, CountTraffic
from lipnext_scale.recipe import load_recipe
from lipnext_scale.trainer import Trainer

# Five steps an epoch. The batch can be shared by 1 to 4 ranks, in one part or two.
SETTINGS = [
    "data.train=builtin:digits/test-*.tar.gz",
    "data.test=builtin:digits/test-*.tar.gz",
    "data.batch_size=72",
    "model.depth=4",
    "model.width=16",
    "model.image_size=8",
    "model.patch_size=4",
    "model.in_channels=1",
    "optim.epochs=4",
    "optim.warmup_epochs=1",
    "optim.lookahead=3",
    "loss.logit_scale=8",
    "run.summary=false",
    "run.eval_every=0",
    "run.log_every=1",
    "run.checkpoint_every=0",
]

Counted = dict[str, Collective]
open_once = cache(datasets.open_catalog)


def small_trainer(directory: Path, *overrides: str) -> Trainer:
    """On the ranks that there are; the shards are opened once for all trainers of a process."""
    with mock.patch.object(datasets, "open_catalog", open_once):
        return Trainer(load_recipe(None, [*SETTINGS, f"run.dir={directory}", *overrides]))


def small_trainers(directory: Path, cases: list[list[str]]) -> Iterator[Trainer]:
    for index, overrides in enumerate(cases):
        yield small_trainer(directory / str(index), *overrides)


@dataclass
class StepTraffic:
    """Of some steps: all of each, its optimizers' part, and the retractions at an epoch's end."""

    steps: list[Counted]
    updates: list[Counted]
    retractions: list[Counted]


def count_steps(trainer: Trainer, steps: int) -> StepTraffic:
    counted = StepTraffic([], [], [])
    for name, found in (("step", counted.updates), ("retract", counted.retractions)):
        setattr(trainer.optimizers, name, _counting(getattr(trainer.optimizers, name), found))
    train_step = _counting(trainer.train_step, counted.steps)
    for batch in islice(trainer.loader, steps):
        train_step(batch)
    return counted


def _counting(function: Callable[..., Any], found: list[Counted]) -> Callable[..., Any]:
    """The function, whose every call adds its collectives to `found`."""

    def counting(*arguments: Any) -> Any:
        with CountTraffic() as traffic:
            result = function(*arguments)
        found.append(traffic.collectives)
        return result

    return counting


def calls(counted: Counted) -> dict[str, int]:
    return {name: collective.calls for name, collective in counted.items()}


def allocated_by(region: Callable[[], Any]) -> tuple[int, int, Any]:
    """(bytes of CPU tensors that a region left, the most it had at a time, its result).

    The allocator itself tells the profiler, so views, temporaries and what C++ code keeps are all
    in it, each once. But it tells of this thread alone: a buffer of which one of gloo's threads is
    the last to let go seems to be left. Where there are collectives, see `usually_left`.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = region()
    assert profiler.profiler is not None
    events = profiler.profiler.kineto_results.events()
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    now = peak = 0
    for _, change in changes:
        now += change
        peak = max(peak, now)
    return now, peak, result


def bytes_of_whole_gradients(model: nn.Module) -> int:
    """What FSDP2 keeps of gradients that it has not reduced, wherever it keeps it."""
    found = 0
    for module in model.modules():
        if not isinstance(module, FSDPModule):
            continue
        group = module._get_fsdp_state()._fsdp_param_group
        for parameter in group.fsdp_params if group is not None else []:
            whole = getattr(parameter, "_unsharded_param", None)
            for gradient in (parameter.unsharded_accumulated_grad, getattr(whole, "grad", None)):
                found += 0 if gradient is None else gradient.untyped_storage().nbytes()
    return found


def usually_left(region: Callable[[], Any], undo: Callable[[Any], None], times: int = 7) -> int:
    """Bytes that a region leaves until its result is undone: the median.

    It is repeated, for one time in ten a buffer seems to be left that is not (`allocated_by`), and
    on a busy machine, more rarely, one of the time before is let go only now and is taken off.
    """
    found = []
    for _ in range(times):
        left, _, result = allocated_by(region)
        undo(result)
        found.append(left)
    return median_low(found)
