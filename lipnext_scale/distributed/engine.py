"""Engines: how a model is placed on processes, differentiated, clipped, saved and loaded."""

from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel

from lipnext_scale.checkpoint import StateShard, StateShards
from lipnext_scale.distributed.config import ParallelConfig, choose_group_size
from lipnext_scale.distributed.processes import Processes
from lipnext_scale.distributed.replicas import SharedManifoldAdam, bank_sharings, reduce_to_shares
from lipnext_scale.distributed.rows import RowManifoldAdam, row_range
from lipnext_scale.models import LipNeXt, LipNeXtConfig, WeightLayout
from lipnext_scale.models.kernels import why_plain
from lipnext_scale.models.layers import Convolution, Gated
from lipnext_scale.models.lipnext import NamedPart, named_parts
from lipnext_scale.optim import (
    ManifoldAdam,
    ManifoldOptimizer,
    OptimConfig,
    Optimizers,
    local_part,
    split_parameters,
)

# --------------------------------------------------------------------------------------------------
# What each rank holds of a run, under names that fit every engine, layout and world size:
#
#     model.NAME                                   the weights
#     exp_avg.NAME, exp_avg_sq.NAME                the moments of either optimizer
#     buffer.NAME                                  the sum of updates since the last Lookahead step
#     slow.NAME                                    the slow weights
#
# with the stable names of `models.lipnext`, but blocks.{i}.M in place of blocks.{i}.W where M is
# learned (`optim.parametrisation: product`): W = M·Rᵀ is written anew. Any engine can read it.


FACTOR = "factor"  # M in the state of the product form


def local_range(parameter: Tensor) -> tuple[int, int]:
    """The entries of the first dimension that this rank holds: [start, stop)."""
    rows = parameter.shape[0]
    if not isinstance(parameter, DTensor):
        return 0, rows
    assert parameter.placements[-1] == Shard(0), "FSDP shards along the first dimension"
    mesh, axis = parameter.device_mesh, parameter.device_mesh.ndim - 1
    return row_range(rows, mesh.size(axis), mesh.get_local_rank(axis))


Owners = RowManifoldAdam | SharedManifoldAdam


def parameter_names(model: LipNeXt) -> dict[int, str]:
    return {id(parameter): name for name, parameter in model.named_parameters()}


def owned_part(
    owned: Owners, part: NamedPart, name: str, with_state: bool
) -> tuple[tuple[int, int], dict[str, Any]] | None:
    """(place of a matrix, tensors by kind) where this rank owns the part of parameter `name`."""
    index = _local_index(part)
    return None if index is None else owned.owned_tensors(name, index, with_state)


def _local_shards(part: NamedPart, tensors: Mapping[str, Any]) -> StateShards:
    """This rank's shards of tensors that are laid out as the part's parameter."""
    index = _local_index(part)
    if index is None:
        return {}
    if not index:
        return _shards(part, tensors, start=local_range(part.parameter)[0])
    return entry_shards(part, index, tensors)


def _local_index(part: NamedPart) -> tuple[int, ...] | None:
    """The part's place in what this rank holds of its parameter; None if it is elsewhere."""
    if not part.index:
        return ()
    start, stop = local_range(part.parameter)
    entry, *inner = part.index
    return (entry - start, *inner) if start <= entry < stop else None


def entry_shards(
    part: NamedPart, index: tuple[int, ...], tensors: Mapping[str, Any]
) -> StateShards:
    """The part's shards, at `index` of the tensors. In the product form M stands for W."""
    entries = {
        kind: local_part(tensor)[index]
        for kind, tensor in tensors.items()
        if kind != FACTOR and has_entries(tensor)
    }
    if FACTOR in tensors and index[1] == 1:
        entries["model"] = tensors[FACTOR][index[0]]
        part = replace(part, name=part.name.removesuffix("W") + "M")
    return _shards(part, entries)


def _shards(part: NamedPart, tensors: Mapping[str, Any], start: int = 0) -> StateShards:
    """start: the first row of the part in the tensors."""
    offset = (start,) + (0,) * (len(part.shape) - 1)
    return {
        f"{kind}.{part.name}": StateShard(local_part(tensor), part.shape, offset)
        for kind, tensor in tensors.items()
        if has_entries(tensor)
    }


def has_entries(value: Any) -> bool:
    """Not the step counters that optimizers keep beside their tensors."""
    return isinstance(value, Tensor) and value.dim() > 0


def checksums(shards: StateShards) -> dict[str, int]:
    """A number for each shard by name and offset: replicas that differ have different ones.

    It is the sum of the bits as int32, for shards of float32, as all of ours are.
    """
    tensors = by_offset(shards)
    sums = [tensor.view(torch.int32).sum(dtype=torch.int64) for tensor in tensors.values()]
    values = torch.stack(sums).tolist() if sums else []
    return dict(zip(tensors, values, strict=True))


def by_offset(shards: StateShards) -> dict[str, Tensor]:
    """The tensors that are not empty, by name and offset: the same for replicas alone."""
    return {
        f"{name} from {shard.offset}": shard.tensor
        for name, shard in shards.items()
        if shard.tensor.numel()
    }


# --------------------------------------------------------------------------------------------------

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
MATRICES = (".R", ".M", ".W")  # how the stable names of matrices end


class Engine:
    """One process, one device; and the base of the engines for several.

    Unless stated otherwise all ranks must call a method together.
    """

    name = "single"
    model: LipNeXt
    network: nn.Module  # the model, or a wrapper of it that communicates
    owner: Owners | None = None  # the optimizer whose matrices have one owner each, if they do
    share_group: dist.ProcessGroup  # of replicas that share the step
    has_banks = True  # other layers have free parameters

    def __init__(self, config: ParallelConfig, processes: Processes) -> None:
        self.config, self.processes = config, processes

    def describe(self) -> str:
        """The engine and its choices in a few words."""
        return f"{self.name}, {self.config.precision}"

    def why_plain(self) -> str | None:
        """Why a GPU computes blocks without our kernels; None where it has them, and on a CPU."""
        if self.processes.device.type == "cpu":
            return None
        if self.config.compile:
            return "torch.compile makes its own (parallel.compile)"
        if isinstance(self.model.block_groups()[0].family, Gated | Convolution):
            kind = f"model.layer = {self.model.config.layer!r}"
            return f"{kind} with kernel_size {self.model.config.kernel_size} has none"
        config, spec = self.model.config, self.model.block_groups()[0].spec
        side, like = config.image_size // config.patch_size, DTYPES[self.config.precision]
        shape = (1, side, side, config.width)
        return why_plain(spec, torch.empty(shape, dtype=like, device=self.processes.device))

    # Building

    def build(self, config: LipNeXtConfig, seed: int) -> LipNeXt:
        """A model over the processes with its initial weights, the same for every world size.

        No rank ever holds weights that it does not keep.
        """
        self.model = self.network = self.place(config)
        self.model.to_empty(device=self.processes.device)
        self.model.reset_parameters(seed)
        return self.model

    def place(self, config: LipNeXtConfig) -> LipNeXt:
        """The model as this engine shards it, on the meta device: shapes without memory."""
        model = self.build_on_meta(config)
        if self.config.precision == "bf16":
            for group in model.block_groups():
                group.compute_dtype = torch.bfloat16
        return model

    @property
    def shards(self) -> int:
        """How many ranks share the numbers of a group."""
        return 1

    def build_on_meta(self, config: LipNeXtConfig, layout: WeightLayout = "bank") -> LipNeXt:
        """The model in groups that suit the shards; recomputing and compiled as configured."""
        self.has_banks = config.layer == "manifold"
        size = choose_group_size(config, self.shards, layout == "bank")
        with torch.device("meta"):
            model = LipNeXt(replace(config, blocks_per_bank=size), layout=layout)
        for group in model.block_groups():
            group.recompute = self.config.recompute_activations
            if self.config.compile:
                group.compile()
        return model

    def optimizers(self, config: OptimConfig) -> Optimizers:
        """Both optimizers of the model as this engine lays its weights out. Once, after `build`."""
        return Optimizers(split_parameters(self.model), config, self.manifold_optimizer)

    def manifold_optimizer(
        self, named: list[tuple[str, nn.Parameter]], **arguments: Any
    ) -> ManifoldOptimizer:
        if not self.shares_step:
            return ManifoldAdam(named, **arguments)
        sharings, wire = bank_sharings(self.model, self.replicas()), DTYPES[self.config.precision]
        self.owner = SharedManifoldAdam(named, sharings, self.share_group, wire, **arguments)
        return self.owner

    def parameter_count(self) -> int:
        """Of the model on all ranks."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    def replicas(self) -> int:
        """How many ranks hold the same numbers of the model."""
        group = self.replicate_group()
        return 1 if group is None else group.size()

    def replicate_group(self) -> dist.ProcessGroup | None:
        """The ranks that hold the same numbers as this one; None: it is alone."""
        return None

    @property
    def shares_step(self) -> bool:
        """Whether each of them steps a share of the matrices only. Rows have owners already, in
        every replica."""
        config = self.config
        in_banks = self.has_banks and config.weight_layout == "bank"
        return config.share_step and in_banks and self.replicas() > 1

    # A step

    def forward(self, images: Tensor, last: bool = True) -> tuple[Tensor, Tensor]:
        """(logits, the head's normalised rows). last: of the parts of an accumulated batch."""
        return self.network(images, with_head=True)

    def backward(self, loss: Tensor) -> None:
        """Add to the gradients; after the last part they are averaged over ranks."""
        loss.backward()

    def gradient_norm(self) -> Tensor:
        """The global norm, equal on every rank. In float64: a norm of 1e20 is not infinite."""
        gradients = self._gradients()
        norms = torch._foreach_norm([g for g, _ in gradients], 2, torch.float64)
        squares = torch.stack(norms).square()
        # Not a tensor of the counts, which the host would have to copy to the device.
        counted = torch.stack([s / n for s, (_, n) in zip(squares, gradients, strict=True)])
        return self.processes.sum(counted.sum()).sqrt()

    def _gradients(self) -> list[tuple[Tensor, int]]:
        """(numbers of the gradients on this rank, how many ranks have the same)."""
        owned, replicas = self.owner, self.replicas()
        shared = owned.names if isinstance(owned, SharedManifoldAdam) else []
        named = [(n, p.grad) for n, p in self.model.named_parameters() if p.grad is not None]
        gradients = [(local_part(g), replicas) for name, g in named if name not in shared]
        if isinstance(owned, SharedManifoldAdam):
            of_banks = [owned.share(name, g) for name, g in named if name in shared]
            gradients += [(gradient, 1) for runs in of_banks for gradient in runs]
        return gradients

    def named_gradients(self) -> Iterator[tuple[str, Tensor, int]]:
        """(stable name, this rank's numbers of its gradient, how many ranks have them). Local."""
        owned, names = self.owner, parameter_names(self.model)
        for part in named_parts(self.model):
            if part.parameter.grad is None:
                continue
            name, copies = names[id(part.parameter)], self.replicas()
            if isinstance(owned, SharedManifoldAdam) and name in owned.names:
                if owned_part(owned, part, name, with_state=False) is None:
                    continue
                copies = 1
            for shard in _local_shards(part, {"gradient": part.parameter.grad}).values():
                yield part.name, shard.tensor, copies

    def discard_gradients(self) -> None:
        """Without a step."""
        self.model.zero_grad(set_to_none=True)

    def weights_changed(self) -> None:
        """Drop gathered copies of the weights: something else than a step changed them."""

    # Checkpoints

    def state_shards(self, optimizers: Optimizers | None) -> StateShards:
        """What this rank puts into a checkpoint or fills from one; None: the weights alone.

        Optimizer state is created if missing. Matrices come from their owners, if they have some.
        """
        states: list[Mapping[Any, Any]] = []
        if optimizers is not None:
            optimizers.initialise_state()
            states = [optimizers.euclidean.state, optimizers.manifold.state]
        names, shards = parameter_names(self.model), StateShards()
        for part in named_parts(self.model):
            name = names[id(part.parameter)]
            if self.owner is None or name not in self.owner.names:
                tensors = {"model": part.parameter}
                for state in states:
                    tensors |= state.get(part.parameter, {})
                shards |= _local_shards(part, tensors)
            elif found := owned_part(self.owner, part, name, optimizers is not None):
                shards |= entry_shards(part, *found)
        return shards

    def state_loaded(self, shards: StateShards, optimizers: Optimizers | None) -> None:
        """Bring the model up to `state_shards` that have been filled."""
        if optimizers is not None:
            optimizers.manifold.state_loaded()
        if self.owner is not None:
            self.owner.share_weights()

    @torch.no_grad()
    def equalise_replicas(
        self, names: Container[str], shards: StateShards, optimizers: Optimizers
    ) -> None:
        """Give all replicas the first one's numbers of these shards, named as in `checksums`."""
        for name, tensor in by_offset(shards).items():
            if name in names:
                dist.broadcast(tensor, group=self.replicate_group(), group_src=0)
        self.weights_changed()
        self.state_loaded(shards, optimizers)

    def whole_matrices(self, optimizers: Optimizers) -> StateShards:
        """Matrices that this rank holds whole, with their optimizer state. Local."""
        return {
            name: shard
            for name, shard in self.state_shards(optimizers).items()
            if name.endswith(MATRICES) and shard.tensor.shape == shard.shape
        }


class DDPEngine(Engine):
    """A copy of the model on every rank; torch's DDP averages the gradients.

    Each rank steps its share of the matrices (`share_step`), or all of them.
    """

    name = "ddp"

    def build(self, config: LipNeXtConfig, seed: int) -> LipNeXt:
        model = super().build(config, seed)
        if self.shares_step:
            self._share_banks(model)
        self.network = DistributedDataParallel(model, gradient_as_bucket_view=True)
        if self.config.reduce_precision == "bf16":
            self.network.register_comm_hook(None, average_in_bf16)
        return model

    def _share_banks(self, model: LipNeXt) -> None:
        """Keep the banks from DDP: their gradients go to the ranks that step them, each as soon as
        it is complete. The groups of DDP's own collectives and of these must not mix."""
        self.share_group = dist.new_group(timeout=self.processes.timeout)
        self._sharings = bank_sharings(model, self.replicas())
        self._reducing: list[tuple[Tensor, Tensor, Callable[[], None]]] = []
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
            model, list(self._sharings)
        )
        for name in self._sharings:
            bank = model.get_parameter(name)
            dist.broadcast(bank.detach(), src=0)  # as DDP does with all others
            bank.register_post_accumulate_grad_hook(partial(self._reduce, name))

    @torch.no_grad()
    def _reduce(self, name: str, bank: Tensor) -> None:
        assert bank.grad is not None
        if not self.network.require_backward_grad_sync:
            return
        halves = self.config.reduce_precision == "bf16"
        summed = bank.grad.bfloat16() if halves else bank.grad
        finish = reduce_to_shares(summed, self._sharings[name], self.share_group)
        self._reducing.append((bank.grad, summed, finish))

    def backward(self, loss: Tensor) -> None:
        super().backward(loss)
        if not self.shares_step:
            return
        for gradient, summed, finish in self._reducing:
            finish()
            if summed is not gradient:
                gradient.copy_(summed)
        self._reducing.clear()

    def replicate_group(self) -> dist.ProcessGroup | None:
        return dist.group.WORLD

    def forward(self, images: Tensor, last: bool = True) -> tuple[Tensor, Tensor]:
        # As DDP's no_sync(), whose context would have to span the forward and the backward pass.
        self.network.require_backward_grad_sync = last  # type: ignore[assignment]
        return super().forward(images)


def average_in_bf16(_state: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """DDP's hook for a bucket of gradients. (torch's own needs NCCL.)"""
    gradients = bucket.buffer()
    halves = gradients.to(torch.bfloat16).div_(dist.get_world_size())
    work = dist.all_reduce(halves, async_op=True)
    return work.get_future().then(lambda _: gradients.copy_(halves))
