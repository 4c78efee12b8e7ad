"""Worker processes: one that stands still, how far the others go, and how all of them end."""

import multiprocessing
import signal
import threading
import time
from itertools import islice
from multiprocessing.process import BaseProcess

import numpy as np
import pytest
import torch
from sets_making import make_loader, make_source, write_set

from lipnext_scale.data import StreamLoader
from lipnext_scale.data.loader import BatchMaker, MadeBatch, lost_a_worker

WORKERS, PREFETCH = 2, 2
UNDER_WAY = WORKERS * PREFETCH


class GatedMaker(BatchMaker):
    """The worker of step `gated` stands still until the gate opens."""

    def __init__(self, shards: str, gated: int) -> None:
        super().__init__([make_source(shards, 8)])
        self._gated, context = gated, multiprocessing.get_context("fork")
        self.gate, self._furthest = context.Event(), context.Value("q", -1)

    def make(self, step: int, out: np.ndarray, worker: int = 0, workers: int = 1) -> MadeBatch:
        with self._furthest.get_lock():
            self._furthest.value = max(self._furthest.value, step)
        if step == self._gated:
            assert self.gate.wait(60)
        return super().make(step, out, worker, workers)

    def begun(self, at_least: int) -> int:
        """The furthest step that was begun, half a second after it has come so far."""
        deadline = time.monotonic() + 60
        while self._furthest.value < at_least:
            assert time.monotonic() < deadline, f"no worker goes beyond {self._furthest.value}"
            time.sleep(0.01)
        time.sleep(0.5)
        return self._furthest.value


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_set(tmp_path_factory.mktemp("shards"), [40, 24])


@pytest.fixture
def new_children():
    """The child processes that have come since the test began."""
    before = multiprocessing.active_children()

    def children() -> list[BaseProcess]:
        return [child for child in multiprocessing.active_children() if child not in before]

    return children


def test_others_go_on_and_not_too_far(shards):
    """While one worker is in step 1 the other makes what may be under way, and no more; the order
    stays what it was."""
    expected = list(islice(make_loader(shards, 8), 12))
    maker = GatedMaker(shards, gated=1)
    batches = iter(StreamLoader(maker, WORKERS, PREFETCH))
    found = [next(batches)]
    rest = threading.Thread(target=lambda: found.extend(islice(batches, 11)))
    rest.start()
    assert maker.begun(at_least=UNDER_WAY) == UNDER_WAY  # steps 1 to 4
    assert len(found) == 1
    maker.gate.set()
    rest.join(60)
    for batch, same in zip(found, expected, strict=True):
        assert np.array_equal(batch.ids, same.ids) and torch.equal(batch.images, same.images)
    batches.close()


def test_workers_that_wait_for_their_turn_end_at_once(shards, new_children):
    """The rank stops while they may not go on: torch would wait ten seconds for each of them."""
    maker = GatedMaker(shards, gated=0)
    batches = iter(StreamLoader(maker, WORKERS, PREFETCH))
    opened = threading.Thread(target=lambda: (maker.begun(UNDER_WAY - 1), maker.gate.set()))
    opened.start()
    next(batches)  # having taken steps 1 to 3 before it, so that step 5 may not begin
    assert maker.begun(at_least=UNDER_WAY) == UNDER_WAY
    workers, began = new_children(), time.monotonic()
    batches.close()
    assert time.monotonic() - began < 4
    assert len(workers) == WORKERS and not any(worker.is_alive() for worker in workers)
    opened.join()


def test_one_that_dies_is_noticed_where_torchs_error_is_lost(shards, new_children):
    """Killed while it waits for its turn, it owes no batch: the other could go on without it."""
    maker = GatedMaker(shards, gated=-1)
    batches = iter(StreamLoader(maker, WORKERS, PREFETCH))
    next(batches)
    assert maker.begun(at_least=UNDER_WAY) == UNDER_WAY
    torchs = signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # as where it raises in a finalizer
    try:
        victim = new_children()[0]
        victim.kill()
        victim.join()
        with pytest.raises(RuntimeError) as ended:
            next(islice(batches, 2 * UNDER_WAY, None))
    finally:
        signal.signal(signal.SIGCHLD, torchs)
    assert lost_a_worker(ended.value) and str(victim.pid) in str(ended.value)
