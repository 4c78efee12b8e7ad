"""What is trained on and how a batch is made."""

import math
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Literal

from lipnext_scale.data.augment import AugmentConfig
from lipnext_scale.utils.config import ConfigError, changeable


@dataclass(frozen=True)
class SyntheticConfig:
    """Generated images beside the real ones: a source of its own, with its own place and order."""

    # Shards, named as in data.train; empty: none.
    shards: str = ""
    # Synthetic images for each real one in every batch, exactly: 3 makes a batch of 256 64 + 192.
    per_real: float = 1.0
    augment: AugmentConfig = field(default_factory=AugmentConfig)

    def __post_init__(self) -> None:
        if not 0 < self.per_real < math.inf:
            raise ConfigError("per_real", self.per_real, "must be positive and finite")


@dataclass(frozen=True)
class DataConfig:
    """Shards are paths or URLs with braces or wildcards; `builtin:` means those of the package.

    An epoch is a pass over `train`; synthetic images come on top.
    """

    train: str
    test: str
    # Of all ranks together, real and synthetic.
    batch_size: int = 256
    augment: AugmentConfig = field(default_factory=AugmentConfig)
    synthetic: SyntheticConfig = field(default_factory=SyntheticConfig)
    # Test images: the short side becomes this, then the centre is cut out; 0: they have the size.
    test_resize: int = 0
    # Processes that read, decode and augment, for each rank; 0: the rank does it itself.
    workers: int = changeable(0)
    # Batches that each worker makes ahead.
    prefetch: int = changeable(2)
    # Samples read in one go, and samples that are shuffled together; data/order.py. 0: chosen.
    read_block: int = 0
    shuffle_window: int = 16384
    # A bad sample ends the run, or another one replaces it, for at most bad_sample_limit of them.
    on_bad_sample: Literal["fail", "substitute"] = changeable("fail")
    bad_sample_limit: int = changeable(100)
    # Compare the sha256 of every shard with its index before training.
    verify: bool = changeable(True)
    # Where copies of remote shards are kept; empty: the user's cache directory.
    cache_dir: str = changeable("")
    # A directory of the node's own to which all shards are copied before training, local ones too;
    # empty: those are read where they are.
    stage_dir: str = changeable("")
    # What the compressed shards of a set may take in memory.
    memory_limit_gb: float = changeable(8.0)

    def __post_init__(self) -> None:
        at_least = {"batch_size": 1, "prefetch": 1, "shuffle_window": 1, "bad_sample_limit": 1}
        for key, least in (at_least | {"workers": 0, "read_block": 0, "test_resize": 0}).items():
            if getattr(self, key) < least:
                raise ConfigError(key, getattr(self, key), f"must be at least {least}")
        if self.memory_limit_gb <= 0:
            raise ConfigError("memory_limit_gb", self.memory_limit_gb, "must be positive")
        for key in ("train", "test"):
            if not getattr(self, key).strip():
                raise ConfigError(key, getattr(self, key), "must name WebDataset shards")
        self.batch_parts()

    def batch_parts(self) -> tuple[int, int]:
        """(real, synthetic) samples of a batch."""
        if not self.synthetic.shards:
            return self.batch_size, 0
        wanted = self.synthetic.per_real
        per_real = Fraction(wanted).limit_denominator(1000)
        if abs(float(per_real) - wanted) > 1e-9:
            right = "must be an integer or a fraction with a denominator up to 1000"
            raise ConfigError("synthetic.per_real", wanted, right)
        real = self.batch_size / (1 + per_real)
        if real.denominator != 1:
            least = (1 + per_real).numerator
            right = f"must be a multiple of {least} with synthetic.per_real = {wanted:g}"
            raise ConfigError("batch_size", self.batch_size, right)
        return int(real), self.batch_size - int(real)

    def require_image_size(self, image_size: int) -> None:
        """The settings fit the size that the model takes."""
        sections = {"data.augment": self.augment, "data.synthetic.augment": self.synthetic.augment}
        for section, augment in sections.items():
            try:
                augment.require_size(image_size)
            except ConfigError as error:
                raise error.under(section) from None
        if 0 < self.test_resize < image_size:
            right = f"must be at least model.image_size = {image_size}"
            raise ConfigError("data.test_resize", self.test_resize, right)
