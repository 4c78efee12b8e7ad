"""The options that all converters share."""

import argparse
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from data_prep.writing.encoding import ImageRules
from lipnext_scale.errors import UserError

LARGEST_SEED = 2**32 - 1


@dataclass(frozen=True)
class ConversionOptions:
    """How a set is written; `converter` is the command's name, such as data_prep.cifar."""

    converter: str
    out: Path
    seed: int = 0
    shard_samples: int = 0  # 0: by the samples' size
    workers: int = field(default_factory=lambda: os.cpu_count() or 1)
    rules: ImageRules = ImageRules()
    on_bad: str = "fail"
    dry_run: bool = False

    def __post_init__(self) -> None:
        _require("--seed", self.seed, 0, LARGEST_SEED)
        _require("--shard-samples", self.shard_samples, 0)
        _require("--workers", self.workers, 0)
        _require("--short-side", self.rules.short_side, 0)
        _require("--quality", self.rules.quality, 1, 100)
        _require("--max-pixels", self.rules.max_pixels, 1)

    def settings(self) -> dict[str, Any]:
        """All that the bytes of a set follow from beside its source, and nothing else: --workers
        changes none, and --quality none where nothing is scaled."""
        settings = {"seed": self.seed, "shard_samples": self.shard_samples}
        settings |= {"short_side": self.rules.short_side, "max_pixels": self.rules.max_pixels}
        return settings | ({"quality": self.rules.quality} if self.rules.short_side else {})


def _require(name: str, value: int, lowest: int, highest: int | None = None) -> None:
    if value < lowest or (highest is not None and value > highest):
        allowed = f"at least {lowest}" if highest is None else f"{lowest} to {highest}"
        raise UserError(f"{name} {value}: must be {allowed}")


def add_conversion_options(parser: argparse.ArgumentParser) -> None:
    """--out and all that changes how, not what, is converted."""
    rules = ImageRules()
    add = parser.add_argument_group("the shards").add_argument
    add("--out", type=Path, required=True, help="directory for the shards; made if need be")
    add("--seed", type=int, default=0, help="of the order of the samples (default 0)")
    add(
        "--shard-samples",
        type=int,
        default=0,
        help="samples in a shard (default: about 100 MB of them, but eight shards at least where "
        "that leaves 100 samples in each)",
    )
    add(
        "--workers",
        type=int,
        default=os.cpu_count() or 1,
        help="processes, each on a shard of its own (default: one for each CPU; 0: none beside "
        "this one). The bytes do not depend on it",
    )
    add(
        "--short-side",
        type=int,
        default=rules.short_side,
        metavar="N",
        help="scale images down to N pixels on their shorter side; smaller ones stay as they are "
        "(default 0: keep every image's own bytes)",
    )
    add(
        "--quality",
        type=int,
        default=rules.quality,
        help=f"of JPEGs that are scaled down (default {rules.quality})",
    )
    add(
        "--max-pixels",
        type=int,
        default=rules.max_pixels,
        help=f"an image that claims more is bad (default {rules.max_pixels})",
    )
    add(
        "--on-bad",
        choices=("fail", "skip"),
        default="fail",
        help="images that are damaged or of an unknown kind: name them all and fail (default), or "
        "leave them out and list them in the index",
    )
    add("--dry-run", action="store_true", help="say what would be written, and write nothing")


def conversion_options(arguments: argparse.Namespace, converter: str) -> ConversionOptions:
    """What the parser found, checked."""
    return ConversionOptions(
        converter=converter,
        out=arguments.out,
        seed=arguments.seed,
        shard_samples=arguments.shard_samples,
        workers=arguments.workers,
        rules=ImageRules(arguments.short_side, arguments.quality, arguments.max_pixels),
        on_bad=arguments.on_bad,
        dry_run=arguments.dry_run,
    )
