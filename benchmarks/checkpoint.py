"""Writing a checkpoint, in units of writing the same tensors by torch.save and syncing the file.

    python -m benchmarks.checkpoint [--megabytes 400] [--rounds 5]

One process. `blocked` is what the training waits for in an asynchronous save: a copy in memory.
`complete` is until the checkpoint has its name: written, hashed, synced, read back and compared.
`verify` and `load` are what a resuming run does before it goes on.
"""

import argparse
import os
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from benchmarks.timing import machine, print_rows
from lipnext_scale.checkpoint import (
    CheckpointWriter,
    StateShard,
    latest_checkpoint,
    load_shards,
    verify_checkpoint,
)

SIDE = 1024  # matrices of 4 MB
PLAIN = "torch.save and fsync"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    count = max(1, arguments.megabytes * 10**6 // (4 * SIDE**2))
    tensors = {f"matrix.{index}": torch.randn(SIDE, SIDE) for index in range(count)}
    shards = {name: StateShard(tensor, (SIDE, SIDE), (0, 0)) for name, tensor in tensors.items()}
    print(machine())
    print(f"{count} matrices, {count * 4 * SIDE**2 / 1e6:.0f} MB")
    seconds: dict[str, list[float]] = {}
    with TemporaryDirectory() as directory:
        writer = CheckpointWriter(Path(directory) / "checkpoints", keep_last=1)
        for turn in range(arguments.rounds + 1):  # the first makes the memory to copy into
            marks = [("", time.perf_counter())]
            with (Path(directory) / "plain.pt").open("wb") as file:
                torch.save(tensors, file)
                file.flush()
                os.fsync(file.fileno())
            marks.append((PLAIN, time.perf_counter()))
            writer.save(turn, shards, {})
            marks.append(("blocked", time.perf_counter()))
            writer.wait()
            marks.append(("complete, after that", time.perf_counter()))
            path = latest_checkpoint(writer.directory)
            assert path is not None
            verify_checkpoint(path)
            marks.append(("verify", time.perf_counter()))
            load_shards(path, shards)
            marks.append(("load", time.perf_counter()))
            for (_, start), (name, end) in zip(marks, marks[1:], strict=False):
                if turn:
                    seconds.setdefault(name, []).append(end - start)
    print_rows(seconds, PLAIN)


if __name__ == "__main__":
    main()
