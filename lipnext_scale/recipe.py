"""Everything that defines a run, composed once from the components' own configurations."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from lipnext_scale import config as configuration
from lipnext_scale.config import ConfigError, LauncherSetting
from lipnext_scale.data import DataConfig
from lipnext_scale.losses import LossConfig
from lipnext_scale.models import LipNeXtConfig
from lipnext_scale.optim import OptimConfig
from lipnext_scale.parallel import ParallelConfig

# Steps of one profile: a trace has every operator, some MB a step, and is in memory until it ends.
PROFILE_LIMIT = 100


@dataclass(frozen=True)
class RunConfig:
    """Where a run lives, how long it goes and what it tells."""

    RETIRED: ClassVar = {"checkpoint_format": "native", "measure_every": ...}
    dir: str
    seed: int = 0
    # Start from the weights of this export instead of random ones.
    init_from: str = ""
    # Stop after so many optimizer steps in all; the schedule stays as it is. 0: go to the end.
    max_steps: int = 0
    device: Literal["auto", "cpu", "cuda"] = "auto"
    # Steps between lines of the log and records of metrics.jsonl and TensorBoard.
    log_every: int = 50
    # Gradient, size of the step and distance from O(d) of every block in each of these records.
    per_depth: bool = True
    # A fixed part of the test set, so many samples, is evaluated every so many steps; 0: never.
    watch_samples: int = 256
    watch_every: int = 1000
    # Epochs between evaluations on the test set; 0: never.
    eval_every: int = 10
    # Steps between checkpoints beside the last one; 0: only the last.
    checkpoint_every: int = 500
    # The newest so many checkpoints stay, and every one whose step is a multiple of keep_every.
    keep_checkpoints: int = 2
    keep_every: int = 0
    # Go on training while a checkpoint is written.
    async_checkpoint: bool = True
    # What a device could do at best in the run's precision, for the MFU; 0: as the device's name
    # says, where that is known.
    peak_tflops: float = 0.0
    # Draw RUN/summary.png when the training has come to its end.
    summary: bool = True
    # Steps [first, end) whose operators are traced, counted as in the log; [0, 0]: none.
    profile_steps: tuple[int, int] = (0, 0)
    profile_ranks: tuple[int, ...] = (0,)
    # Where the traces go; empty: RUN/profile.
    profile_dir: str = ""
    # A loss or gradient that is not finite. fail: the run ends; skip: the batch makes no update.
    on_non_finite: Literal["fail", "skip"] = "fail"
    # So many such steps are let pass in the whole run.
    non_finite_limit: int = 10
    # Seconds without a step, a batch of an evaluation or a written part of a checkpoint, after
    # which every rank writes where it stands and ends; starts get longer. 0: never.
    hang_timeout: float = 600

    def __post_init__(self) -> None:
        if not self.dir.strip() or "\0" in self.dir:
            raise ConfigError("dir", self.dir, "must name a directory")
        for key in (
            "seed",
            "max_steps",
            "eval_every",
            "checkpoint_every",
            "keep_every",
            "watch_samples",
            "watch_every",
            "peak_tflops",
            "non_finite_limit",
            "hang_timeout",
        ):
            if getattr(self, key) < 0:
                raise ConfigError(key, getattr(self, key), "must be at least 0")
        if self.seed >= 2**63:
            raise ConfigError("seed", self.seed, "must be below 2⁶³")
        for key in ("log_every", "keep_checkpoints"):
            if getattr(self, key) < 1:
                raise ConfigError(key, getattr(self, key), "must be at least 1")
        self._check_profile()

    def _check_profile(self) -> None:
        first, end = self.profile_steps
        if (first, end) != (0, 0) and not 1 <= first < end <= first + PROFILE_LIMIT:
            right = (
                "must be [first, end) with 1 ≤ first < end, "
                f"at most {PROFILE_LIMIT} steps, or [0, 0] for none"
            )
            raise ConfigError("profile_steps", list(self.profile_steps), right)
        if not self.profile_ranks or min(self.profile_ranks) < 0:
            right = "must be a list of ranks, such as [0]"
            raise ConfigError("profile_ranks", list(self.profile_ranks), right)


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
    "run.peak_tflops",
    "run.per_depth",
    "run.profile_dir",
    "run.profile_ranks",
    "run.profile_steps",
    "run.summary",
    "run.watch_every",
    "run.watch_samples",
    "run.on_non_finite",
    "run.non_finite_limit",
    "run.hang_timeout",
    "model.blocks_per_bank",
    "parallel.accumulation",
    "parallel.compile",
    "parallel.engine",
    "parallel.offload_optimizer",
    "parallel.prefetch",
    "parallel.recompute_activations",
    "parallel.reduce_every_part",
    "parallel.reshard_after_forward",
    "parallel.row_bucket_mb",
    "parallel.shard_size",
    "parallel.weight_layout",
    "parallel.zero_stage",
    "data.bad_sample_limit",
    "data.cache_dir",
    "data.memory_limit_gb",
    "data.on_bad_sample",
    "data.prefetch",
    "data.stage_dir",
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


def load_recipe(
    path: str | None,
    overrides: list[str] | None = None,
    launcher: Mapping[str, LauncherSetting] | None = None,
) -> Recipe:
    """launcher: what launch_environment.py has found, for a run that starts now."""
    return configuration.load(Recipe, path, overrides, launcher)
