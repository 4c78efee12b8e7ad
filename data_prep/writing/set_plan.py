"""One set before it is written: what goes into which shard, and how many bytes that takes.

The order of the samples follows from the seed, a shard's samples from the order, its bytes from its
samples. So shards can be made in any order, by any number of processes, now or later.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from data_prep.sources.collection import Collection
from data_prep.writing.encoding import BadImage, ImageRules, stored_image
from data_prep.writing.options import ConversionOptions
from data_prep.writing.set_state import SetState, find_state
from data_prep.writing.shard_jobs import ShardMaker, printable
from lipnext_scale import __version__
from lipnext_scale.errors import UserError

SHARD_BYTES = 100_000_000
FEWEST_SHARDS, FEWEST_SAMPLES = 8, 100
# Bytes a tar takes beside the images: two headers and the class for a sample, its end for a shard.
BLOCK = 512
SAMPLE_OVERHEAD, SHARD_OVERHEAD = 3 * BLOCK, 20 * BLOCK
PROBES = 50
RECORD_BYTES = 64  # in the journal and the index


@dataclass(frozen=True)
class SetSource:
    """A set to be written: its name ("train", "test"), its samples, what its index tells of it."""

    name: str
    collection: Collection
    source: dict[str, Any]


def default_shard_samples(sizes: np.ndarray) -> int:
    """Near SHARD_BYTES, but FEWEST_SHARDS at least where each then still has FEWEST_SAMPLES."""
    by_size = int(SHARD_BYTES // sizes.mean())
    by_count = max(FEWEST_SAMPLES, -(-len(sizes) // FEWEST_SHARDS))
    return max(1, min(by_size, by_count, len(sizes)))


def _share(collection: Collection, rules: ImageRules) -> float:
    """What is left of the bytes when images are scaled down, by some that are spread over the set:
    by their full size the disk would seem too small, and shards would become so."""
    before = after = 0
    places = np.linspace(0, len(collection) - 1, PROBES if rules.short_side else 0).astype(int)
    for i in sorted(set(places.tolist())):
        try:
            after += len(stored_image(collection.load(i), rules).content)
        except (BadImage, OSError):  # in its turn it will be told of
            continue
        before += collection.estimated_bytes(i)
    return round(after / before, 2) or 0.01 if before else 1.0


class SetPlan:
    """A set as the options want it written; `converter` and `source` go into its index."""

    def __init__(self, one: SetSource, options: ConversionOptions) -> None:
        self.name, self.options, self._collection = one.name, options, one.collection
        self.samples = len(one.collection)
        if not self.samples:
            raise UserError(f"{one.name}: the source holds no samples")
        estimates = (one.collection.estimated_bytes(i) for i in range(self.samples))
        sizes = np.fromiter(estimates, np.int64, self.samples) * _share(
            one.collection, options.rules
        )
        self._bytes = np.ceil(sizes / BLOCK).astype(np.int64) * BLOCK + SAMPLE_OVERHEAD
        self.shard_samples = options.shard_samples or default_shard_samples(self._bytes)
        self.shards = -(-self.samples // self.shard_samples)
        settings = options.settings() | {"shard_samples": self.shard_samples}
        self.converter = {"name": options.converter, "version": __version__, "settings": settings}
        listed = {"samples": self.samples, "fingerprint": one.collection.fingerprint()}
        self.source = one.source | listed
        self.classes = [printable(name) for name in one.collection.classes]

    @property
    def identity(self) -> dict[str, Any]:
        return {"converter": self.converter, "source": self.source, "classes": self.classes}

    @cached_property
    def _order(self) -> np.ndarray:
        # Of numpy's generators the one whose numbers are promised never to change.
        return np.random.RandomState(self.options.seed).permutation(self.samples)

    def numbers(self, shard: int) -> np.ndarray:
        """The samples of a shard, in their order there."""
        return self._order[shard * self.shard_samples : (shard + 1) * self.shard_samples]

    def maker(self) -> ShardMaker:
        return ShardMaker(self._collection, self.options.out, self.name, self.options.rules)

    def state(self) -> SetState:
        """What is there of the set. Where bad images are to fail, a shard that was finished without
        some is made again: they may have been mended."""
        state = find_state(self.options.out, self.name, self.identity, self.shards)
        strict = self.options.on_bad == "fail"
        if strict and state.complete and state.complete.skipped:
            raise UserError(
                f"{self.name}: is complete, but for {len(state.complete.skipped)} bad images that "
                "were left out; say --on-bad skip to let it be so, or remove it"
            )
        notes = {k: note for k, note in state.notes.items() if not (strict and note.skipped)}
        return SetState(state.complete, state.unfinished, notes)

    def estimated_bytes(self, shards: Iterable[int]) -> int:
        """About as many as these shards will take."""
        return sum(
            int(self._bytes[numbers].sum()) + SHARD_OVERHEAD + RECORD_BYTES * len(numbers)
            for numbers in map(self.numbers, shards)
        )

    def described(self) -> str:
        return (
            f"{self.name}: {self.samples:,} samples of {len(self.classes):,} classes in "
            f"{self.shards:,} shards of {self.shard_samples:,}, "
            f"about {self.estimated_bytes(range(self.shards)):,} bytes"
        )
