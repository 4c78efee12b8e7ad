"""`parallel.*`: how a model is spread over processes."""

from dataclasses import dataclass
from typing import Literal

from lipnext_scale.models import LipNeXtConfig
from lipnext_scale.utils.config import ConfigError, changeable


@dataclass(frozen=True)
class ParallelConfig:
    """None of this changes what is computed, beyond rounding (and, for bf16, its precision)."""

    # auto: single for one process, fsdp for several.
    engine: Literal["auto", "single", "ddp", "fsdp", "deepspeed"] = changeable("auto")
    # deepspeed: what is sharded. 1: optimizer state; 2: gradients too; 3: weights too.
    zero_stage: int = changeable(2)
    # deepspeed: float32 weights, optimizer state and the step in the host's memory.
    offload_optimizer: bool = changeable(False)
    # bank: a rank has whole matrices. row: rows of every matrix, whole ones only in the step.
    weight_layout: Literal["bank", "row"] = changeable("bank")
    # fsdp: ranks that share one copy of the model; the others replicate. 0: the ranks of a node, or
    # all of them where a node has one rank only.
    shard_size: int = changeable(0)
    # Parts that a rank's share of the batch is cut into, one forward and backward pass each.
    accumulation: int = changeable(1)
    # The type of forward and backward passes. Weights and optimizer state are always fp32.
    precision: Literal["fp32", "bf16"] = "fp32"
    # The type in which gradients are summed over ranks.
    reduce_precision: Literal["fp32", "bf16"] = "fp32"
    # fsdp: free gathered weights between forward and backward pass. false: faster, more memory.
    reshard_after_forward: bool = changeable(True)
    # fsdp: sum gradients over ranks after every part, so that no rank ever holds all of them;
    # false: after the last part only, for less traffic.
    reduce_every_part: bool = changeable(True)
    # fsdp: groups of blocks whose weights are gathered ahead of time.
    prefetch: int = changeable(1)
    # ddp, and fsdp with replicas: each steps its share of the matrices, and has its state alone.
    share_step: bool = changeable(True)
    recompute_activations: bool = changeable(False)
    compile: bool = changeable(False)
    # row: the matrices of one exchange with the owners, in MB for each owner.
    row_bucket_mb: int = changeable(64)

    def __post_init__(self) -> None:
        smallest = {"shard_size": 0, "prefetch": 0, "accumulation": 1, "row_bucket_mb": 1}
        for key, least in smallest.items():
            if getattr(self, key) < least:
                raise ConfigError(key, getattr(self, key), f"must be at least {least}")
        if self.zero_stage not in (1, 2, 3):
            right = "must be 1, 2 or 3; what stage 0 would be is engine = 'ddp'"
            raise ConfigError("zero_stage", self.zero_stage, right)
        if self.reduce_precision == "bf16" and self.precision == "fp32":
            raise ConfigError(
                "reduce_precision", "bf16", "needs precision = 'bf16'; fp32 gradients stay fp32"
            )
        self._check_engine()

    def _check_engine(self) -> None:
        """Settings that the chosen engine does not have."""
        engine, needs_fsdp = self.engine, f"needs engine = 'fsdp', not {self.engine!r}"
        if self.offload_optimizer and engine != "deepspeed":
            raise ConfigError(
                "offload_optimizer", True, f"needs engine = 'deepspeed', not {engine!r}"
            )
        if self.compile and engine == "deepspeed":
            raise ConfigError("compile", True, "needs another engine than 'deepspeed'")
        if engine in ("auto", "fsdp"):
            return
        if self.shard_size:
            raise ConfigError("shard_size", self.shard_size, needs_fsdp)
        if self.weight_layout == "row":
            raise ConfigError("weight_layout", "row", f"{needs_fsdp}, which has no shards of rows")


# --------------------------------------------------------------------------------------------------
# How many blocks form a group: the unit that is gathered, computed and freed together.

# A group should be large enough for its transfer to be more than latency, and small enough that
# two of them (one computing, one in transfer) are little beside the rest.
GROUP_BYTES = 256 << 20


def choose_group_size(config: LipNeXtConfig, shards: int, whole_blocks: bool) -> int:
    """Blocks per group for a model over `shards` ranks; as configured, if it is.

    With whole blocks on every rank (the bank layout) their number should be a multiple of the
    ranks, or some have more to do than others. Of such sizes the one nearest to GROUP_BYTES is
    taken, and among those near it one that divides the depth, so that no small group is left.
    """
    if config.blocks_per_bank:
        return config.blocks_per_bank
    step = shards if whole_blocks else 1
    if step >= config.depth:  # some ranks will have no block of the only group
        return config.depth
    block_bytes = 2 * config.width**2 * 4
    wanted = max(1, round(GROUP_BYTES / (step * block_bytes))) * step
    largest = min(wanted, config.depth)
    sizes = range(step, largest + 1, step)
    dividing = [size for size in sizes if config.depth % size == 0 and size > largest / 2]
    return dividing[-1] if dividing else sizes[-1]
