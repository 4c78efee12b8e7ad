"""DeepSpeed's ZeRO-1, 2 and 3.

DeepSpeed reduces gradients, cuts weights and state into flat partitions and gathers weights. All
else is ours: both optimizers (`zero_optimizers`), schedule, accumulation, the gradient's norm and
clipping, checkpoints (`zero_pieces`). Partitions hold whole matrices, so that the manifold step is
local: ZeRO-1 and 2 get identities as padding, and ZeRO-3 is refused where it would cut a matrix.

What is used of DeepSpeed's inside, in `_find_partitions`, `_gradients_of` and `publish`, is checked
by asserts on sizes; it was written for 0.19.8.
"""

import logging
import os
import re
import warnings
from collections.abc import Iterable, Iterator
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lipnext_scale.checkpoint import StateShards
from lipnext_scale.config import ConfigError
from lipnext_scale.models import LipNeXt, LipNeXtConfig
from lipnext_scale.optim import OptimConfig, Optimizers, split_parameters
from lipnext_scale.parallel.config import ParallelConfig
from lipnext_scale.parallel.engine import DTYPES, SingleEngine
from lipnext_scale.parallel.processes import Processes
from lipnext_scale.parallel.zero_state import (
    ClientOptimizer,
    Partition,
    ZeroOptimizers,
    flat_group_slots,
    padding_matrices,
    parameter_slots,
    parts_of,
    put_back,
    zero_pieces,
)

# --------------------------------------------------------------------------------------------------
# What DeepSpeed is told: that it moves numbers, and leaves everything else to us.

SMALLEST_BUCKET = 1 << 20


def deepspeed_settings(
    config: ParallelConfig, ranks: int, batch_size: int, largest: int, on_gpu: bool
) -> dict[str, Any]:
    """largest: the numbers of the largest parameter. A batch is cut into parts by the trainer."""
    parts = config.accumulation
    return {
        "train_batch_size": batch_size,
        "train_micro_batch_size_per_gpu": batch_size // (ranks * parts),
        "gradient_accumulation_steps": parts,
        "gradient_clipping": 0.0,  # the engine clips; DeepSpeed would do so at 1.0 if not told
        "bf16": {"enabled": config.precision == "bf16"},
        "fp16": {"enabled": False},
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": config.reduce_precision,
        "zero_allow_untested_optimizer": True,  # ours
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": _zero(config, largest, on_gpu),
        "steps_per_print": None,
        "wall_clock_breakdown": False,
    }


def _zero(config: ParallelConfig, largest: int, on_gpu: bool) -> dict[str, Any]:
    bucket = max(largest, SMALLEST_BUCKET)
    zero: dict[str, Any] = {
        "stage": config.zero_stage,
        "contiguous_gradients": True,
        "overlap_comm": on_gpu and config.zero_stage > 1,
        "round_robin_gradients": False,  # it would reorder what `zero_layout` counts on
        # So many numbers are allocated, by default 2 GB of them.
        "reduce_bucket_size": bucket,
        "allgather_bucket_size": 2 * bucket,
    }
    if config.zero_stage == 3:
        zero |= {
            "stage3_prefetch_bucket_size": largest,
            "stage3_max_live_parameters": 2 * largest,
            "stage3_max_reuse_distance": largest,
            "stage3_param_persistence_threshold": 0,
            "memory_efficient_linear": False,  # it would replace F.linear for everybody
        }
    if config.offload_optimizer:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": on_gpu}
    return zero


Parameters = list[nn.Parameter]
OLDEST_DEEPSPEED = (0, 19, 8)  # as in pyproject.toml


class DeepSpeedEngine(SingleEngine):
    name = "deepspeed"

    def __init__(
        self, config: ParallelConfig, processes: Processes, batch_size: int | None = None
    ) -> None:
        super().__init__(config, processes)
        self.batch_size = batch_size or processes.world_size * config.accumulation

    def describe(self) -> str:
        offload = ", optimizer on the CPU" if self.config.offload_optimizer else ""
        stage = f"{self.name} ZeRO-{self.config.zero_stage} × {self.processes.world_size}"
        return f"{stage}{offload}, {self.config.precision}"

    # Building

    def place(self, config: LipNeXtConfig) -> LipNeXt:
        cuts_parameters = self.config.zero_stage == 3
        model = self.build_on_meta(config, self.processes.world_size if cuts_parameters else 1)
        if cuts_parameters:
            self._require_whole_matrices(config, model)
        for group in model.block_groups():
            group.keep_products = not cuts_parameters
            if self.config.precision == "bf16":
                group.compute_dtype = torch.bfloat16  # of images; DeepSpeed makes the weights so
        return model

    def _require_whole_matrices(self, config: LipNeXtConfig, model: LipNeXt) -> None:
        ranks = self.processes.world_size
        counts = [2 * group.count for group in model.block_groups()]
        cut = [count for count in counts if count % ranks]
        if not cut:
            return
        elsewhere = "use parallel.zero_stage = 2 or parallel.engine = 'fsdp'"
        if 2 * config.depth % ranks == 0:
            right = (
                f"ZeRO-3 on {ranks} processes would cut through matrices: a bank of {cut[0]} is no "
                f"multiple of {ranks}; 0 chooses a size that fits, or {elsewhere}"
            )
            raise ConfigError("model.blocks_per_bank", config.blocks_per_bank, right)
        right = (
            f"ZeRO-3 on {ranks} processes would cut through matrices: 2·depth = {2 * config.depth} "
            f"is no multiple of {ranks}; {elsewhere}"
        )
        raise ConfigError("model.depth", config.depth, right)

    def build(self, config: LipNeXtConfig, seed: int) -> LipNeXt:
        self.model = self.place(config)
        deepspeed = import_deepspeed(self.processes.device)
        self._join(deepspeed)
        self.shapes = {name: tuple(p.shape) for name, p in self.model.named_parameters()}
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
        return self.model

    def _settings(self) -> dict[str, Any]:
        return deepspeed_settings(
            self.config,
            self.processes.world_size,
            self.batch_size,
            largest=max(p.numel() for p in self.model.parameters()),
            on_gpu=self.processes.device.type == "cuda",
        )

    def _parameter_groups(self) -> list[Parameters]:
        """The banks with their padding, and the rest."""
        orthogonal, euclidean = split_parameters(self.model)
        assert len(orthogonal) + len(euclidean) == len(self.shapes), "nothing is frozen here"
        padding = [] if self.padding is None else [self.padding]
        return [[*(p for _, p in orthogonal), *padding], [p for _, p in euclidean]]

    def _join(self, deepspeed: ModuleType) -> None:
        """Have DeepSpeed take up torch's process group; it would think itself alone otherwise."""
        os.environ.setdefault("LOCAL_RANK", str(self.processes.local_rank))  # it insists
        # Its all-reduce in shared memory, for inference, would be compiled first: that takes
        # minutes, and leaves a lock behind where a process is killed meanwhile.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        deepspeed.init_distributed(
            auto_mpi_discovery=False, dist_init_required=False, verbose=False
        )

    def _allocate(self, deepspeed: ModuleType, settings: dict[str, Any]) -> None:
        """Memory for the weights: whole, or with ZeRO-3 of one group whole at a time."""
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
        """Identities, which get no gradient and so stay what they are."""
        if self.config.zero_stage == 3:
            return None
        count = padding_matrices(2 * config.depth, config.width, self.processes.world_size)
        if count == 0:
            return None
        dtype = DTYPES[self.config.precision]
        identity = torch.eye(config.width, dtype=dtype, device=self.processes.device)
        return nn.Parameter(identity.repeat(count, 1, 1))

    def _find_partitions(self, groups: list[Parameters], width: int) -> list[Partition]:
        """Of this rank, in DeepSpeed's order."""
        ranks, rank = self.processes.world_size, self.processes.rank
        names = {id(p): name for name, p in self.model.named_parameters()}
        names[id(self.padding)] = ""
        widths = [width, None]  # the first group is that of the matrices
        found = []
        if self.config.zero_stage < 3:
            for number, parameters in enumerate(groups):
                (flat,) = self.client.param_groups[number]["params"]
                layout = flat_group_slots([p.numel() for p in parameters], ranks, rank)
                held = [names[id(p)] for p in parameters]
                found.append(Partition.of(flat, held, layout, widths[number]))
            return found
        for number, flat in enumerate(self.zero.fp32_partitioned_groups_flat):
            parameters = self.zero.fp16_groups[number]
            layout = parameter_slots([p.ds_numel for p in parameters], ranks, rank)
            held = [names[id(p)] for p in parameters]
            group = self.zero.sub_group_to_group_id[number]
            found.append(Partition.of(flat, held, layout, widths[group]))
        return found

    @torch.no_grad()
    def _initialise(self, seed: int) -> None:
        """Fill the partitions, not the weights: bf16 ones would be no start for float32."""
        groups = {f"groups.{i}.bank": g for i, g in enumerate(self.model.block_groups())}
        for partition in self.partitions:
            for name, slot in partition.held():
                here = partition.flat.detach()[slot.there]
                if partition.orthogonal:
                    width = partition.view.shape[-1]
                    matrices = here.view(-1, width, width)
                    for index, matrix in enumerate(matrices, start=slot.start // width**2):
                        matrix.copy_(groups[name].initial_matrix(index, seed, matrix))
                elif name == "head.weight":
                    here.copy_(self.model.head.initial_weight(seed).flatten()[slot.of_parameter])
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
        return sum(torch.Size(shape).numel() for shape in self.shapes.values())

    def held_weights(self) -> Iterable[Tensor]:
        """The weights that compute, and the float32 ones where they are others."""
        computing = [getattr(p, "ds_tensor", p.detach()) for p in self.model.parameters()]
        return [*computing, *(partition.flat.detach() for partition in self.partitions)]

    # A step

    def optimizers(self, config: OptimConfig) -> Optimizers:
        return ZeroOptimizers(self, config)

    def forward(self, images: Tensor, last: bool = True) -> tuple[Tensor, Tensor]:
        self.deepspeed.set_gradient_accumulation_boundary(last)
        return self.deepspeed(images)

    def backward(self, loss: Tensor) -> None:
        self.deepspeed.backward(loss, scale_wrt_gas=False)
        if self.config.offload_optimizer and self.processes.device.type == "cuda":
            # Copies to the CPU may be under way still. DeepSpeed waits for them in its step; norm
            # and clipping come before that.
            torch.cuda.synchronize(self.processes.device)

    def step(self) -> None:
        self.deepspeed.step()
        # With the optimizer on the CPU, and with ZeRO-1 in bf16, it looks at gradients before our
        # clipping, whose squares may be more than float32 holds though they are finite themselves.
        if not self.deepspeed.was_step_applied():
            raise FloatingPointError("DeepSpeed made no step: it cannot tell the gradient's norm")

    def discard_gradients(self) -> None:
        """By a step of DeepSpeed's that moves nothing: it knows all the places they are in.

        Where they are not finite it leaves that step out by itself, and drops them too.
        """
        self.client.idle = True
        try:
            self.deepspeed.step()
        finally:
            self.client.idle = False
        if self.config.zero_stage < 3 and self.config.offload_optimizer:
            # Sums of parts in bf16, which it keeps when it leaves a step out.
            for number in range(len(self.partitions)):
                self.zero.averaged_gradients[number] = None

    def _gradients(self) -> list[Tensor]:
        return [g for number in range(len(self.partitions)) for g in self._gradients_of(number)]

    def _gradients_of(self, number: int) -> list[Tensor]:
        """Tensors that are one after the other the gradient of a partition."""
        flat, zero = self.partitions[number].flat, self.zero
        if self.config.offload_optimizer and flat.grad is not None:
            tensors = [flat.grad]
        elif hasattr(zero, "fp32_groups_gradient_flat_partition"):  # ZeRO-1 in bf16: another class
            tensors = [zero.fp32_groups_gradient_flat_partition[number]]
        else:
            tensors = zero.averaged_gradients[number]
        assert sum(tensor.numel() for tensor in tensors) == flat.numel()
        return tensors

    def partition_gradients(self) -> Iterator[tuple[Partition, list[Tensor]]]:
        """Each partition with tensors that are one after the other its gradient, before a step."""
        for number, partition in enumerate(self.partitions):
            yield partition, self._gradients_of(number)

    def _sum_over_shards(self, value: Tensor) -> Tensor:
        value = value.to(self.processes.device)  # the optimizer's may be another
        dist.all_reduce(value)
        return value

    def not_finite(self) -> list[str]:
        names = set()
        for number, partition in enumerate(self.partitions):
            gradient = torch.cat([g.flatten() for g in self._gradients_of(number)])
            for name, slot in partition.held():
                if not gradient[slot.there].isfinite().all():
                    names.add(name)
        return sorted(names)

    # Checkpoints

    def pieces(self, optimizers: Optimizers | None) -> StateShards:
        return zero_pieces(self.partitions, parts_of(self.model), self.shapes, optimizers)

    def pieces_loaded(self, pieces: StateShards, optimizers: Optimizers | None) -> None:
        put_back(self.partitions, parts_of(self.model), pieces, optimizers)
        self.publish()


class _Padded(nn.Module):
    """What DeepSpeed is given: the model, and the padding beside it, which it wants to know."""

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
    """Only for the engine that needs it: it takes seconds, and talks."""
    require_deepspeed()
    os.environ["DS_ACCELERATOR"] = device.type  # or it would take a GPU wherever there is one
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    deepspeed = import_module("deepspeed")
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)  # its import sets a level of its own
    # It calls collectives by their former names, of which torch tells in every step.
    warnings.filterwarnings("ignore", r".*torch\.distributed\..*_tensor", FutureWarning)
    return deepspeed
