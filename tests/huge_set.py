"""A set of millions of samples that takes no disk: its shard is a file of holes."""

import os
from pathlib import Path

import numpy as np

from lipnext_scale.data.index import KINDS, RECORD, ShardEntry, write_index

IMAGE_BYTES = 2300  # of a 32×32 PNG


def write_huge_set(directory: Path, samples: int) -> str:
    directory.mkdir(parents=True, exist_ok=True)
    records = np.zeros(samples, dtype=RECORD)
    records["offset"] = np.arange(samples, dtype=np.uint64) * (IMAGE_BYTES + 1024)
    records["size"], records["kind"] = IMAGE_BYTES, KINDS["png"]
    records["label"] = np.arange(samples) % 10
    path, size = directory / "huge-000000.tar", samples * (IMAGE_BYTES + 1024)
    path.touch()
    os.truncate(path, size)
    write_index(directory, "huge", [ShardEntry(path.name, samples, size, "0" * 64)], records)
    return str(path)


def private_bytes() -> int:
    """Memory that this process shares with nobody."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith("Private_Dirty"))
