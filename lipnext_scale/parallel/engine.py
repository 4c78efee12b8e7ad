"""The protocol between the trainer and whatever runs the model."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lipnext_scale.checkpoint import StateShards
from lipnext_scale.config import ConfigError
from lipnext_scale.models import LipNeXt, LipNeXtConfig, WeightLayout
from lipnext_scale.optim import (
    ManifoldAdam,
    ManifoldOptimizer,
    OptimConfig,
    Optimizers,
    local_part,
    split_parameters,
)
from lipnext_scale.parallel.config import ParallelConfig, choose_group_size
from lipnext_scale.parallel.pieces import OwnedMatrices, training_pieces
from lipnext_scale.parallel.processes import Processes


class Engine(Protocol):
    """Places a model on the processes of a run, differentiates and clips it."""

    name: str
    config: ParallelConfig
    processes: Processes
    model: LipNeXt

    def describe(self) -> str:
        """The engine and its choices in a few words."""
        ...

    def place(self, config: LipNeXtConfig) -> LipNeXt:
        """The model as this engine spreads it, on the meta device: shapes without memory."""
        ...

    def build(self, config: LipNeXtConfig, seed: int) -> LipNeXt:
        """A model over the processes with its initial weights, the same for every world size.

        No process ever holds weights that it does not keep.
        """
        ...

    def optimizers(self, config: OptimConfig) -> Optimizers:
        """Both optimizers of the model as this engine lays its weights out. Once, after `build`."""
        ...

    def parameter_count(self) -> int:
        """The numbers of the whole model, wherever they are."""
        ...

    def held_weights(self) -> Iterable[Tensor]:
        """All tensors of weights that this process keeps from step to step."""
        ...

    def forward(self, images: Tensor, last: bool = True) -> tuple[Tensor, Tensor]:
        """(logits, the head's normalised rows). All processes must call it together.

        last: of the parts that a batch is cut into.
        """
        ...

    def backward(self, loss: Tensor) -> None:
        """Add to the gradients; after the last part they are summed parts, averaged over ranks."""
        ...

    def gradient_norm(self) -> Tensor:
        """The global norm of all gradients, the same number on every rank."""
        ...

    def clip_gradients(self, max_norm: float, norm: Tensor) -> None:
        """Scale all gradients, whose global norm is `norm`, to one of at most `max_norm`."""
        ...

    def not_finite(self) -> list[str]:
        """Parameters whose gradient has a number here that is not finite, by name."""
        ...

    def discard_gradients(self) -> None:
        """Forget them: there is no step with them."""
        ...

    def weights_changed(self) -> None:
        """Drop gathered copies of the weights: they were changed by other means than a step."""
        ...

    def owned_matrices(self) -> OwnedMatrices | None:
        """Matrices that live whole on one rank while the parameters hold rows (layout row)."""
        ...

    def pieces(self, optimizers: Optimizers | None) -> StateShards:
        """What this process puts into a checkpoint, or fills from one; None: the weights alone.

        All processes must call it together.
        """
        ...

    def pieces_loaded(self, pieces: StateShards, optimizers: Optimizers | None) -> None:
        """Make the model that of the pieces, which have been filled. All processes together."""
        ...


# --------------------------------------------------------------------------------------------------
# One process, one device; and the base of the engines for several.

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class SingleEngine:
    name = "single"
    model: LipNeXt

    def __init__(self, config: ParallelConfig, processes: Processes) -> None:
        self.config, self.processes = config, processes
        if self.name == "single" and processes.world_size > 1:
            raise ConfigError(
                "parallel.engine",
                config.engine,
                f"{processes.world_size} processes were started; use fsdp or ddp, or start one",
            )

    def describe(self) -> str:
        return f"{self.name}, {self.config.precision}"

    def build(self, config: LipNeXtConfig, seed: int) -> LipNeXt:
        self.model = self.place(config)
        self.model.to_empty(device=self.processes.device)
        self.model.reset_parameters(seed)
        self.network: nn.Module = self.model
        return self.model

    def place(self, config: LipNeXtConfig) -> LipNeXt:
        """The model as this engine spreads it, still without memory."""
        model = self.build_on_meta(config, shards=1)
        if self.config.precision == "bf16":
            for group in model.block_groups():
                group.compute_dtype = torch.bfloat16
        return model

    def build_on_meta(
        self, config: LipNeXtConfig, shards: int, layout: WeightLayout = "bank"
    ) -> LipNeXt:
        """The model with groups for so many shards; recomputing and compiled as configured."""
        size = choose_group_size(config, shards, layout == "bank")
        with torch.device("meta"):
            model = LipNeXt(replace(config, blocks_per_bank=size), layout=layout)
        for group in model.block_groups():
            group.recompute = self.config.recompute_activations
            if self.config.compile:
                group.compile()
        return model

    def optimizers(self, config: OptimConfig) -> Optimizers:
        return Optimizers(split_parameters(self.model), config, self.manifold_optimizer)

    def manifold_optimizer(
        self, named: list[tuple[str, nn.Parameter]], **arguments: Any
    ) -> ManifoldOptimizer:
        """ManifoldAdam for the model's orthogonal parameters as this engine lays them out."""
        return ManifoldAdam(named, **arguments)

    def parameter_count(self) -> int:
        return sum(parameter.numel() for parameter in self.model.parameters())

    def held_weights(self) -> Iterable[Tensor]:
        return self.model.parameters()

    def forward(self, images: Tensor, last: bool = True) -> tuple[Tensor, Tensor]:
        return self.network(images, with_head=True)

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def gradient_norm(self) -> Tensor:
        """In double precision: a norm of 1e20 is large, not infinite."""
        double = torch.float64
        norms = [torch.linalg.vector_norm(g, dtype=double) for g in self._gradients()]
        squares = torch.stack(norms).square().sum()
        return self._sum_over_shards(squares).sqrt()

    def _sum_over_shards(self, value: Tensor) -> Tensor:
        return value

    def clip_gradients(self, max_norm: float, norm: Tensor) -> None:
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for gradient in self._gradients():
            gradient.mul_(factor.to(gradient))

    def _gradients(self) -> list[Tensor]:
        """This process's parts of the gradients."""
        return [local_part(p.grad) for p in self.model.parameters() if p.grad is not None]

    def not_finite(self) -> list[str]:
        return [
            name
            for name, parameter in self.model.named_parameters()
            if parameter.grad is not None and not local_part(parameter.grad).isfinite().all()
        ]

    def discard_gradients(self) -> None:
        self.model.zero_grad(set_to_none=True)

    def weights_changed(self) -> None:
        pass

    def owned_matrices(self) -> OwnedMatrices | None:
        return None

    def pieces(self, optimizers: Optimizers | None) -> StateShards:
        return training_pieces(self.model, optimizers, self.owned_matrices())

    def pieces_loaded(self, pieces: StateShards, optimizers: Optimizers | None) -> None:
        pass  # the pieces are the model's own tensors


# --------------------------------------------------------------------------------------------------
# A whole copy of the model on every process; gradients averaged by torch's DDP.
#
# Every rank takes the same optimizer step on the same averaged gradients, so the copies stay
# equal.


class DDPEngine(SingleEngine):
    name = "ddp"

    def build(self, config: LipNeXtConfig, seed: int) -> LipNeXt:
        model = super().build(config, seed)
        self.network = DistributedDataParallel(model, gradient_as_bucket_view=True)
        if self.config.reduce_precision == "bf16":
            self.network.register_comm_hook(None, average_in_bf16)
        return model

    def forward(self, images: Tensor, last: bool = True) -> tuple[Tensor, Tensor]:
        # As DDP's no_sync(), whose context would have to span the forward and the backward pass.
        self.network.require_backward_grad_sync = last  # type: ignore[assignment]
        return super().forward(images)


def average_in_bf16(_state: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """DDP's hook for a bucket of gradients. (torch's own insists on NCCL.)"""
    gradients = bucket.buffer()
    halves = gradients.to(torch.bfloat16).div_(dist.get_world_size())
    work = dist.all_reduce(halves, async_op=True)
    return work.get_future().then(lambda _: gradients.copy_(halves))
