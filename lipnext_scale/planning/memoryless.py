"""DDP and DeepSpeed on tensors without memory: what they ask of it is answered here."""

from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.parallel import distributed

from lipnext_scale.distributed import DDPEngine, DeepSpeedEngine, Engine
from lipnext_scale.distributed.deepspeed import import_deepspeed


def prepare(engine: Engine) -> None:
    """Before the engine builds a model."""
    if isinstance(engine, DDPEngine):
        _prepare_ddp(engine)
    elif isinstance(engine, DeepSpeedEngine):
        _prepare_deepspeed(engine.processes.device)


# DDP's reducer is C++. It reads weights to compare them, notes times, and before the second step
# puts gradients into new buckets by their addresses: the buckets of the first step stay.


class _Without:
    """An object of DDP's, some of whose methods do nothing."""

    def __init__(self, real: Any, *names: str) -> None:
        self._real, self._names = real, names

    def __getattr__(self, name: str) -> Any:
        return (lambda: None) if name in self._names else getattr(self._real, name)


def _prepare_ddp(engine: DDPEngine) -> None:
    distributed._verify_param_shape_across_processes = lambda *_: None
    build: Any = engine.build

    def built(*arguments: Any) -> Any:
        model = build(*arguments)
        network: Any = engine.network
        if engine.config.reduce_precision == "fp32":
            network.register_comm_hook(None, _average)
        network.logger = _Without(network.logger, "set_runtime_stats_and_log")
        network.reducer = _Without(network.reducer, "_rebuild_buckets")
        return model

    engine.build = built  # type: ignore[method-assign,assignment]


def _average(_state: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """As the reducer does by itself, which wants the sum from the group's work: a fake one has
    none."""
    gradients = bucket.buffer().div_(dist.get_world_size())
    return dist.all_reduce(gradients, async_op=True).get_future().then(lambda _: gradients)


# DeepSpeed is Python.


def _prepare_deepspeed(device: torch.device) -> None:
    FakeTensor.data_ptr = _address  # type: ignore[method-assign,assignment]
    nn.Module._apply = _apply  # type: ignore[method-assign]
    nvtx: Any = torch.cuda.nvtx
    nvtx.range_push = nvtx.range_pop = lambda *_: None
    deepspeed: Any = import_deepspeed(device)
    deepspeed.utils.groups._WORLD_GROUP = None  # that of the walk before
    # Ranks of ZeRO-3 compare numbers, once.
    coordinator: Any = import_module("deepspeed.runtime.zero.partitioned_param_coordinator")
    coordinator.assert_ints_same_as_other_ranks = lambda _: None


def _address(tensor: Tensor) -> int:
    storage = tensor.untyped_storage()._cdata
    return (storage << 8) + tensor.storage_offset() * tensor.element_size()


_torch_apply = nn.Module._apply


def _apply(module: nn.Module, function: Any, recurse: bool = True) -> nn.Module:
    """torch's own swaps fake parameters, and refuses to while there are weak references."""
    fake: list[Any] = [p for p in module._parameters.values() if isinstance(p, FakeTensor)]
    if not fake:
        return _torch_apply(module, function, recurse)
    for child in module.children() if recurse else ():
        child._apply(function)
    for parameter in fake:
        parameter.data = function(parameter.data)
    return module
