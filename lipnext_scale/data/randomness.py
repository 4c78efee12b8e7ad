"""Random bits without a generator: a function of (seed, epoch, sample, stream) alone.

So neither the number of ranks or workers nor what was drawn before changes what a sample gets, and
a run that is continued draws the same. Of our own, so that no library's new version changes it.
"""

import numpy as np

_MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_HALF = np.uint64(32)


def sample_bits(seed: int, epoch: int, ids: np.ndarray, stream: int | np.ndarray) -> np.ndarray:
    """64 random bits per sample: a counter-based generator (SplitMix64's mixing), no state.

    A column of streams [S, 1] gives [S, samples] at once.
    """
    bits = np.zeros(np.shape(ids), dtype=np.uint64)
    with np.errstate(over="ignore"):
        # Each word is mixed in before the next, or seed 1 in epoch 2 would be seed 2 in epoch 1.
        for word in (seed % 2**64, epoch, ids, stream):
            bits = (bits ^ np.asarray(word, dtype=np.uint64)) + _GOLDEN
            bits = (bits ^ (bits >> np.uint64(30))) * _MIX[0]
            bits = (bits ^ (bits >> np.uint64(27))) * _MIX[1]
            bits = bits ^ (bits >> np.uint64(31))
    return bits


def below(bits: np.ndarray, limit: int | np.ndarray) -> np.ndarray:
    """Uniform whole numbers in [0, limit) from 64 random bits each; limit < 2³²."""
    product = (bits >> _HALF) * np.asarray(limit, dtype=np.uint64)
    return (product >> _HALF).astype(np.int64)


def number_below(bits: int, limit: int) -> int:
    """`below` for a single sample."""
    return (bits >> 32) * limit >> 32


def uniform(bits: np.ndarray) -> np.ndarray:
    """Uniform float64 in [0, 1)."""
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53
