"""The order of an epoch: a pure function of (seed, epoch, step).

Training wants a random order, disks want long reads. The scheme has both:

    blocks    each shard is cut into blocks of consecutive samples, one long read each, and an
              epoch puts all blocks of all shards into a new random order: N samples in sequence
    lanes     the sequence is cut into equal lanes; a batch takes equally many from each, so a batch
              mixes as many distant regions as there are lanes, and ranks, which take consecutive
              places of the batch, read from regions of their own
    windows   inside a lane, samples of consecutive blocks are permuted: what is read ahead

The sequence begins at a random place and goes on at its start, so that where lanes and windows
begin has nothing to do with where blocks do: every sample is equally likely to stand anywhere.

With blocks of one sample it is a uniform permutation. What does not fill a batch, fewer than
`batch_size` samples at the sequence's end, is left out of that epoch: other ones in every epoch.
"""

from functools import lru_cache

import numpy as np

# --------------------------------------------------------------------------------------------------
# Random bits without a generator: a function of (seed, epoch, sample, stream) alone.
#
# So neither the number of ranks or workers nor what was drawn before changes what a sample gets.
# Of our own, so that no library's new version changes it.

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
    """Uniform integers in [0, limit) from 64 random bits each; limit < 2³²."""
    product = (bits >> _HALF) * np.asarray(limit, dtype=np.uint64)
    return (product >> _HALF).astype(np.int64)


def number_below(bits: int, limit: int) -> int:
    """`below` for a single sample."""
    return (bits >> 32) * limit >> 32


def uniform(bits: np.ndarray) -> np.ndarray:
    """Uniform float64 in [0, 1)."""
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


MAX_LANES = 64
BLOCK_BYTES = 4 << 20
# Sets below this are soon in the page cache: the order of reading does not matter.
SMALL_SET_BYTES = 1 << 30
_BLOCKS, _WINDOWS, _FIRST = 101, 102, 103  # streams of random bits


class Order:
    """shard_samples: how many samples each shard holds; samples are numbered through all shards.
    block: samples read in one go. window: samples in the windows of all lanes together."""

    def __init__(
        self, shard_samples: list[int], batch_size: int, block: int, window: int, seed: int
    ) -> None:
        self.samples = sum(shard_samples)
        self.batch_size, self._seed = batch_size, seed
        self.steps_per_epoch = self.samples // batch_size
        assert self.steps_per_epoch, "there is a batch"
        # The largest number that divides the batch.
        self.lanes = max(n for n in range(1, MAX_LANES + 1) if batch_size % n == 0)
        self._per_step = batch_size // self.lanes
        self._lane_length = self.steps_per_epoch * self._per_step
        # Full steps, so that a step never looks into two windows of a lane.
        self.steps_per_window = min(max(1, window // batch_size), self.steps_per_epoch)
        self._block_starts, self._block_lengths = cut_into_blocks(shard_samples, block)
        self._sequence = lru_cache(maxsize=2)(self._epoch_sequence)
        self._shuffled = lru_cache(maxsize=2)(self._window_permutations)

    def ids(self, epoch: int, step: int, start: int = 0, stop: int | None = None) -> np.ndarray:
        """The samples at places [start, stop) of the batch of a step."""
        stop = self.batch_size if stop is None else stop
        window, step_in_window = divmod(step, self.steps_per_window)
        places = np.arange(start, stop)
        lane, place = places // self._per_step, places % self._per_step
        offset = self._shuffled(epoch, window)[lane, step_in_window * self._per_step + place]
        return self._samples_at(epoch, lane * self._lane_length + self._start_of(window) + offset)

    def runs(self, epoch: int, window: int, lane: int) -> list[tuple[int, int]]:
        """What a lane's window reads, as (first, last) of consecutive samples."""
        first = lane * self._lane_length + self._start_of(window)
        ids = self._samples_at(epoch, first + np.arange(self._length_of(window)))
        breaks = np.flatnonzero(np.diff(ids) != 1)
        firsts, lasts = np.append(0, breaks + 1), np.append(breaks, len(ids) - 1)
        return [(int(ids[a]), int(ids[b])) for a, b in zip(firsts, lasts, strict=True)]

    def lanes_of(self, start: int, stop: int) -> range:
        """The lanes that places [start, stop) of a batch are taken from."""
        return range(start // self._per_step, -(-stop // self._per_step))

    def _start_of(self, window: int) -> int:
        return window * self.steps_per_window * self._per_step

    def _length_of(self, window: int) -> int:
        full = self.steps_per_window * self._per_step
        return min(full, self._lane_length - self._start_of(window))

    def _samples_at(self, epoch: int, positions: np.ndarray) -> np.ndarray:
        order, ends, first = self._sequence(epoch)
        positions = (positions + first) % self.samples
        block = np.searchsorted(ends, positions, side="right")
        into_block = positions - (ends[block] - self._block_lengths[order[block]])
        return self._block_starts[order[block]] + into_block

    def _epoch_sequence(self, epoch: int) -> tuple[np.ndarray, np.ndarray, int]:
        """(the blocks in this epoch's order, the position at which each ends, where to begin)"""
        blocks = np.arange(len(self._block_starts))
        order = np.argsort(sample_bits(self._seed, epoch, blocks, _BLOCKS), kind="stable")
        first = below(sample_bits(self._seed, epoch, np.zeros(1), _FIRST), self.samples)
        return order, np.cumsum(self._block_lengths[order]), int(first[0])

    def _window_permutations(self, epoch: int, window: int) -> np.ndarray:
        """For every lane a permutation of the window's places [lanes, length]."""
        length = self._length_of(window)
        lane, place = np.arange(self.lanes)[:, None], np.arange(length)[None, :]
        numbers = lane * self._lane_length + self._start_of(window) + place  # each one its own bits
        bits = sample_bits(self._seed, epoch, numbers, _WINDOWS)
        return np.argsort(bits, axis=1, kind="stable")


def cut_into_blocks(shard_samples: list[int], block: int) -> tuple[np.ndarray, np.ndarray]:
    """(first sample, length) of every block; blocks end where their shard ends."""
    starts, lengths, first = [], [], 0
    for samples in shard_samples:
        own = np.arange(0, samples, block)
        starts.append(first + own)
        lengths.append(np.minimum(block, samples - own))
        first += samples
    return np.concatenate(starts), np.concatenate(lengths)


def choose_block(samples: int, total_bytes: int) -> int:
    """Samples to a read: one where the set is small, else so many as take about BLOCK_BYTES."""
    if total_bytes < SMALL_SET_BYTES:
        return 1
    return max(1, round(BLOCK_BYTES * samples / total_bytes))
