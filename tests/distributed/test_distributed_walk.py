"""What a walk says of memory and collectives is what real processes have and send."""

import ctypes
import gc
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from count_runs import SETTINGS, Collective, Counted, CountTraffic, small_trainer
from gloo import run_processes
from torch.utils._python_dispatch import TorchDispatchMode

from lipnext_scale.planning.ledger import Row
from lipnext_scale.planning.walk import Walk, Walked, walk_all

pytestmark = pytest.mark.slow
FSDP, DDP, ROW = "parallel.engine=fsdp", "parallel.engine=ddp", "parallel.weight_layout=row"
HSDP, TWICE = "parallel.shard_size=2", "parallel.accumulation=2"
BF16, BF16_SUMS = "parallel.precision=bf16", "parallel.reduce_precision=bf16"
LAST, KEEP = "parallel.reduce_every_part=false", "parallel.reshard_after_forward=false"
RECOMPUTED, ALONE = "parallel.recompute_activations=true", "parallel.share_step=false"
MERGED = "optim.parametrisation=merged"
# Seven blocks in groups of three: seldom divisible by ranks. 18 rows are not by 4.
UNEVEN = ["model.depth=7", "model.blocks_per_bank=3", "model.width=18"]
TWO = "model.blocks_per_bank=2"
# Small ones, for what is sent alone: memory of W16 is not that of matrices.
SMALL: dict[int, list[list[str]]] = {
    1: [],
    2: [
        [FSDP, TWO, TWICE, LAST],
        [FSDP, TWO, BF16, BF16_SUMS, TWICE],
        [FSDP, TWO, RECOMPUTED, "parallel.prefetch=2"],
        [FSDP, "model.positional_embedding=false", "optim.lookahead=0", "parallel.prefetch=0"],
        [ROW, BF16, KEEP],
        [DDP, BF16, BF16_SUMS],
    ],
    4: [
        [FSDP, *UNEVEN],
        [HSDP, *UNEVEN, TWICE],
        [HSDP, TWO, TWICE, LAST, BF16, BF16_SUMS],
        [ROW, "optim.lookahead=0", *UNEVEN],
        [FSDP, "parallel.shard_size=1", BF16],
        [HSDP, *UNEVEN, ALONE, TWICE],
        [DDP, *UNEVEN, TWICE],
        [HSDP, "model.layer=sandwich"],
    ],
}
WIDE: dict[int, list[list[str]]] = {
    1: [[], [MERGED], [RECOMPUTED], [TWICE]],
    2: [[FSDP, TWO], [FSDP, TWO, KEEP, TWICE], [ROW, TWO], [DDP], [DDP, ALONE]],
    4: [[HSDP, TWO, "model.depth=7"], [ROW, HSDP], [FSDP, MERGED]],
}
STEPS = ("lookahead", "step")  # the third and the fourth


def cases(world: int) -> list[list[str]]:
    wide = [["model.width=384", "model.patch_size=2", *case] for case in WIDE[world]]
    return [*SMALL[world], *wide]


@dataclass(frozen=True)
class Measured:
    """Bytes in use at most, beyond those before the run; what steps sent."""

    peak: int
    sent: list[Counted]


def measure(rank: int, world: int, directory: Path) -> list[Measured]:
    """First runs bring what is no tensor: data, gloo's connections, scratch of such products."""
    last = cases(world)[-1]
    for name, parts in (("first", []), ("second", [TWICE])):
        measure_case(directory / name, [*last, *parts])
    return [measure_case(directory / str(i), case) for i, case in enumerate(cases(world))]


def measure_case(directory: Path, settings: list[str]) -> Measured:
    """gloo's threads may keep copies for a while that are no tensors: the lowest peak has none."""
    gc.collect()
    before, heap, sent = in_use(), MostMemory(), []
    trainer = small_trainer(directory, *settings)
    batches, peaks = iter(trainer.loader), []
    for batch in islice(batches, 2):
        trainer.train_step(batch)
    for batch in islice(batches, 4):
        gc.collect()
        with CountTraffic() as traffic, heap:
            trainer.train_step(batch)
        peaks.append(heap.most - before)
        sent.append(traffic.counted)
    del trainer, batches, batch
    return Measured(min(peaks), sent[: len(STEPS)])


class Heap(ctypes.Structure):
    """glibc's account of all threads."""

    names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in names.split()]


def in_use() -> int:
    mallinfo2: Callable[[], Any] = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = Heap  # type: ignore[attr-defined]
    found = mallinfo2()
    return int(found.uordblks + found.hblkhd)


class MostMemory(TorchDispatchMode):
    """Bytes in use after each operator."""

    most = 0

    def __enter__(self) -> "MostMemory":
        self.most = 0
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.most = max(self.most, in_use())
        return out


def sent_by(rows: list[Row]) -> Counted:
    found: Counted = {}
    for row in rows:
        if row.kind == "collective":
            before = found.get(row.name, Collective())
            found[row.name] = Collective(before.calls + 1, before.bytes_sent + row.read)
    return found


@pytest.mark.parametrize("world", WIDE)
def test_memory_and_collectives_are_those_of_real_processes(world: int, tmp_path: Path) -> None:
    """Every collective to the byte; of matrices and activations memory within 5 %."""
    measured = run_processes(world, measure, tmp_path)
    chosen = [(0, case) for case in range(len(cases(world)))]
    chosen += [(world - 1, len(SMALL[world]) + case) for case in range(len(WIDE[world]))]
    walks = [
        Walk("", settings, per_node=world, device="cpu", rank=rank, what=STEPS)
        for rank, case in chosen
        for settings in [[*SETTINGS, "run.dir=nowhere", *cases(world)[case]]]
    ]
    for (rank, case), walked in zip(chosen, walk_all(walks), strict=True):
        assert isinstance(walked, Walked), walked
        real, name = measured[rank][case], f"rank {rank} of {world}, {cases(world)[case]}"
        assert real.sent == [sent_by(rows) for rows in walked.rows.values()], name
        if case >= len(SMALL[world]):
            predicted = sum(walked.memory["step"][0].values())
            assert predicted == pytest.approx(real.peak, rel=0.05), name
