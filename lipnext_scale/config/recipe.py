"""Everything that defines a run, composed once from the components' own configurations."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import ClassVar, Literal

from lipnext_scale.data import DataConfig
from lipnext_scale.distributed import ParallelConfig
from lipnext_scale.losses import LossConfig
from lipnext_scale.models import LipNeXtConfig
from lipnext_scale.optim import OptimConfig
from lipnext_scale.utils import config as configuration
from lipnext_scale.utils.config import ConfigError, LauncherSetting, changeable, changeable_keys

# Steps of one profile: a trace has every operator, some MB a step, and is in memory until it ends.
PROFILE_LIMIT = 100
AT_LEAST = {"log_every": 1, "keep_checkpoints": 1}  # and every other number 0


@dataclass(frozen=True)
class RunConfig:
    """Where a run lives, how long it goes and what it reports."""

    RETIRED: ClassVar = {"checkpoint_format": "native", "measure_every": ...}
    dir: str = changeable()
    seed: int = 0
    # Start from the weights of this run, checkpoint or export instead of random ones; where
    # model.num_classes is another there, from its backbone.
    init_from: str = ""
    # Stop after so many optimizer steps in all; the schedule stays as it is. 0: go to the end.
    max_steps: int = changeable(0)
    device: Literal["auto", "cpu", "cuda"] = changeable("auto")
    # Steps between lines of the log and records of metrics.jsonl and TensorBoard.
    log_every: int = changeable(50)
    # Gradient, size of the step and distance from O(d) of every block in each of these records.
    per_depth: bool = changeable(True)
    # A fixed part of the test set, so many samples, is evaluated every so many steps; 0: never.
    watch_samples: int = changeable(256)
    watch_every: int = changeable(1000)
    # Epochs between evaluations on the test set; 0: never.
    eval_every: int = changeable(10)
    # Steps between checkpoints beside the last one; 0: only the last.
    checkpoint_every: int = changeable(500)
    # The newest so many checkpoints stay, and every one whose step is a multiple of keep_every.
    keep_checkpoints: int = changeable(2)
    keep_every: int = changeable(0)
    # Go on training while a checkpoint is written.
    async_checkpoint: bool = changeable(True)
    # What a device could do at best in the run's precision, for the MFU; 0: as the device's name
    # says, where that is known.
    peak_tflops: float = changeable(0.0)
    # The project of Weights & Biases that gets what TensorBoard gets; empty: none.
    wandb: str = changeable("")
    # Draw RUN/summary.png when the training has come to its end.
    summary: bool = changeable(True)
    # Steps [first, end) whose operators are traced, counted as in the log; [0, 0]: none.
    profile_steps: tuple[int, int] = changeable((0, 0))
    profile_ranks: tuple[int, ...] = changeable((0,))
    # Where the traces go; empty: RUN/profile.
    profile_dir: str = changeable("")
    # A loss or gradient that is not finite. fail: the run ends; skip: the batch makes no update.
    on_non_finite: Literal["fail", "skip"] = changeable("fail")
    # At most so many steps are skipped in the whole run.
    non_finite_limit: int = changeable(10)
    # Seconds without a step, a batch of an evaluation or a written part of a checkpoint, after
    # which every rank writes where it stands and ends; starts get longer. 0: never.
    hang_timeout: float = changeable(600)

    def __post_init__(self) -> None:
        if not self.dir.strip() or "\0" in self.dir:
            raise ConfigError("dir", self.dir, "must name a directory")
        for field_ in fields(self):
            value, least = getattr(self, field_.name), AT_LEAST.get(field_.name, 0)
            if isinstance(value, int | float) and value < least:
                raise ConfigError(field_.name, value, f"must be at least {least}")
        if self.seed >= 2**63:
            raise ConfigError("seed", self.seed, "must be below 2⁶³")
        first, end = self.profile_steps
        if (first, end) != (0, 0) and not 1 <= first < end <= first + PROFILE_LIMIT:
            right = "must be [first, end) with 1 ≤ first < end, at most "
            right += f"{PROFILE_LIMIT} steps, or [0, 0] for none"
            raise ConfigError("profile_steps", list(self.profile_steps), right)
        if not self.profile_ranks or min(self.profile_ranks) < 0:
            right = "must be a list of ranks, such as [0]"
            raise ConfigError("profile_ranks", list(self.profile_ranks), right)


@dataclass(frozen=True)
class Recipe:
    MOVED: ClassVar = {"model.parametrisation": "optim.parametrisation"}
    run: RunConfig
    data: DataConfig
    model: LipNeXtConfig = field(default_factory=LipNeXtConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)

    def __post_init__(self) -> None:
        self.data.require_image_size(self.model.image_size)
        self.model.require_radius("loss.epsilon", self.loss.epsilon)
        needs_manifold = {"weight_layout": "row", "engine": "deepspeed"}
        for key, value in needs_manifold.items() if self.model.layer != "manifold" else ():
            if getattr(self.parallel, key) == value:
                right = f"needs model.layer = 'manifold', not {self.model.layer!r}"
                raise ConfigError(f"parallel.{key}", value, right)
        if self.parallel.engine == "deepspeed" and self.model.neck != "l2_pool":
            right = f"needs model.neck = 'l2_pool', not {self.model.neck!r}"
            raise ConfigError("parallel.engine", "deepspeed", right)

    def require_batch_for(self, world_size: int) -> None:
        """Every process takes an equal share of the batch, in equal parts."""
        parts = self.parallel.accumulation
        if self.data.batch_size % (parts * world_size):
            right = f"must be a multiple of {world_size} process(es) times "
            right += f"parallel.accumulation = {parts}"
            raise ConfigError("data.batch_size", self.data.batch_size, right)


# What may differ between a run and its continuation.
CHANGEABLE = changeable_keys(Recipe)


def load_recipe(
    path: str | None,
    overrides: list[str] | None = None,
    launcher: Mapping[str, LauncherSetting] | None = None,
) -> Recipe:
    """launcher: what config/launchers.py has found, for a run that starts now."""
    return configuration.load(Recipe, path, overrides, launcher)
