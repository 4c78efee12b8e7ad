"""Weights, gradients and optimizer state sharded by FSDP2; replicated along the other mesh axis.

docs/parallel.md has the order in which things are put on the model, each from outside. The head
always computes in float32: its margins are what is certified.
"""

import math
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from lipnext_scale.distributed.config import ParallelConfig
from lipnext_scale.distributed.engine import DTYPES, Engine, local_range
from lipnext_scale.distributed.processes import Processes
from lipnext_scale.distributed.replicas import (
    Sharing,
    bank_sharings,
    reduce_to_shares,
)
from lipnext_scale.distributed.rows import RowManifoldAdam
from lipnext_scale.models import BlockGroup, LipNeXt, LipNeXtConfig
from lipnext_scale.optim import ManifoldOptimizer, local_part
from lipnext_scale.utils.config import ConfigError

# --------------------------------------------------------------------------------------------------
# The mesh of ranks: replicate × shard.
#
# Ranks that differ along `shard` hold different parts of one copy of the model; ranks that differ
# along `replicate` hold the same parts and average their gradients. Neighbouring ranks share a
# copy, so that with a shard axis of a node's size weights travel within the node only (HSDP).

REPLICATE, SHARD = "replicate", "shard"


def choose_shard_size(wanted: int, world_size: int, local_world_size: int) -> int:
    """As wanted; 0: the ranks of a node, or all where nodes have one rank or unequally many."""
    if wanted == 0:
        nodes_are_alike = local_world_size > 1 and world_size % local_world_size == 0
        return local_world_size if nodes_are_alike else world_size
    if world_size % wanted:
        raise ConfigError(
            "parallel.shard_size", wanted, f"must divide the number of processes, {world_size}"
        )
    return wanted


def build_mesh(device_type: str, world_size: int, shard_size: int) -> DeviceMesh:
    shape = (world_size // shard_size, shard_size)
    return init_device_mesh(device_type, shape, mesh_dim_names=(REPLICATE, SHARD))


class FSDPEngine(Engine):
    name = "fsdp"

    def __init__(self, config: ParallelConfig, processes: Processes) -> None:
        super().__init__(config, processes)
        size = choose_shard_size(
            config.shard_size, processes.world_size, processes.local_world_size
        )
        self.mesh = build_mesh(processes.device.type, processes.world_size, size)
        for axis in (REPLICATE, SHARD):
            processes.apply_timeout(self.mesh[axis].get_group())
        self.share_group = self.mesh[REPLICATE].get_group()
        self._last_part = True  # of an accumulated batch

    def describe(self) -> str:
        layout = f"{self.config.weight_layout} layout"
        mesh = f"{self.replicas()} × {self.shards}"
        return f"{self.name} {mesh}, {layout}, {self.config.precision}"

    def replicate_group(self) -> dist.ProcessGroup | None:
        return self.share_group

    def build(self, config: LipNeXtConfig, seed: int) -> LipNeXt:
        self.seed = seed
        self.model = self.network = self.place(config)
        self.model.to_empty(device=self.processes.device)
        initialise_shards(self.model, seed)
        if self.replicas() > 1:  # equal but for rounding on unlike devices: make them equal
            for parameter in self.model.parameters():
                dist.broadcast(local_part(parameter), group=self.replicate_group(), group_src=0)
        return self.model

    @property
    def shards(self) -> int:
        return self.mesh[SHARD].size()

    def place(self, config: LipNeXtConfig) -> LipNeXt:
        model = self.build_on_meta(config, self.config.weight_layout)
        # Where replicas share the step, FSDP reduces over the shard axis alone, and a hook of ours
        # over the other. Without replicas there are no all-reduces in groups of one either.
        alone = self.replicas() == 1 or self.shares_step
        mesh = self.mesh[SHARD] if alone else self.mesh
        reshard, groups = self.config.reshard_after_forward, model.block_groups()
        policy = MixedPrecisionPolicy()
        if self.config.precision == "bf16":
            reduce_dtype = DTYPES[self.config.reduce_precision]
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
        for group in groups:
            fully_shard(group, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy)
        units: list[Any] = [*groups, *filter(None, [model.neck]), model.head]
        for unit in units[len(groups) :]:
            fully_shard(unit, mesh=mesh, reshard_after_forward=False)
        fully_shard(model, mesh=mesh)
        if self.shares_step:
            sharings = bank_sharings(model, self.replicas()).values()
            for unit, sharing in zip_longest(units, sharings):
                assert isinstance(unit, FSDPModule)
                assert isinstance(unit, nn.Module)
                unit.set_all_reduce_hook(partial(self._reduce_over_replicas, unit, sharing))
        if ahead := self.config.prefetch:
            sharded: list[Any] = groups
            for index, group in enumerate(sharded):
                group.set_modules_to_forward_prefetch(sharded[index + 1 : index + 1 + ahead])
                group.set_modules_to_backward_prefetch(sharded[max(0, index - ahead) : index][::-1])
        return model

    @torch.no_grad()
    def _reduce_over_replicas(self, unit: nn.Module, sharing: Sharing | None, flat: Tensor) -> None:
        """FSDP's hook: the unit's gradients on this rank one after the other, a bank first."""
        if not self._last_part:
            return  # FSDP adds the parts of this rank up
        if flat.is_cuda:  # FSDP made it on another stream, and may drop it before this one is done
            flat.record_stream(torch.cuda.current_stream(flat.device))
        group, rest = self.share_group, flat
        start = 0
        for parameter in unit.parameters():
            local, numbers = local_part(parameter), math.prod(parameter.shape[1:])
            here = flat[start : start + local.numel()].view(local.shape)
            start += -(-parameter.shape[0] // self.shards) * numbers  # with FSDP's padding
            if parameter.grad is not None:  # of the parts before, to which FSDP will add `flat`
                here += local_part(parameter.grad)
                local_part(parameter.grad).zero_()
            if isinstance(unit, BlockGroup) and sharing and parameter is unit.bank:
                reduce_to_shares(here, sharing, group)()
                rest = flat[start:]
        assert start == flat.numel(), "FSDP lays gradients out in another way"
        dist.all_reduce(rest, group=group)
        rest.div_(self.replicas())

    def manifold_optimizer(
        self, named: list[tuple[str, nn.Parameter]], **arguments: Any
    ) -> ManifoldOptimizer:
        if self.config.weight_layout == "bank":
            return super().manifold_optimizer(named, **arguments)
        self.owner = RowManifoldAdam(
            named,
            self.mesh[SHARD].get_group(),
            self._fill_initial,
            return_dtype=DTYPES[self.config.precision],
            bucket_bytes=self.config.row_bucket_mb << 20,
            **arguments,
        )
        return self.owner

    def _fill_initial(self, name: str, matrix: Tensor) -> None:
        """The initial value of `groups.{i}.matrices.{j}`."""
        _, number, _, index = name.split(".")
        group = self.model.block_groups()[int(number)]
        matrix.copy_(group.initial_matrix(int(index), self.seed, matrix))

    def forward(self, images: Tensor, last: bool = True) -> tuple[Tensor, Tensor]:
        assert isinstance(self.network, FSDPModule)
        self.network.set_requires_gradient_sync(last or self.config.reduce_every_part)
        self.network.set_requires_all_reduce(last)  # between replicas: once is enough
        self._last_part = last
        # Weights that stay gathered until the backward pass stay for the next part too.
        self.network.set_reshard_after_backward(last or self.config.reshard_after_forward)
        return super().forward(images)

    def weights_changed(self) -> None:
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


@torch.no_grad()
def initialise_shards(model: LipNeXt, seed: int) -> None:
    """Initial weights of the local shards alone: those `LipNeXt.reset_parameters` would give.

    The owners fill matrices in rows, in `FSDPEngine.manifold_optimizer`.
    """
    for group in model.block_groups():
        if group.family is not None:
            free = {name: local_part(parameter) for name, parameter in group.free.items()}
            group.fill_free(free, local_range(group.bias)[0], seed)
        elif group.layout == "bank":
            start, stop = local_range(group.bank)
            for index, matrix in enumerate(local_part(group.bank).flatten(0, 1), start=2 * start):
                matrix.copy_(group.initial_matrix(index, seed, matrix))
        local_part(group.bias).zero_()
        if group.pos is not None:
            local_part(group.pos).zero_()
    for name, value in model.neck.initial(seed).items() if model.neck is not None else ():
        parameter = getattr(model.neck, name)
        start, stop = local_range(parameter)
        local_part(parameter).copy_(value[start:stop])
    start, stop = local_range(model.head.weight)
    local_part(model.head.weight).copy_(model.head.initial_weight(seed)[start:stop])
    local_part(model.head.bias).zero_()
