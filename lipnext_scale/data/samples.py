"""Reading WebDataset shards of (image, class) samples: images and integers, nothing else."""

import hashlib
import io
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from glob import glob, has_magic
from pathlib import Path
from typing import Any

import numpy as np
import torch
from braceexpand import braceexpand
from PIL import Image
from torch import Tensor
from webdataset.tariterators import group_by_keys

from lipnext_scale.config import ConfigError
from lipnext_scale.errors import UserError

BUILTIN = Path(__file__).parent / "builtin"
IMAGE_TYPES = ("png", "jpg", "jpeg")
# Pillow would cut these off at 255 instead of scaling them.
DEEP_MODES = ("I", "F", "I;16", "I;16B", "I;16L", "I;16N")


@dataclass(frozen=True)
class Samples:
    """A decoded set: uint8 images [N, C, H, W], labels [N], and the key of each sample."""

    images: Tensor
    labels: Tensor
    keys: list[str]

    def __len__(self) -> int:
        return len(self.keys)

    def fingerprint(self) -> str:
        """A hash of everything in the set, in its order."""
        digest = hashlib.blake2b(digest_size=16)
        digest.update("\0".join(self.keys).encode())
        digest.update(self.labels.numpy().tobytes())
        digest.update(self.images.numpy().data)
        return digest.hexdigest()

    def require_fits(self, key: str, image_size: int, in_channels: int, num_classes: int) -> None:
        """The images and labels must be what the model takes; `key` names this set in messages."""
        channels, height, width = self.images.shape[1:]
        what = f"the images of {key} are {channels}×{height}×{width}"
        if height != width or height != image_size:
            raise ConfigError("model.image_size", image_size, what)
        if channels != in_channels:
            raise ConfigError("model.in_channels", in_channels, what)
        lowest, highest = int(self.labels.min()), int(self.labels.max())
        if lowest < 0 or highest >= num_classes:
            raise ConfigError(
                "model.num_classes", num_classes, f"{key} has labels from {lowest} to {highest}"
            )


def resolve_shards(pattern: str, key: str) -> list[str]:
    """The shard files a pattern means, sorted; `key` is the configuration key to blame if none."""
    expanded = pattern
    if pattern.startswith("builtin:"):
        expanded = str(BUILTIN / pattern.removeprefix("builtin:"))
    try:
        parts = list(braceexpand(expanded))
    except ValueError as error:
        raise ConfigError(key, pattern, f"is not a pattern: {error}") from None
    paths: list[str] = []
    for part in parts:
        found = sorted(glob(part)) if has_magic(part) else [part]
        if not found or not all(_is_file(path) for path in found):
            raise ConfigError(key, pattern, f"no shard {part!r} (a tar of images and .cls labels)")
        paths += found
    return paths


def _is_file(path: str) -> bool:
    try:
        return Path(path).is_file()
    except OSError:  # a name that is too long, say
        return False


def read_samples(pattern: str, key: str, limit_gb: float = 8.0) -> Samples:
    """Decode all samples of the shards into memory."""
    images: list[np.ndarray] = []
    labels: list[int] = []
    keys: list[str] = []
    size = 0
    for path in resolve_shards(pattern, key):
        for image, label, name in iterate_samples(path):
            if images and image.shape != images[0].shape:
                raise UserError(
                    f"{path}: sample {name} is {_size(image)}, the first of {key} = {pattern!r} is "
                    f"{_size(images[0])}; all images of a set must have one size"
                )
            size += image.nbytes
            if size > limit_gb * 1e9:
                raise ConfigError(
                    key, pattern, f"takes more than data.memory_limit_gb = {limit_gb:g}"
                )
            images.append(image)
            labels.append(label)
            keys.append(name)
    if not keys:
        raise ConfigError(key, pattern, "the shards hold no samples")
    stacked = torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).contiguous()
    return Samples(stacked, torch.tensor(labels), keys)


def iterate_samples(path: str) -> Iterator[tuple[np.ndarray, int, str]]:
    """(uint8 image [H, W, C], label, key) of every sample of a shard, in its order."""
    samples = group_by_keys(_members(path))
    while True:
        try:
            sample = next(samples, None)
        except Exception as error:  # whatever tarfile and zlib make of bytes that are no tar
            reason = str(error.args[0] if error.args else error).split("\n")[0]
            raise UserError(f"{path}: is not a readable shard: {reason}") from None
        if sample is None:
            return
        yield _decode(sample, path)


def _members(path: str) -> Iterator[dict[str, Any]]:
    """The regular files of a tar, as `group_by_keys` takes them."""
    with tarfile.open(path, "r:*") as tar:
        while (entry := tar.next()) is not None:
            content = tar.extractfile(entry) if entry.isreg() else None
            if content is not None:
                yield {"fname": entry.name, "data": content.read(), "__url__": path}
            tar.members = []  # type: ignore[attr-defined]  # else it remembers every entry
        # tarfile takes a cut or damage between two files for the end, so look: the end is two empty
        # blocks, and a compressed stream has its checksum after them.
        assert tar.fileobj is not None
        if tar.fileobj.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
            raise tarfile.ReadError("it is cut off or damaged")
        while tar.fileobj.read(1 << 16):
            pass


def _decode(sample: dict[str, Any], path: str) -> tuple[np.ndarray, int, str]:
    name = sample["__key__"]
    encoded = next((sample[kind] for kind in IMAGE_TYPES if kind in sample), None)
    if encoded is None or "cls" not in sample:
        raise UserError(
            f"{path}: sample {name} needs a .cls and an image ({', '.join(IMAGE_TYPES)})"
        )
    try:
        image, label = _decode_image(encoded), int(sample["cls"])
    except Exception as error:  # Pillow's decoders raise many kinds on broken bytes
        reason = str(error).split("\n")[0]
        raise UserError(f"{path}: sample {name} cannot be decoded: {reason}") from None
    if not -(2**63) <= label < 2**63:
        raise UserError(f"{path}: sample {name} has a class beyond 64 bits")
    return image, label, name


def _decode_image(encoded: bytes) -> np.ndarray:
    with Image.open(io.BytesIO(encoded)) as opened:
        if opened.mode in DEEP_MODES:
            raise ValueError(f"its pixels have more than 8 bits (mode {opened.mode})")
        image = np.asarray(opened if opened.mode == "L" else opened.convert("RGB"))
    return image.reshape(*image.shape[:2], -1)


def _size(image: np.ndarray) -> str:
    height, width, channels = image.shape
    return f"{channels}×{height}×{width}"
