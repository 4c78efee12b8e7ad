"""What a set of shards is like, from its records alone: no image is decoded."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.checking.shard_sets import ShardSet
from lipnext_scale.data.beton import beton_records
from lipnext_scale.data.index import KINDS, index_paths, map_records, read_index
from lipnext_scale.data.tar_scan import scan_tar

# A shard is taken for shuffled if its classes are at least so diverse beside a random draw's.
SHUFFLED = 0.9
_DRAWS = 4


@dataclass
class SetView:
    """The shards of a set with their records, and what the index says of them if there is one."""

    title: str
    directory: Path
    files: list[str]
    records: list[np.ndarray]
    bytes: int
    classes: list[str] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)

    def all_records(self) -> np.ndarray:
        return np.concatenate(self.records) if self.records else np.zeros(0)

    def class_name(self, label: int) -> str:
        return self.classes[label] if 0 <= label < len(self.classes) else ""


def view_set(shard_set: ShardSet) -> SetView:
    """Open a set by its index, or by its shards' headers."""
    if shard_set.index is None:
        files = shard_set.files or []
        paths = [shard_set.directory / file for file in files]
        records = [beton_records(p) if p.suffix == ".beton" else scan_tar(p)[0] for p in paths]
        size = sum(path.stat().st_size for path in paths)
        return SetView(shard_set.title, shard_set.directory, files, records, size)
    index = read_index(shard_set.index)
    everything = map_records(index_paths(shard_set.directory, shard_set.name)[1], index.samples)
    facts = {
        "source": index.source,
        "converter": index.converter,
        "skipped": len(index.skipped),
    }
    view = SetView(shard_set.title, shard_set.directory, [], [], 0, index.classes, facts)
    first = 0
    for entry in index.shards:
        if shard_set.files is None or entry.file in shard_set.files:
            view.files.append(entry.file)
            view.records.append(everything[first : first + entry.samples])
            view.bytes += entry.bytes
        first += entry.samples
    return view


def statistics(view: SetView) -> dict[str, Any]:
    """Everything that inspect tells, as plain values."""
    records = view.all_records()
    if not len(records):
        return {"set": view.title, "samples": 0, "shards": len(view.files), "bytes": view.bytes}
    labels, counts = np.unique(records["label"], return_counts=True)
    return {
        "set": view.title,
        "samples": len(records),
        "shards": len(view.files),
        "bytes": view.bytes,
        "kinds": _counted(records["kind"], {number: name for name, number in KINDS.items()}),
        "channels": _counted(records["channels"], {0: "not known"}),
        "height": _spread(records["height"]),
        "width": _spread(records["width"]),
        "image_bytes": _spread(records["size"]),
        "class_names": view.classes,
        "class_counts": {int(a): int(b) for a, b in zip(labels, counts, strict=True)},
        "shuffling": _shuffling(view, labels, counts),
        **view.facts,
    }


def _counted(values: np.ndarray, names: dict[int, str]) -> dict[str, int]:
    found, counts = np.unique(values, return_counts=True)
    pairs = zip(found, counts, strict=True)
    return {names.get(int(value), str(value)): int(count) for value, count in pairs}


def _spread(values: np.ndarray) -> dict[str, float] | None:
    """Smallest, median and largest of those that are known; None if none is."""
    known = values[values > 0]
    if not len(known):
        return None
    return {
        "min": int(known.min()),
        "median": float(np.median(known)),
        "max": int(known.max()),
    }


def _shuffling(view: SetView, labels: np.ndarray, counts: np.ndarray) -> dict[str, Any]:
    """How diverse the classes of each shard are beside those of as many samples drawn at random:
    the bits of entropy of few samples are fewer than those of the set, shuffled or not."""
    generator = np.random.default_rng(0)
    expected: dict[int, float] = {}  # by the number of samples
    shards = []
    for file, records in zip(view.files, view.records, strict=True):
        size = len(records)
        if size and size not in expected:
            draws = generator.multivariate_hypergeometric(
                counts, size, size=_DRAWS, method="marginals"
            )
            expected[size] = float(np.mean([entropy(draw) for draw in draws]))
        if size:
            own = np.bincount(np.searchsorted(labels, records["label"]), minlength=len(labels))
            shards.append((entropy(own), expected[size], file))
    bits, of_random, file = min(shards, key=lambda shard: _share(*shard[:2]))
    share = _share(bits, of_random)
    return {
        "set_entropy": entropy(counts),
        "mean_entropy": float(np.mean([shard[0] for shard in shards])),
        "random_entropy": float(np.mean([shard[1] for shard in shards])),
        "least_diverse": {"shard": file, "entropy": bits, "of_random": share},
        "same_class_neighbours": _same_neighbours(view.records),
        "same_class_pairs": float(((counts / counts.sum()) ** 2).sum()),
        "shards_shuffled": bool(share >= SHUFFLED),
    }


def entropy(counts: np.ndarray) -> float:
    """Bits, of the distribution that the counts are."""
    shares = counts[counts > 0] / counts.sum()
    return abs(float(-(shares * np.log2(shares)).sum()))  # one class: 0, not -0


def _share(bits: float, of_random: float) -> float:
    return bits / of_random if of_random > 0 else 1.0


def _same_neighbours(shards: list[np.ndarray]) -> float:
    """The share of neighbours inside shards that are of one class."""
    same = sum(int((r["label"][1:] == r["label"][:-1]).sum()) for r in shards)
    return same / max(1, sum(max(len(r) - 1, 0) for r in shards))
