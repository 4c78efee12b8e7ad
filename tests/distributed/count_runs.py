"""Small runs on the ranks of a test, and what their steps say to each other and keep."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path
from statistics import median_low
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lipnext_scale.checks.layers import allocated_by
from lipnext_scale.config.recipe import load_recipe
from lipnext_scale.data import evaluation as datasets
from lipnext_scale.training.trainer import Trainer

# Five steps an epoch. The batch can be shared by 1 to 4 ranks, in one part or two.
SETTINGS = """
data.train=builtin:digits/test-*.tar.gz data.test=builtin:digits/test-*.tar.gz data.batch_size=72
model.depth=4 model.width=16 model.image_size=8 model.patch_size=4 model.in_channels=1
optim.epochs=4 optim.warmup_epochs=1 optim.lookahead=3 loss.logit_scale=8 run.summary=false
run.eval_every=0 run.log_every=1 run.checkpoint_every=0
""".split()


@dataclass(frozen=True)
class Collective:
    """How often a collective was called, and the bytes that left this rank by it."""

    calls: int = 0
    bytes_sent: int = 0


Counted = dict[str, Collective]
# Operator → (name, the argument that is measured). With R ranks and n bytes in it a rank sends
# ·n, by an all-reduce 2·(R-1)/R·n, by an all-to-all all of its outbox: ours holds nothing for
# the rank itself. Of a reduction to one rank or a broadcast each sends (R-1)/R·n in the mean.
OPERATORS = {
    "allgather_": ("all_gather", "input_tensors"),
    "_allgather_base_": ("all_gather", "input_tensor"),
    "_reduce_scatter_base_": ("reduce_scatter", "output_tensor"),
    "allreduce_": ("all_reduce", "tensors"),
    "alltoall_base_": ("all_to_all", "input"),
    "broadcast_": ("broadcast", "tensors"),
    "reduce_": ("reduce", "tensors"),
}


class CountTraffic(TorchDispatchMode):
    """A region whose collectives are counted in `counted`; unknown ones without their bytes.

    FSDP2, DDP's reducer and our own exchange all call an operator of the dispatcher.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counted: Counted = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its operators come again, on local tensors
        namespace, operator = func._schema.name.split("::")
        if namespace == "c10d":
            name, argument = OPERATORS.get(operator, (operator, ""))
            named = dict(zip([a.name for a in func._schema.arguments], args, strict=False))
            tensors = tree_leaves(named.get(argument, []))
            size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
            if argument:
                ranks = dist.ProcessGroup.unbox(named["process_group"]).size()
                mean = (ranks - 1) / ranks
                shares = {"all_reduce": 2 * mean, "all_to_all": 1, "broadcast": mean}
                size = int(size * {**shares, "reduce": mean}.get(name, ranks - 1))
            before = self.counted.get(name, Collective())
            self.counted[name] = Collective(before.calls + 1, before.bytes_sent + size)
        return func(*args, **(kwargs or {}))


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
        found.append(traffic.counted)
        return result

    return counting


def calls(counted: Counted) -> dict[str, int]:
    return {name: collective.calls for name, collective in counted.items()}


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

    It is repeated: `allocated_by` sees one thread, so one time in ten a buffer that one of gloo's
    threads frees last seems to be left; more rarely, on a busy machine, one of the time before is
    freed only now and is subtracted.
    """
    found = []
    for _ in range(times):
        left, _, result = allocated_by(region)
        undo(result)
        found.append(left)
    return median_low(found)
