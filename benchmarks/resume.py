"""How long a run of 26 million samples takes to be where it was: step 100,000 of one epoch.

    python -m benchmarks.resume

A real loader on a made set: 2,600 shards of 10,000 PNGs of 32 × 32 pixels, 1,000 classes, all links
to one tar, under an index of 624 MB that is in the page cache. `opened` has all that a run does to
its data before it has a loader: the index is read and compared, or known from the run's notes;
labels and some images are looked at. Processes are started, and modules imported, before.
"""

import io
import tarfile
import tempfile
import time
from pathlib import Path

import cv2
import numpy as np

from benchmarks.timing import machine
from lipnext_scale.data import DataConfig, DataSets
from lipnext_scale.data.index import ShardEntry, scan_tar, write_index
from lipnext_scale.utils.files import file_sha256

SHARDS, SAMPLES, CLASSES, SIZE, BATCH, STEP = 2600, 10_000, 1000, 32, 256, 100_000


def write_large_set(directory: Path) -> str:
    """As converters write sets, but that all shards have the same images."""
    tar = directory / "images.tar"
    _write_tar(tar)
    records, size, digest = scan_tar(tar)[0], tar.stat().st_size, file_sha256(tar)
    counts = {str(label): SAMPLES // CLASSES for label in range(CLASSES)}
    entries = [
        ShardEntry(f"train-{number:06d}.tar", SAMPLES, size, digest, counts)
        for number in range(SHARDS)
    ]
    write_index(directory, tar.name, [ShardEntry(tar.name, SAMPLES, size, digest)], records)
    for entry in entries:
        (directory / entry.file).symlink_to(tar)
    write_index(directory, "train", entries, np.tile(records, SHARDS), classes=[*counts])
    return f"{directory}/train-*.tar"


def _write_tar(path: Path) -> None:
    draw = np.random.default_rng(0)
    with tarfile.open(path, "w") as tar:
        for number in range(SAMPLES):
            pixels = draw.integers(0, 256, (SIZE, SIZE, 3), dtype=np.uint8)
            image = cv2.imencode(".png", pixels)[1].tobytes()
            for suffix, content in (("cls", str(number % CLASSES).encode()), ("png", image)):
                member = tarfile.TarInfo(f"{number:06d}.{suffix}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))


def resume(
    shards: str, test: str, known: set[str], workers: int = 2
) -> tuple[list[float], set[str]]:
    """Seconds until sets are opened, the loader is put to the step, its first batch is there; and
    what the run would note."""
    config = DataConfig(shards, test, BATCH, workers=workers)
    times = [time.perf_counter()]
    sets = DataSets(config, SIZE, 3, CLASSES, known)
    times.append(time.perf_counter())
    loader = sets.training_loader(seed=0)
    assert loader.steps_per_epoch > STEP
    loader.load_state_dict(loader.state_dict() | {"step": STEP})
    times.append(time.perf_counter())
    batches = iter(loader)
    batch = next(batches)
    times.append(time.perf_counter())
    assert batch.epoch == 0 and len(batch.labels) == BATCH
    del batches
    notes = set().union(*(catalog.index_stamps for catalog in sets.all))
    return [later - times[0] for later in times[1:]], notes


def measure() -> None:
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        shards = write_large_set(directory)
        test = str(directory / "images.tar")
        known: set[str] = set()
        print(f"  step {STEP:,} of an epoch of {SHARDS * SAMPLES // BATCH:,} steps, a new loader:")
        for what in ("first start", "resumed"):
            (opened, placed, first), known = resume(shards, test, known)
            print(
                f"    {what}: opened {opened:.3f} s, at the step {placed:.3f} s, "
                f"first batch {first:.3f} s"
            )


if __name__ == "__main__":
    print(machine())
    measure()
