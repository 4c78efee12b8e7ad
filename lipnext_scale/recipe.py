"""Everything that defines a run, composed once from the components' own configurations."""

from dataclasses import dataclass, field
from typing import Literal

from lipnext_scale import config as configuration
from lipnext_scale.config import ConfigError
from lipnext_scale.data import DataConfig
from lipnext_scale.losses import LossConfig
from lipnext_scale.models import LipNeXtConfig
from lipnext_scale.optim import OptimConfig
from lipnext_scale.parallel import ParallelConfig


@dataclass(frozen=True)
class RunConfig:
    """Where a run lives, how long it goes and what it tells."""

    dir: str
    seed: int = 0
    # Start from the weights of this export instead of random ones.
    init_from: str = ""
    # Stop after so many optimizer steps in all; the schedule stays as it is. 0: go to the end.
    max_steps: int = 0
    device: Literal["auto", "cpu", "cuda"] = "auto"
    log_every: int = 50
    # Epochs between evaluations on the test set; 0: never.
    eval_every: int = 10
    # Steps between checkpoints beside the last one; 0: only the last.
    checkpoint_every: int = 500
    # The newest so many checkpoints stay, and every one whose step is a multiple of keep_every.
    keep_checkpoints: int = 2
    keep_every: int = 0
    # Go on training while a checkpoint is written.
    async_checkpoint: bool = True
    # Steps between measurements of traffic and memory, beside the third of every start; 0: never.
    measure_every: int = 1000

    def __post_init__(self) -> None:
        if not self.dir.strip() or "\0" in self.dir:
            raise ConfigError("dir", self.dir, "must name a directory")
        for key in (
            "seed",
            "max_steps",
            "eval_every",
            "checkpoint_every",
            "keep_every",
            "measure_every",
        ):
            if getattr(self, key) < 0:
                raise ConfigError(key, getattr(self, key), "must be at least 0")
        if self.seed >= 2**63:
            raise ConfigError("seed", self.seed, "must be below 2⁶³")
        for key in ("log_every", "keep_checkpoints"):
            if getattr(self, key) < 1:
                raise ConfigError(key, getattr(self, key), "must be at least 1")


# What may differ between a run and its continuation: it changes the result not at all, or (device,
# model.blocks_per_bank, most of parallel) by rounding alone.
CHANGEABLE = {
    "run.dir",
    "run.max_steps",
    "run.device",
    "run.log_every",
    "run.eval_every",
    "run.checkpoint_every",
    "run.keep_checkpoints",
    "run.keep_every",
    "run.async_checkpoint",
    "run.measure_every",
    "model.blocks_per_bank",
    "parallel.accumulation",
    "parallel.compile",
    "parallel.engine",
    "parallel.prefetch",
    "parallel.recompute_activations",
    "parallel.reduce_every_part",
    "parallel.reshard_after_forward",
    "parallel.row_bucket_mb",
    "parallel.shard_size",
    "parallel.weight_layout",
    "data.bad_sample_limit",
    "data.cache_dir",
    "data.memory_limit_gb",
    "data.on_bad_sample",
    "data.prefetch",
    "data.verify",
    "data.workers",
}


@dataclass(frozen=True)
class Recipe:
    run: RunConfig
    data: DataConfig
    model: LipNeXtConfig = field(default_factory=LipNeXtConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)

    def __post_init__(self) -> None:
        self.data.require_image_size(self.model.image_size)

    def require_batch_for(self, world_size: int) -> None:
        """Every process takes an equal share of the batch, in equal parts."""
        parts = self.parallel.accumulation
        if self.data.batch_size % (parts * world_size):
            raise ConfigError(
                "data.batch_size",
                self.data.batch_size,
                f"must be a multiple of {world_size} process(es) times "
                f"parallel.accumulation = {parts}",
            )


def load_recipe(path: str | None, overrides: list[str] | None = None) -> Recipe:
    return configuration.load(Recipe, path, overrides)
