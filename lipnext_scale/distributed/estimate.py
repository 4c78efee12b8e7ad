"""What a rank will hold and send, from shapes alone: nothing is allocated and nothing is run.

`tests/distributed` compares these figures with what real processes hold and send.
"""

from dataclasses import dataclass, replace

import torch.distributed as dist
from torch import nn

from lipnext_scale.distributed import build_engine
from lipnext_scale.distributed.config import ParallelConfig
from lipnext_scale.distributed.engine import Engine
from lipnext_scale.distributed.fsdp import SHARD, FSDPEngine
from lipnext_scale.distributed.processes import fake_group
from lipnext_scale.distributed.replicas import bank_sharings
from lipnext_scale.distributed.rows import SLOTS, make_buckets, row_range
from lipnext_scale.models import BlockGroup, LipNeXt, LipNeXtConfig
from lipnext_scale.optim import OptimConfig, local_part, split_parameters

FP32 = 4
WIDTHS = {"fp32": 4, "bf16": 2}
# Beside its tensors both optimizers count each parameter's steps: an int64 for a matrix or a bank,
# float32 `step` and `mu_product` for any other.
COUNTERS = 8


@dataclass(frozen=True)
class RankEstimate:
    """Bytes on one rank, and sent by it in one step."""

    matrices: float  # orthogonal matrices' worth of parameters, without FSDP's padding
    parameters: int
    gradients: int
    optimizer: int
    gathered: int = 0  # whole weights (and gradients, if summed last) that are there at one time
    buffers: int = 0  # the row layout's, for exchanges with the owners
    all_gather: int = 0  # and broadcasts
    reduce_scatter: int = 0  # and reductions to one rank
    all_reduce: int = 0
    all_to_all: int = 0

    @property
    def kept(self) -> int:
        return self.parameters + self.gradients + self.optimizer

    @property
    def sent(self) -> int:
        return self.all_gather + self.reduce_scatter + self.all_reduce + self.all_to_all


def estimate(
    engine: Engine, model: LipNeXt, optim: OptimConfig, replica: int | None = None
) -> RankEstimate:
    """Of this rank, for a model from `engine.place`. All gradients are taken to be there.

    replica: of a rank that holds the same part of the model, but may have another share.
    """
    orthogonal, euclidean = split_parameters(model)
    banks, slow = [p for _, p in orthogonal], bool(optim.lookahead)
    own = stepped = _local_numbers(banks)
    counted = len(orthogonal) + len(euclidean)
    if engine.shares_step:
        sharings = bank_sharings(model, engine.replicas())
        if replica is None:
            replica = dist.get_rank(engine.replicate_group())
        runs = [(p, run) for name, p in orthogonal for run in sharings[name].share(replica)]
        stepped = sum(local_part(p)[run].numel() for p, run in runs)
        counted = len(runs) + len(euclidean)
    # Moments, and with Lookahead the buffer and the slow weights.
    state = stepped * (2 + 2 * slow)
    in_unit = 2 if optim.parametrisation == "product" else 1
    shards, beside = 1, {}
    if isinstance(engine, FSDPEngine):
        shards = engine.shards
        beside = {"gathered": _gathered_bytes(model, engine), **_fsdp_bytes(model, engine)}
        if engine.config.weight_layout == "row":  # at the owner, with X itself
            owned, buffers, sent = _row_layout(engine, model.config, in_unit)
            own = stepped = owned * model.config.width**2
            state = own * (3 + 2 * slow)
            counted = owned // in_unit + len(euclidean)
            beside |= {"buffers": buffers, "all_to_all": sent}
    elif engine.name == "ddp":
        beside = _ddp_bytes(model, banks, engine)
    if in_unit == 2:  # M
        state += stepped // 2
    state += _local_numbers([p for _, p in euclidean]) * (2 + slow)
    parameters = FP32 * _padded_numbers(model, shards)
    return RankEstimate(
        matrices=own / model.config.width**2,
        parameters=parameters,
        gradients=parameters,
        optimizer=FP32 * state + COUNTERS * counted,
        **beside,
    )


def _local_numbers(parameters: list[nn.Parameter]) -> int:
    return sum(local_part(parameter).numel() for parameter in parameters)


def _gathered_bytes(model: LipNeXt, engine: FSDPEngine) -> int:
    """Whole weights that are there at one time.

    The head and all groups; or with `reshard_after_forward` of the groups the one
    that computes and those gathered ahead of it. FSDP gathers one ahead in the backward pass even
    without prefetch, and computes with a copy even if there is one shard only. Gradients that are
    summed over ranks after the last part are kept whole until then.
    """
    config, shards = engine.config, engine.shards
    compute, reduce = WIDTHS[config.precision], WIDTHS[config.reduce_precision]
    groups = [shards * _padded_numbers(group, shards) for group in model.block_groups()]
    if config.reshard_after_forward:
        groups = sorted(groups)[-1 - max(1, config.prefetch) :]
    gathered = compute * sum(groups) + FP32 * shards * _padded_numbers(model.head, shards)
    if config.accumulation > 1 and not config.reduce_every_part:
        gathered += reduce * sum(_padded_numbers(group, 1) for group in model.block_groups())
        gathered += FP32 * _padded_numbers(model.head, 1)
    return gathered


def _fsdp_bytes(model: LipNeXt, engine: FSDPEngine) -> dict[str, int]:
    config, shards, replicas = engine.config, engine.shards, engine.replicas()
    reductions = config.accumulation if config.reduce_every_part else 1
    total = {"all_gather": 0, "reduce_scatter": 0, "all_reduce": 0}
    for unit in [*model.block_groups(), model.head]:
        in_fp32 = unit is model.head  # whatever the configuration says; and gathered once a part
        compute = FP32 if in_fp32 else WIDTHS[config.precision]
        reduce = FP32 if in_fp32 else WIDTHS[config.reduce_precision]
        gathers = 1  # and there for all parts
        if config.reshard_after_forward:
            gathers = config.accumulation * (1 if in_fp32 else 2)
        moving = _padded_numbers(unit, shards)
        total["all_gather"] += gathers * (shards - 1) * compute * moving
        total["reduce_scatter"] += reductions * (shards - 1) * reduce * moving
        if engine.shares_step and isinstance(unit, BlockGroup):
            bank = _local_numbers([unit.bank])
            total["reduce_scatter"] += (replicas - 1) * reduce * bank // replicas
            total["all_gather"] += (replicas - 1) * compute * bank // replicas
            moving -= _padded_part(unit.bank, shards)
        total["all_reduce"] += 2 * (replicas - 1) * reduce * moving // replicas
    return total


def _padded_numbers(module: nn.Module, shards: int) -> int:
    return sum(_padded_part(parameter, shards) for parameter in module.parameters())


def _padded_part(parameter: nn.Parameter, shards: int) -> int:
    """Numbers of a parameter that every rank keeps and sends.

    FSDP pads uneven shards to the largest, also on a rank that has none: the padding is in the
    memory of the parameter and of its gradient, and on the wire, but not in optimizer state.
    """
    rows = parameter.shape[0]
    return -(-rows // shards) * (parameter.numel() // rows)


def _ddp_bytes(model: LipNeXt, banks: list[nn.Parameter], engine: Engine) -> dict[str, int]:
    ranks, width = engine.replicas(), WIDTHS[engine.config.reduce_precision]
    numbers, sent = _padded_numbers(model, 1), {}
    if engine.shares_step:
        shared, compute = _local_numbers(banks), WIDTHS[engine.config.precision]
        numbers -= shared
        sent = {
            "reduce_scatter": (ranks - 1) * width * shared // ranks,
            "all_gather": (ranks - 1) * compute * shared // ranks,
        }
    return {"all_reduce": 2 * (ranks - 1) * width * numbers // ranks, **sent}


def _row_layout(engine: FSDPEngine, model: LipNeXtConfig, in_unit: int) -> tuple[int, int, int]:
    """(matrices that this rank owns, bytes of buffers, bytes sent) in the row layout.

    A rank owns some of the matrices and has rows of all. It sends its rows to their owners, and the
    owned matrices' rows back. Buffers are outboxes and inboxes both ways, and whole gradients.
    """
    mesh, config = engine.mesh[SHARD], engine.config
    ranks, rank = mesh.size(), mesh.get_local_rank()
    units, unit = 2 * model.depth // in_unit, in_unit * model.width**2
    start, stop = row_range(model.width, ranks, rank)
    here = (stop - start) * unit // model.width  # numbers of a unit in this rank's rows
    buckets = make_buckets(units, FP32 * unit, ranks, config.row_bucket_mb << 20)
    owned = [sum(u % ranks == rank for u in bucket) for bucket in buckets]
    leaving = [here * (len(b) - own) for b, own in zip(buckets, owned, strict=True)]
    arriving = [(unit - here) * own for own in owned]
    width = WIDTHS[config.precision]
    boxes = SLOTS * (max(leaving) + max(arriving)) * (FP32 + width)
    return (
        in_unit * sum(owned),
        boxes + SLOTS * FP32 * unit * max(owned),
        FP32 * sum(leaving) + width * sum(arriving),
    )


# --------------------------------------------------------------------------------------------------
# Of a configuration alone, for one process that stands for all of them.


def estimate_of_rank(
    parallel: ParallelConfig, model: LipNeXtConfig, optim: OptimConfig, ranks: int, per_node: int
) -> RankEstimate:
    """Of rank 0, without activations; of ZeRO, the least that it can hold."""
    if parallel.engine != "deepspeed":
        with fake_group(0, ranks):
            engine = build_engine(parallel, "cpu", per_node)
            return estimate(engine, engine.place(model), optim)
    alone, stage = estimate_of_rank(ParallelConfig(), model, optim, 1, 1), parallel.zero_stage
    return replace(
        alone,
        parameters=alone.parameters // (ranks if stage >= 3 else 1),
        gradients=alone.gradients // (ranks if stage >= 2 else 1),
        optimizer=0 if parallel.offload_optimizer else alone.optimizer // ranks,
    )


def state_bytes(model: LipNeXtConfig, optim: OptimConfig) -> int:
    """Weights and state of both optimizers: a checkpoint, which is the same for every engine."""
    one_of_w_and_m = replace(optim, parametrisation="merged")
    alone = estimate_of_rank(ParallelConfig(), model, one_of_w_and_m, 1, 1)
    return alone.parameters + alone.optimizer
