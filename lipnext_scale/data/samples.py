"""Reading WebDataset shards of (image, class) samples. Nothing but images and integers is decoded."""

import io
from collections.abc import Iterator
from dataclasses import dataclass
from glob import glob, has_magic
from pathlib import Path
from typing import Any

import numpy as np
import torch
import webdataset as wds
from braceexpand import braceexpand
from PIL import Image
from torch import Tensor

from lipnext_scale.config import ConfigError
from lipnext_scale.errors import UserError

BUILTIN = Path(__file__).parent / "builtin"
IMAGE_TYPES = ("png", "jpg", "jpeg")


@dataclass(frozen=True)
class Samples:
    """A decoded set: uint8 images [N, C, H, W], labels [N], and the key of each sample."""

    images: Tensor
    labels: Tensor
    keys: list[str]

    def __len__(self) -> int:
        return len(self.keys)


def resolve_shards(pattern: str, key: str) -> list[str]:
    """The shard files a pattern means, sorted; `key` is the configuration key to blame if none."""
    if pattern.startswith("builtin:"):
        pattern = str(BUILTIN / pattern.removeprefix("builtin:"))
    paths: list[str] = []
    for part in braceexpand(pattern):
        found = sorted(glob(part)) if has_magic(part) else [part]
        if not found or not all(Path(path).is_file() for path in found):
            raise ConfigError(key, pattern, f"no shard {part}; data_prep/ has the commands to write them")
        paths += found
    return paths


def read_samples(pattern: str, key: str, limit_gb: float = 8.0) -> Samples:
    """Decode all samples of the shards into memory."""
    images, labels, keys, size = [], [], [], 0
    for sample in iterate_samples(resolve_shards(pattern, key)):
        image, label, name = sample
        if images and image.shape != images[0].shape:
            raise UserError(
                f"{key} = {pattern!r}: sample {name} is {image.shape}, others are {images[0].shape}; "
                "all images of a set must have one size"
            )
        size += image.nbytes
        if size > limit_gb * 1e9:
            raise ConfigError(key, pattern, f"takes more than data.memory_limit_gb = {limit_gb:g}")
        images.append(image)
        labels.append(label)
        keys.append(name)
    if not keys:
        raise ConfigError(key, pattern, "the shards hold no samples")
    stacked = torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).contiguous()
    return Samples(stacked, torch.tensor(labels), keys)


def iterate_samples(paths: list[str]) -> Iterator[tuple[np.ndarray, int, str]]:
    """(uint8 image [H, W, C], label, key) of every sample, in the order of the shards."""
    for path in paths:
        reader = wds.WebDataset([path], shardshuffle=False, handler=wds.reraise_exception)
        samples = iter(reader)
        while True:
            try:
                sample = next(samples)
            except StopIteration:
                break
            except Exception as error:
                raise UserError(f"{path}: is not a readable shard: {error}") from None
            yield _decode(sample, path)


def _decode(sample: dict[str, Any], path: str) -> tuple[np.ndarray, int, str]:
    name = sample["__key__"]
    encoded = next((sample[kind] for kind in IMAGE_TYPES if kind in sample), None)
    if encoded is None or "cls" not in sample:
        raise UserError(f"{path}: sample {name} needs a .cls and an image ({', '.join(IMAGE_TYPES)})")
    try:
        with Image.open(io.BytesIO(encoded)) as opened:
            image = np.asarray(opened if opened.mode == "L" else opened.convert("RGB"))
        label = int(sample["cls"])
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: sample {name} cannot be decoded: {error}") from None
    return image.reshape(*image.shape[:2], -1), label, name
