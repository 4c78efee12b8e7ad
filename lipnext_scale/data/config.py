"""What is trained on and how a batch is made."""

from dataclasses import dataclass

from lipnext_scale.config import ConfigError


@dataclass(frozen=True)
class DataConfig:
    """Shards are paths with braces or wildcards; `builtin:` means those of the package."""

    train: str
    test: str
    batch_size: int = 256
    # Zero-pad by so many pixels and crop back at random; 0: no crop.
    crop_padding: int = 0
    flip: bool = False
    # A set is held decoded in memory; one larger than this is refused.
    memory_limit_gb: float = 8.0

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ConfigError("batch_size", self.batch_size, "must be at least 1")
        if self.crop_padding < 0:
            raise ConfigError("crop_padding", self.crop_padding, "must be at least 0")
        if self.memory_limit_gb <= 0:
            raise ConfigError("memory_limit_gb", self.memory_limit_gb, "must be positive")
        for key in ("train", "test"):
            if not getattr(self, key).strip():
                raise ConfigError(key, getattr(self, key), "must name WebDataset shards")
