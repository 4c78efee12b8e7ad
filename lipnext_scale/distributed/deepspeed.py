"""DeepSpeed's ZeRO-1, 2 and 3.

DeepSpeed reduces gradients, cuts weights and state into flat partitions and gathers weights. All
else is ours: both optimizers, schedule, accumulation, the gradient's norm and clipping,
checkpoints. Partitions hold whole blocks' pairs (R, W), so that the manifold step is local: ZeRO-1
and 2 get identities as padding, and ZeRO-3 is refused where it would cut a pair.

`_find_partitions`, `_gradients_of` and `publish` use DeepSpeed's internals, of version 0.19.8;
asserts on sizes check them.
"""

import logging
import math
import os
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lipnext_scale.checkpoint import StateShard, StateShards
from lipnext_scale.distributed.engine import (
    DTYPES,
    Engine,
    entry_shards,
    has_entries,
    parameter_names,
)
from lipnext_scale.models import LipNeXt, LipNeXtConfig
from lipnext_scale.models.lipnext import NamedPart, named_parts
from lipnext_scale.optim import OptimConfig, Optimizers, split_parameters
from lipnext_scale.utils.config import ConfigError
from lipnext_scale.utils.cpu import step_threads

# --------------------------------------------------------------------------------------------------
# Where ZeRO puts the numbers of a parameter: pure functions, the same on every rank.
#
# ZeRO-1, 2   the parameters of a group one after the other, padded, cut into equal parts
# ZeRO-3      every parameter by itself, padded, cut into equal parts

ALIGNMENT = 2  # DeepSpeed pads a group of ZeRO-1 and 2 to a multiple of this many numbers per rank


@dataclass(frozen=True)
class Slot:
    """Entries [start, stop) of a flattened parameter, from `offset` on in a rank's partition."""

    index: int  # of the parameter in its group
    start: int
    stop: int
    offset: int

    @property
    def in_partition(self) -> slice:
        return slice(self.offset, self.offset + self.stop - self.start)

    @property
    def in_parameter(self) -> slice:
        return slice(self.start, self.stop)


def flat_group_slots(sizes: Sequence[int], ranks: int, rank: int) -> tuple[int, list[Slot]]:
    """ZeRO-1 and 2: (length of every rank's partition, what this rank has in it)."""
    length = -(-sum(sizes) // (ALIGNMENT * ranks)) * ALIGNMENT
    begin, end = rank * length, (rank + 1) * length
    position, slots = 0, []
    for index, size in enumerate(sizes):
        low, high = max(begin, position), min(end, position + size)
        if low < high:
            slots.append(Slot(index, low - position, high - position, low - begin))
        position += size
    return length, slots


def parameter_slots(sizes: Sequence[int], ranks: int, rank: int) -> tuple[int, list[Slot]]:
    """ZeRO-3: the same for parameters that share a flat partition, each cut by itself."""
    offset, slots = 0, []
    for index, size in enumerate(sizes):
        length = -(-size // ranks)
        low, high = min(rank * length, size), min((rank + 1) * length, size)
        if low < high:
            slots.append(Slot(index, low, high, offset))
        offset += length
    return offset, slots


def has_whole_pairs(length: int, slots: Sequence[Slot], width: int) -> bool:
    """Whether a partition is a stack of whole pairs of matrices [2, width, width]."""
    edges = [length, *(edge for s in slots for edge in (s.start, s.stop, s.offset))]
    return all(edge % (2 * width**2) == 0 for edge in edges)


# --------------------------------------------------------------------------------------------------
# Our optimizers on DeepSpeed's partitions.
#
# DeepSpeed steps one optimizer, the client, whose parameters it replaces by its flat float32
# partitions. The client steps ManifoldAdam and LookaheadNAdam, whose parameters are views of the
# partitions, [g, 2, d, d] of those that hold matrices.


class Partition:
    """A flat float32 tensor of this rank, and what of which parameters it holds.

    names: of the parameters by `Slot.index`; "" for padding.
    width: of the matrices; None if it holds none.
    view: the same numbers as our optimizers see them, [g, 2, width, width] of matrices.
    """

    def __init__(
        self, flat: Tensor, names: list[str], layout: tuple[int, list[Slot]], width: int | None
    ) -> None:
        length, slots = layout
        assert flat.dtype == torch.float32 and flat.is_contiguous()
        assert flat.numel() == length, "DeepSpeed cuts its partitions in another way"
        self.flat, self.names, self.slots, self.width = flat, names, slots, width
        self.view = flat.detach()
        if width is not None:
            assert has_whole_pairs(length, slots, width), "a partition cuts through a block"
            self.view = self.view.view(-1, 2, width, width)

    def held(self) -> Iterator[tuple[str, Slot]]:
        """All but padding: parameters' names and where their numbers are."""
        return ((self.names[s.index], s) for s in self.slots if self.names[s.index])


class ClientOptimizer(torch.optim.Optimizer):
    """What DeepSpeed steps, with gradients in its partitions: once for each group (ZeRO-1 and 2) or
    sub-group (ZeRO-3), which are alone in `param_groups` then."""

    def __init__(self, groups: Sequence[Sequence[nn.Parameter]]) -> None:
        super().__init__([{"params": list(group)} for group in groups], {"lr": 0.0})
        # By the id of its flat tensor every partition, and the optimizer that steps it.
        self.attached: dict[int, tuple[Partition, torch.optim.Optimizer]] = {}
        self.idle = False  # a step then moves nothing

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        if self.idle:
            return
        flats = [flat for group in self.param_groups for flat in group["params"]]
        moving = [self.attached[id(flat)] for flat in flats if flat.grad is not None]
        for partition, _ in moving:
            flat, view = partition.flat, partition.view
            assert flat.grad is not None and flat.data_ptr() == view.data_ptr()
            view.grad = flat.grad.view_as(view)
        for optimizer in {id(optimizer): optimizer for _, optimizer in moving}.values():
            optimizer.step()
        for partition, _ in moving:
            partition.view.grad = None


class ZeroOptimizers(Optimizers):
    """Both optimizers on partitions; `publish` follows every change outside a step."""

    def __init__(self, engine: "DeepSpeedEngine", config: OptimConfig) -> None:
        self._engine = engine
        named = [(f"partition {i}", p) for i, p in enumerate(engine.partitions)]
        orthogonal = [(name, p.view) for name, p in named if p.width]
        euclidean = [(name, p.view) for name, p in named if not p.width]
        super().__init__((orthogonal, euclidean), config)
        engine.client.attached = {id(p.flat): (p, self.owner(p)) for p in engine.partitions}

    def owner(self, partition: Partition) -> torch.optim.Optimizer:
        owner = self.manifold if partition.width else self.euclidean
        assert isinstance(owner, torch.optim.Optimizer)
        return owner

    def step(self, scale: Tensor | None = None, usable: Tensor | None = None) -> None:
        if scale is not None:
            self._engine.scale_gradients(scale)
        if usable is None or bool(usable):
            self._engine.step()
        else:
            self._engine.discard_gradients()

    def zero_grad(self) -> None:
        pass  # DeepSpeed's step has dropped them

    def retract(self) -> None:
        super().retract()
        self._engine.publish()

    @contextmanager
    def slow_weights(self) -> Iterator[None]:
        try:
            with super().slow_weights():
                self._engine.publish()
                yield
        finally:
            self._engine.publish()


# --------------------------------------------------------------------------------------------------

Parameters = list[nn.Parameter]
SMALLEST_BUCKET = 1 << 20
OLDEST_DEEPSPEED = (0, 19, 8)  # as in pyproject.toml


class DeepSpeedEngine(Engine):
    name = "deepspeed"

    def describe(self) -> str:
        offload = ", optimizer on the CPU" if self.config.offload_optimizer else ""
        stage = f"{self.name} ZeRO-{self.config.zero_stage} × {self.processes.world_size}"
        return f"{stage}{offload}, {self.config.precision}"

    # Building

    @property
    def shards(self) -> int:
        return self.processes.world_size if self.config.zero_stage == 3 else 1

    def place(self, config: LipNeXtConfig) -> LipNeXt:
        model, ranks = super().place(config), self.shards
        if not any(group.count % ranks for group in model.block_groups()):
            return model
        would = f"ZeRO-3 on {ranks} processes would cut through blocks"
        right = "use parallel.zero_stage = 2 or parallel.engine = 'fsdp'"
        if config.depth % ranks:
            raise ConfigError("model.depth", config.depth, f"{would}: no multiple of them; {right}")
        why = f"{would}: no multiple of them; 0 chooses a size that fits"
        raise ConfigError("model.blocks_per_bank", config.blocks_per_bank, f"{why}, or {right}")

    def build(self, config: LipNeXtConfig, seed: int) -> LipNeXt:
        self.model = self.place(config)
        deepspeed = import_deepspeed(self.processes.device)
        self._join(deepspeed)
        named = dict(self.model.named_parameters())
        self.shapes = {name: tuple(p.shape) for name, p in named.items()}  # ZeRO-3 drops them
        names = parameter_names(self.model)
        self.parts: dict[str, list[NamedPart]] = {name: [] for name in named}
        for part in named_parts(self.model):
            self.parts[names[id(part.parameter)]].append(part)
        settings = self._settings()
        self._allocate(deepspeed, settings)
        self.padding = self._make_padding(config)
        groups = self._parameter_groups()
        self.client = ClientOptimizer(groups)
        self.deepspeed, *_ = deepspeed.initialize(
            model=_Padded(self.model, self.padding),
            optimizer=self.client,
            config=settings,
            dist_init_required=False,
        )
        self.network = self.deepspeed
        self.processes.apply_timeout(self.deepspeed.data_parallel_group)
        self.zero: Any = self.deepspeed.optimizer
        self.partitions = self._find_partitions(groups, config.width)
        self._initialise(seed)
        if self.config.offload_optimizer:
            self._use_cores()
        return self.model

    def _use_cores(self) -> None:
        """Those of the node, shared by its ranks: launchers give a rank one thread."""
        host, own = os.uname().nodename, os.sched_getaffinity(0)
        everyone = self.processes.gather_objects((host, own))
        # Not those of this rank alone: ranks may be bound to the cores near their GPU.
        of_node = set().union(*(cores for there, cores in everyone if there == host))
        ranks = self.processes.local_world_size
        if threads := step_threads(len(own), len(of_node), ranks, os.environ):
            torch.set_num_threads(threads)

    def _join(self, deepspeed: ModuleType) -> None:
        """Make DeepSpeed use torch's process group; it would think itself alone otherwise."""
        os.environ.setdefault("LOCAL_RANK", str(self.processes.local_rank))  # it requires one
        # None of its compiled operations is used. Looking for those that would compile here runs
        # compilers, and prints a warning for each on a machine without nvcc; and its all-reduce in
        # shared memory would be compiled, for minutes, with a lock that a killed process leaves.
        deepspeed.ops.__compatible_ops__ = {}
        deepspeed.init_distributed(
            auto_mpi_discovery=False, dist_init_required=False, verbose=False
        )

    def _settings(self) -> dict[str, Any]:
        """DeepSpeed moves numbers; everything else is switched off. Batches are the trainer's."""
        config, on_gpu = self.config, self.processes.device.type == "cuda"
        largest = max(math.prod(shape) for shape in self.shapes.values())
        bucket = max(largest, SMALLEST_BUCKET)
        zero: dict[str, Any] = {
            "stage": config.zero_stage,
            "overlap_comm": on_gpu and config.zero_stage > 1,
            "round_robin_gradients": False,  # it would reorder what `flat_group_slots` relies on
            # This many numbers are allocated; the defaults take 2 GB.
            "reduce_bucket_size": bucket,
            "allgather_bucket_size": 2 * bucket,
        }
        if config.zero_stage == 3:
            zero |= {
                "stage3_prefetch_bucket_size": largest,
                "stage3_max_live_parameters": 2 * largest,
                "stage3_max_reuse_distance": largest,
                "stage3_param_persistence_threshold": 0,
                "memory_efficient_linear": False,  # it would replace F.linear globally
            }
        if config.offload_optimizer:
            zero["offload_optimizer"] = {"device": "cpu", "pin_memory": on_gpu}
        return {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": config.accumulation,
            "gradient_clipping": 0.0,  # the engine clips; DeepSpeed's default is 1.0
            "bf16": {"enabled": config.precision == "bf16"},
            "data_types": {"grad_accum_dtype": "fp32"},
            "communication_data_type": config.reduce_precision,
            "zero_allow_untested_optimizer": True,  # ours
            "zero_force_ds_cpu_optimizer": False,
            "zero_optimization": zero,
        }

    def _allocate(self, deepspeed: ModuleType, settings: dict[str, Any]) -> None:
        """Memory for all weights, or with ZeRO-3 for one whole group at a time."""
        device, dtype = self.processes.device, DTYPES[self.config.precision]
        if self.config.zero_stage < 3:
            self.model.to_empty(device=device).to(dtype)
            return
        for module in [*self.model.block_groups(), self.model.head]:
            module.to_empty(device=device).to(dtype)
            deepspeed.zero.Init(
                module=module,
                config_dict_or_path=settings,
                dtype=dtype,
                remote_device=device.type,
            )

    def _make_padding(self, config: LipNeXtConfig) -> nn.Parameter | None:
        """Identities, which get no gradient and so never change: every rank then has whole pairs.

        A pair has an even count of numbers, so that DeepSpeed adds no padding of its own.
        """
        count = -config.depth % self.processes.world_size
        if self.config.zero_stage == 3 or count == 0:
            return None
        dtype = DTYPES[self.config.precision]
        identity = torch.eye(config.width, dtype=dtype, device=self.processes.device)
        return nn.Parameter(identity.repeat(count, 2, 1, 1))

    def _parameter_groups(self) -> list[Parameters]:
        """The banks with their padding, and the rest."""
        orthogonal, euclidean = split_parameters(self.model)
        padding = [] if self.padding is None else [self.padding]
        return [[*(p for _, p in orthogonal), *padding], [p for _, p in euclidean]]

    def _find_partitions(self, groups: list[Parameters], width: int) -> list[Partition]:
        """Of this rank, in DeepSpeed's order."""
        ranks, rank = self.processes.world_size, self.processes.rank
        names = {**parameter_names(self.model), id(self.padding): ""}
        widths = [width, None]  # the first group has the matrices
        if self.config.zero_stage < 3:
            slots, members, number_of = flat_group_slots, groups, [0, 1]
            flats = [group["params"][0] for group in self.client.param_groups]
        else:
            slots, members = parameter_slots, self.zero.fp16_groups
            flats = self.zero.fp32_partitioned_groups_flat
            number_of = self.zero.sub_group_to_group_id
        found = []
        for number, (flat, parameters) in enumerate(zip(flats, members, strict=True)):
            sizes = [getattr(p, "ds_numel", p.numel()) for p in parameters]
            held = [names[id(p)] for p in parameters]
            layout = slots(sizes, ranks, rank)
            found.append(Partition(flat, held, layout, widths[number_of[number]]))
        return found

    @torch.no_grad()
    def _initialise(self, seed: int) -> None:
        """Fill the partitions, not the weights, which may be bf16."""
        groups = {f"groups.{i}.bank": g for i, g in enumerate(self.model.block_groups())}
        for partition in self.partitions:
            for name, slot in partition.held():
                here = partition.flat.detach()[slot.in_partition]
                if width := partition.width:
                    matrices = here.view(-1, width, width)
                    for index, matrix in enumerate(matrices, start=slot.start // width**2):
                        matrix.copy_(groups[name].initial_matrix(index, seed, matrix))
                elif name == "head.weight":
                    here.copy_(self.model.head.initial_weight(seed).flatten()[slot.in_parameter])
                else:
                    here.zero_()
        self.publish()

    @torch.no_grad()
    def publish(self) -> None:
        """Bring the model's weights up to the partitions."""
        if self.config.zero_stage < 3:
            self.zero.update_lp_params()
            return
        # A pass without gradients leaves gathered weights behind, which the next one would use.
        self.deepspeed.empty_partition_cache()
        for number in range(len(self.partitions)):
            self.zero._reassign_or_swap_out_partitioned_parameters(number)
        if self.zero.persistent_parameters:
            self.zero.persistent_parameters[0].all_gather(self.zero.persistent_parameters)
        self.zero.invalidate_secondary_tensor()

    def parameter_count(self) -> int:
        return sum(math.prod(shape) for shape in self.shapes.values())

    # A step

    def optimizers(self, config: OptimConfig) -> Optimizers:
        return ZeroOptimizers(self, config)

    def forward(self, images: Tensor, last: bool = True) -> tuple[Tensor, Tensor]:
        self.deepspeed.set_gradient_accumulation_boundary(last)
        return self.deepspeed(images)

    def backward(self, loss: Tensor) -> None:
        self.deepspeed.backward(loss, scale_wrt_gas=False)
        if self.config.offload_optimizer and self.processes.device.type == "cuda":
            # Copies to the CPU may still be running. DeepSpeed waits for them in its step; norm
            # and clipping come before that.
            torch.cuda.synchronize(self.processes.device)

    def step(self) -> None:
        self.deepspeed.step()
        # With the optimizer on the CPU, and with ZeRO-1 in bf16, it squares gradients before our
        # clipping: that may overflow float32 though they are finite.
        if not self.deepspeed.was_step_applied():
            raise FloatingPointError("DeepSpeed made no step: the gradient's norm overflows")

    def scale_gradients(self, factor: Tensor) -> None:
        for gradient, _ in self._gradients():
            gradient.mul_(factor.to(gradient))

    def discard_gradients(self) -> None:
        """By a step of DeepSpeed's that moves nothing: it knows everywhere they are stored."""
        self.client.idle = True
        try:
            self.deepspeed.step()
        finally:
            self.client.idle = False
        if self.config.zero_stage < 3 and self.config.offload_optimizer:
            # Sums of parts in bf16, which it keeps when it skips a step.
            for number in range(len(self.partitions)):
                self.zero.averaged_gradients[number] = None

    def _gradients(self) -> list[tuple[Tensor, int]]:
        parts = range(len(self.partitions))
        return [(gradient, 1) for number in parts for gradient in self._gradients_of(number)]

    def _gradients_of(self, number: int) -> list[Tensor]:
        """Tensors that one after the other are the gradient of a partition."""
        flat, zero = self.partitions[number].flat, self.zero
        if self.config.offload_optimizer and flat.grad is not None:
            tensors = [flat.grad]
        elif hasattr(zero, "fp32_groups_gradient_flat_partition"):  # ZeRO-1 in bf16: another class
            tensors = [zero.fp32_groups_gradient_flat_partition[number]]
        else:
            tensors = zero.averaged_gradients[number]
        assert sum(tensor.numel() for tensor in tensors) == flat.numel()
        return tensors

    def named_gradients(self) -> Iterator[tuple[str, Tensor, int]]:
        for number, partition in enumerate(self.partitions):
            tensors = self._gradients_of(number)
            for name, slot in partition.held():
                # All parts of a parameter have one size.
                parts = self.parts[name]
                size, shift = math.prod(self.shapes[name]) // len(parts), slot.offset - slot.start
                for index, part in enumerate(parts):
                    start, stop = max(slot.start, index * size), min(slot.stop, (index + 1) * size)
                    for numbers in between(tensors, start + shift, stop + shift):
                        yield part.name, numbers, 1

    # Checkpoints, under the names of every engine.
    #
    # Matrices are whole in a partition, so their shards are views of it and of its optimizer state.
    # All other parameters may be cut anywhere, which makes no rectangle; but they are small. So
    # every rank gathers them whole and after loading copies back what it holds of them.

    def state_shards(self, optimizers: Optimizers | None) -> StateShards:
        if optimizers is not None:
            optimizers.initialise_state()
        shards = self.whole_matrices(optimizers)
        for partition in (p for p in self.partitions if not p.width):
            for kind, tensor in tensors_of(partition, optimizers).items():
                for name in partition.names:  # also those of which this rank holds nothing
                    whole = self._gather(partition, tensor, name)
                    for part in self.parts[name]:
                        view = part.of(whole)
                        offset = (0,) * view.dim()
                        shards[f"{kind}.{part.name}"] = StateShard(view, tuple(view.shape), offset)
        return shards

    @torch.no_grad()
    def _gather(self, partition: Partition, tensor: Tensor, name: str) -> Tensor:
        whole = tensor.new_zeros(math.prod(self.shapes[name]))
        for held, slot in partition.held():
            if held == name:
                whole[slot.in_parameter] = tensor[slot.in_partition]
        dist.all_reduce(whole.view(torch.int32))  # bits, to which the other ranks add zeros
        return whole.view(self.shapes[name])

    def whole_matrices(self, optimizers: Optimizers | None) -> StateShards:
        shards: StateShards = {}
        for partition in self.partitions:
            matrix = (partition.width or 0) ** 2
            for name, slot in partition.held() if matrix else ():
                first, last, at = (n // matrix for n in (slot.start, slot.stop, slot.offset))
                tensors = tensors_of(partition, optimizers)
                for place, part in enumerate(self.parts[name][first:last], start=at):
                    shards |= entry_shards(part, divmod(place, 2), tensors)
        return shards

    @torch.no_grad()
    def state_loaded(self, shards: StateShards, optimizers: Optimizers | None) -> None:
        for partition in (p for p in self.partitions if not p.width):
            for kind, tensor in tensors_of(partition, optimizers).items():
                for name, slot in partition.held():
                    parts = [shards[f"{kind}.{part.name}"].tensor for part in self.parts[name]]
                    whole = torch.cat([part.flatten() for part in parts])
                    tensor[slot.in_partition] = whole[slot.in_parameter]
        super().state_loaded(shards, optimizers)
        self.publish()


def tensors_of(partition: Partition, optimizers: Optimizers | None) -> dict[str, Tensor]:
    """The partition and, with optimizers, their state that is laid out as it, by kind."""
    tensors = {"model": partition.view}
    if isinstance(optimizers, ZeroOptimizers):
        tensors |= optimizers.owner(partition).state[partition.view]
    return {kind: tensor for kind, tensor in tensors.items() if has_entries(tensor)}


def between(tensors: Sequence[Tensor], start: int, stop: int) -> Iterator[Tensor]:
    """Numbers [start, stop) of tensors that follow each other, without copying them."""
    position = 0
    for tensor in tensors:
        low, high = max(start, position), min(stop, position + tensor.numel())
        if low < high:
            yield tensor.flatten()[low - position : high - position]
        position += tensor.numel()


class _Padded(nn.Module):
    """The model with the padding beside it, whose module DeepSpeed wants to know."""

    def __init__(self, model: LipNeXt, padding: nn.Parameter | None) -> None:
        super().__init__()
        self.model, self.padding = model, padding

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        return self.model(images, with_head=True)


def require_deepspeed() -> None:
    install = "pip install 'lipnext_scale[deepspeed]'"
    if find_spec("deepspeed") is None:
        right = f"DeepSpeed is not installed here: {install}"
        raise ConfigError("parallel.engine", "deepspeed", right)
    here = version("deepspeed")
    if tuple(map(int, re.findall(r"\d+", here)[:3])) < OLDEST_DEEPSPEED:
        oldest = ".".join(map(str, OLDEST_DEEPSPEED))
        right = f"DeepSpeed {here} is older than {oldest}, which this was written for: {install}"
        raise ConfigError("parallel.engine", "deepspeed", right)


def import_deepspeed(device: torch.device) -> ModuleType:
    """Only for the engine that needs it: it takes seconds, and logs much."""
    require_deepspeed()
    os.environ["DS_ACCELERATOR"] = device.type  # or it would take any GPU it finds
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    deepspeed = import_module("deepspeed")
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)  # its import sets a level of its own
    # It calls collectives by their former names, of which torch warns in every step.
    warnings.filterwarnings("ignore", r".*torch\.distributed\..*_tensor", FutureWarning)
    return deepspeed
