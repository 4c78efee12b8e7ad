"""What loading costs: how long training waited, what the stages take, how much is ready."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from lipnext_scale.data.batches import MadeBatch
from lipnext_scale.data.source import BadReport, Stages


class LoadingStats:
    """Gathered from batch to batch; `take` tells them and starts anew."""

    def __init__(self) -> None:
        self._bad: list[BadReport] = []
        self._reset()

    def _reset(self) -> None:
        self._waited, self._since = 0.0, time.perf_counter()
        self._stages, self._ready, self._batches = Stages(), 0, 0

    @contextmanager
    def waiting(self) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self._waited += time.perf_counter() - began

    def note(self, made: MadeBatch, ready: int) -> None:
        self._stages.add(made.stages)
        self._bad += made.bad
        self._ready += ready
        self._batches += 1

    def take(self) -> dict[str, float]:
        """Images/s of a stage are those of one process that does nothing else."""
        passed = max(time.perf_counter() - self._since, 1e-9)
        stages = self._stages
        told = {
            "data/wait_share": self._waited / passed,
            "data/ready_batches": self._ready / max(1, self._batches),
        }
        for name in ("read", "decode", "augment"):
            seconds = getattr(stages, name)
            if seconds:
                told[f"data/{name}_images_per_second"] = stages.images / seconds
        self._reset()
        return told

    def take_bad(self) -> list[BadReport]:
        bad, self._bad = self._bad, []
        return bad
