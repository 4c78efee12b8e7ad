"""What a rank will hold and send, from shapes alone: nothing is allocated and nothing is run.

`tests/parallel` compares these figures with what real processes hold and send.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from lipnext_scale.models import LipNeXt
from lipnext_scale.optim import OptimConfig, Optimizers, local_part, split_parameters
from lipnext_scale.parallel.engine import Engine
from lipnext_scale.parallel.fsdp import REPLICATE, SHARD, FSDPEngine
from lipnext_scale.parallel.rows import SLOTS, assign_owners, make_buckets, row_range

# --------------------------------------------------------------------------------------------------
# What a rank keeps in memory from step to step, by purpose.


@dataclass(frozen=True)
class Memory:
    """Bytes on this rank that last from step to step."""

    parameters: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer


def training_memory(engine: Engine, optimizers: Optimizers) -> Memory:
    """This rank's bytes of parameters, gradients and optimizer state.

    The owners' matrices of the row layout count as optimizer state: the model has rows beside them.
    DeepSpeed frees gradients in its step, so that none are left to count; buffers that it keeps for
    them are its own affair and not counted.
    """
    owned = engine.owned_matrices()
    states: list[Mapping[Any, Any]] = [optimizers.euclidean.state]
    if owned is None:
        states.append(optimizers.manifold.state)  # type: ignore[attr-defined]
    else:
        states += [
            {"matrix": matrix, **owned.state_of(name)} for name, matrix in owned.owned.items()
        ]
    return memory_per_rank(engine.held_weights(), states)


def memory_per_rank(
    parameters: nn.Module | Iterable[Tensor], states: Iterable[Mapping[Any, Any]] = ()
) -> Memory:
    """Measure a model or its parameters, their gradients and optimizers' `state` mappings.

    Of a DTensor the local part counts. Storages are what takes memory, so each counts once and
    whole, with its padding, at the first of parameters, gradients and optimizer to hold it.
    """
    if isinstance(parameters, nn.Module):
        parameters = parameters.parameters()
    kept = list(parameters)
    seen: set[tuple[torch.device, int]] = set()
    return Memory(
        parameters=_new_bytes(kept, seen),
        gradients=_new_bytes([parameter.grad for parameter in kept], seen),
        optimizer=_new_bytes([list(state.values()) for state in states], seen),
    )


def _new_bytes(value: Any, seen: set[tuple[torch.device, int]]) -> int:
    """Bytes of the storages below `value` that are not in `seen`, which learns them."""
    total = 0
    for tensor in _local_tensors(value):
        storage = tensor.untyped_storage()
        key = (storage.device, storage.data_ptr())
        if tensor.is_meta or key in seen:
            continue
        seen.add(key)
        total += storage.nbytes()
    return total


def _local_tensors(value: Any) -> Iterator[Tensor]:
    """Every tensor in nested mappings, lists and tuples, without what else is there."""
    if isinstance(value, DTensor):
        yield value.to_local()
    elif isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from _local_tensors(list(value.values()))
    elif isinstance(value, list | tuple):
        for element in value:
            yield from _local_tensors(element)


FP32 = 4
WIDTHS = {"fp32": 4, "bf16": 2}
# Beside its tensors both optimizers count each parameter's steps: an int64 for a matrix or a bank,
# float32 `step` and `mu_product` for any other.
COUNTERS = 8
NamedParameters = list[tuple[str, nn.Parameter]]


@dataclass(frozen=True)
class RankEstimate:
    """Bytes on one rank, and sent by it in one step."""

    matrices: float  # orthogonal matrices' worth of parameters, without FSDP's padding
    parameters: int
    gradients: int
    optimizer: int
    gathered: int = 0  # whole weights (and gradients, if summed last) that are there at one time
    buffers: int = 0  # the row layout's, for exchanges with the owners
    all_gather: int = 0
    reduce_scatter: int = 0
    all_reduce: int = 0
    all_to_all: int = 0

    @property
    def kept(self) -> int:
        return self.parameters + self.gradients + self.optimizer

    @property
    def sent(self) -> int:
        return self.all_gather + self.reduce_scatter + self.all_reduce + self.all_to_all


def estimate(engine: Engine, model: LipNeXt, optim: OptimConfig) -> RankEstimate:
    """Of this rank, for a model from `engine.place`. All gradients are taken to be there."""
    orthogonal, euclidean = split_parameters(model)
    trainable = [p for p in model.parameters() if p.requires_grad]
    own, slow = _local_numbers([p for _, p in orthogonal]), bool(optim.lookahead)
    # Moments, and with Lookahead the buffer and the slow weights.
    state, counted = own * (2 + 2 * slow), len(orthogonal) + len(euclidean)
    shards, beside = 1, {}
    if isinstance(engine, FSDPEngine):
        shards = engine.mesh[SHARD].size()
        beside = {"gathered": _gathered_bytes(model, engine), **_fsdp_bytes(model, engine)}
        if engine.config.weight_layout == "row":  # at the owner, with X itself
            rows = _Rows.of(engine, orthogonal)
            state, counted = rows.owned_numbers * (3 + 2 * slow), len(rows.owned) + len(euclidean)
            beside |= {"buffers": rows.buffer_bytes(), "all_to_all": rows.bytes_sent()}
    elif engine.name == "ddp":
        beside = {"all_reduce": _ddp_bytes(trainable, engine)}
    state += _local_numbers([p for _, p in euclidean]) * (2 + slow)
    return RankEstimate(
        matrices=own / model.config.width**2,
        parameters=FP32 * sum(_padded_part(p, shards) for p in model.parameters()),
        gradients=FP32 * sum(_padded_part(p, shards) for p in trainable),
        optimizer=FP32 * state + COUNTERS * counted,
        **beside,
    )


def _local_numbers(parameters: list[nn.Parameter]) -> int:
    return sum(local_part(parameter).numel() for parameter in parameters)


def _gathered_bytes(model: LipNeXt, engine: FSDPEngine) -> int:
    """Whole weights that are there at one time.

    The head and all groups, with their M·Rᵀ; or with `reshard_after_forward` of the groups the one
    that computes and those gathered ahead of it. FSDP gathers one ahead in the backward pass even
    if not told to, and computes with a copy even if there is one shard only. Gradients that are
    summed over ranks after the last part are kept whole until then.
    """
    config, shards = engine.config, engine.mesh[SHARD].size()
    compute, reduce = WIDTHS[config.precision], WIDTHS[config.reduce_precision]
    groups = [shards * _padded_numbers(group, shards) for group in model.block_groups()]
    if config.reshard_after_forward:
        groups = sorted(groups)[-1 - max(1, config.prefetch) :]
    gathered = compute * sum(groups) + FP32 * shards * _padded_numbers(model.head, shards)
    made_again = config.reshard_after_forward or config.recompute_activations or config.compile
    if model.config.parametrisation == "product" and not made_again:
        gathered += compute * model.config.bank_parameters // 2
    if config.accumulation > 1 and not config.reduce_every_part:
        gathered += reduce * sum(_padded_numbers(group, 1, True) for group in model.block_groups())
        gathered += FP32 * _padded_numbers(model.head, 1, True)
    return gathered


def _fsdp_bytes(model: LipNeXt, engine: FSDPEngine) -> dict[str, int]:
    config, shards = engine.config, engine.mesh[SHARD].size()
    replicas = engine.mesh[REPLICATE].size()
    reductions = config.accumulation if config.reduce_every_part else 1
    total = {"all_gather": 0, "reduce_scatter": 0, "all_reduce": 0}
    for unit in [*model.block_groups(), model.head]:
        assert isinstance(unit, FSDPModule)
        in_fp32 = unit is model.head  # whatever the configuration says; and gathered once a part
        compute = FP32 if in_fp32 else WIDTHS[config.precision]
        reduce = FP32 if in_fp32 else WIDTHS[config.reduce_precision]
        gathers = 1  # and there for all parts
        if config.reshard_after_forward:
            gathers = config.accumulation * (1 if in_fp32 else 2)
        moving = _padded_numbers(unit, shards, trainable=True)
        total["all_gather"] += gathers * (shards - 1) * compute * _padded_numbers(unit, shards)
        total["reduce_scatter"] += reductions * (shards - 1) * reduce * moving
        total["all_reduce"] += 2 * (replicas - 1) * reduce * moving // replicas
    return total


def _padded_numbers(module: nn.Module, shards: int, trainable: bool = False) -> int:
    parameters = [p for p in module.parameters() if p.requires_grad or not trainable]
    return sum(_padded_part(p, shards) for p in parameters)


def _padded_part(parameter: nn.Parameter, shards: int) -> int:
    """Numbers of a parameter that every rank keeps and sends.

    FSDP pads uneven shards to the largest, also on a rank that has none: the padding is in the
    memory of the parameter and of its gradient, and on the wire, but not in optimizer state.
    """
    rows = parameter.shape[0]
    return -(-rows // shards) * (parameter.numel() // rows)


def _ddp_bytes(parameters: list[nn.Parameter], engine: Engine) -> int:
    ranks, width = engine.processes.world_size, WIDTHS[engine.config.reduce_precision]
    return 2 * (ranks - 1) * width * sum(p.numel() for p in parameters) // ranks


@dataclass(frozen=True)
class _Rows:
    """The row layout on this rank: it owns some of the matrices, and has rows of all."""

    sides: list[int]
    owned: set[int]
    own_rows: list[int]
    buckets: list[list[int]]
    return_width: int

    @staticmethod
    def of(engine: FSDPEngine, named: NamedParameters) -> "_Rows":
        mesh, config = engine.mesh[SHARD], engine.config
        ranks, rank = mesh.size(), mesh.get_local_rank()
        sides = [parameter.shape[-1] for _, parameter in named]
        owners = assign_owners([side**3 for side in sides], ranks)
        sizes = [FP32 * side**2 for side in sides]
        ranges = [row_range(side, ranks, rank) for side in sides]
        return _Rows(
            sides=sides,
            owned={matrix for matrix, owner in enumerate(owners) if owner == rank},
            own_rows=[stop - start for start, stop in ranges],
            buckets=make_buckets(owners, sizes, ranks, config.row_bucket_mb << 20),
            return_width=WIDTHS[config.precision],
        )

    @property
    def owned_numbers(self) -> int:
        return sum(self.sides[matrix] ** 2 for matrix in self.owned)

    def bytes_sent(self) -> int:
        """This rank's rows to their owners, and the owned matrices' rows back; without the words
        that go with them."""
        return sum(
            FP32 * self._to_owners(bucket) + self.return_width * self._to_shards(bucket)
            for bucket in self.buckets
        )

    def buffer_bytes(self) -> int:
        """Outboxes and inboxes both ways, and whole gradients; without words and alignment."""
        leaving = max(self._to_owners(bucket) for bucket in self.buckets)
        arriving = max(self._to_shards(bucket) for bucket in self.buckets)
        gradients = max(
            sum(self.sides[matrix] ** 2 for matrix in self.owned.intersection(bucket))
            for bucket in self.buckets
        )
        boxes = SLOTS * (leaving + arriving) * (FP32 + self.return_width)
        return boxes + FP32 * gradients

    def _to_owners(self, bucket: list[int]) -> int:
        """Numbers of this rank's rows of matrices that others own."""
        others = [matrix for matrix in bucket if matrix not in self.owned]
        return sum(self.sides[matrix] * self.own_rows[matrix] for matrix in others)

    def _to_shards(self, bucket: list[int]) -> int:
        """Numbers of the other ranks' rows of matrices that this rank owns."""
        owned = self.owned.intersection(bucket)
        return sum(
            self.sides[matrix] * (self.sides[matrix] - self.own_rows[matrix]) for matrix in owned
        )
