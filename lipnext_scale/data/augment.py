"""Random augmentation of uint8 batches; randomness comes from (seed, epoch, sample) alone."""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

_MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def sample_bits(seed: int, epoch: int, ids: np.ndarray, stream: int) -> np.ndarray:
    """64 random bits per sample: a counter-based generator (SplitMix64's mixing), no state."""
    bits = np.zeros(len(ids), dtype=np.uint64)
    # Each word is mixed in before the next, or seed 1 in epoch 2 would be seed 2 in epoch 1.
    for word in (seed % 2**64, epoch, ids, stream):
        with np.errstate(over="ignore"):
            bits = (bits ^ np.asarray(word, dtype=np.uint64)) + _GOLDEN
            bits = (bits ^ (bits >> np.uint64(30))) * _MIX[0]
            bits = (bits ^ (bits >> np.uint64(27))) * _MIX[1]
            bits = bits ^ (bits >> np.uint64(31))
    return bits


def random_crop(images: Tensor, padding: int, seed: int, epoch: int, ids: np.ndarray) -> Tensor:
    """Zero-pad by `padding` on all sides, then cut the original size out at a random place."""
    if padding == 0:
        return images
    count, _, height, width = images.shape
    padded = F.pad(images, (padding,) * 4)
    places = np.uint64(2 * padding + 1)
    top, left = (
        torch.from_numpy((sample_bits(seed, epoch, ids, stream) % places).astype(np.int64))
        for stream in (1, 2)
    )
    rows = top[:, None] + torch.arange(height)
    columns = left[:, None] + torch.arange(width)
    samples = torch.arange(count)[:, None, None]
    return padded[samples, :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)


def random_flip(images: Tensor, seed: int, epoch: int, ids: np.ndarray) -> Tensor:
    """Mirror every second image, on average, left to right."""
    flipped = torch.from_numpy(sample_bits(seed, epoch, ids, 3) >> np.uint64(63) == 1)
    return torch.where(flipped[:, None, None, None], images.flip(-1), images)
