"""How a model is spread over processes."""

from dataclasses import dataclass
from typing import Literal

from lipnext_scale.config import ConfigError


@dataclass(frozen=True)
class ParallelConfig:
    """None of this changes what is computed, beyond rounding (and, for bf16, its precision)."""

    # auto: single for one process, fsdp for several.
    engine: Literal["auto", "single", "ddp", "fsdp"] = "auto"
    # bank: a rank has whole matrices. row: rows of every matrix, whole ones only in the step.
    weight_layout: Literal["bank", "row"] = "bank"
    # fsdp: ranks that share one copy of the model; the others replicate. 0: the ranks of a node, or
    # all of them where a node has one rank only.
    shard_size: int = 0
    # Parts that a rank's share of the batch is cut into, one forward and backward pass each.
    accumulation: int = 1
    # The type of forward and backward passes. Weights and optimizer state are always fp32.
    precision: Literal["fp32", "bf16"] = "fp32"
    # The type in which gradients are summed over ranks.
    reduce_precision: Literal["fp32", "bf16"] = "fp32"
    # fsdp: free gathered weights between forward and backward pass. false: faster, more memory.
    reshard_after_forward: bool = True
    # fsdp: sum gradients over ranks after every part, so that none ever holds them whole; false:
    # after the last part only, for less traffic.
    reduce_every_part: bool = True
    # fsdp: groups of blocks whose weights are gathered ahead of time.
    prefetch: int = 1
    recompute_activations: bool = False
    compile: bool = False
    # row: the matrices of one exchange with the owners, in MB for each owner.
    row_bucket_mb: int = 64

    def __post_init__(self) -> None:
        for key in ("shard_size", "prefetch"):
            if getattr(self, key) < 0:
                raise ConfigError(key, getattr(self, key), "must be at least 0")
        for key in ("accumulation", "row_bucket_mb"):
            if getattr(self, key) < 1:
                raise ConfigError(key, getattr(self, key), "must be at least 1")
        if self.reduce_precision == "bf16" and self.precision == "fp32":
            raise ConfigError(
                "reduce_precision", "bf16", "needs precision = 'bf16'; fp32 gradients stay fp32"
            )
        if self.shard_size and self.engine in ("single", "ddp"):
            raise ConfigError(
                "shard_size", self.shard_size, f"needs engine = 'fsdp', not {self.engine!r}"
            )
        if self.weight_layout == "row" and self.engine in ("single", "ddp"):
            raise ConfigError(
                "weight_layout",
                "row",
                f"needs engine = 'fsdp', not {self.engine!r}: "
                "without shards there are no rows to share",
            )
