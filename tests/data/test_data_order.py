"""The order of an epoch: a permutation, from (seed, epoch, step) alone, with long reads."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lipnext_scale.data.order import Order

shards = st.lists(st.integers(0, 40), min_size=1, max_size=13)
# shards, batch size, block, window
cases = st.tuples(shards, st.integers(1, 24), st.integers(1, 9), st.integers(1, 80)).filter(
    lambda case: sum(case[0]) >= case[1]
)


def epoch_ids(order: Order, epoch: int) -> np.ndarray:
    return np.concatenate([order.ids(epoch, step) for step in range(order.steps_per_epoch)])


@settings(deadline=None)
@given(cases, st.integers(0, 2**70), st.integers(0, 10**6))
def test_an_epoch_has_every_sample_at_most_once(case, seed, epoch):
    """Whatever the shards, blocks and windows; fewer than a batch are left out."""
    order = Order(*case, seed)
    ids = epoch_ids(order, epoch)
    assert len(ids) == order.steps_per_epoch * order.batch_size == len(set(ids.tolist()))
    assert sum(case[0]) - len(ids) < order.batch_size
    assert ids.min() >= 0 and ids.max() < sum(case[0])


@settings(deadline=None, max_examples=60)
@given(cases, st.data())
def test_no_step_needs_another_step(case, data):
    """A fresh object, asked for any places of any step of any epoch, says what one that has been
    there does."""
    order, fresh = Order(*case, seed=1), Order(*case, seed=1)
    for epoch in (0, 1, 2, 0):
        epoch_ids(order, epoch)
    epoch = data.draw(st.integers(0, 3))
    step = data.draw(st.integers(0, order.steps_per_epoch - 1))
    start = data.draw(st.integers(0, order.batch_size))
    stop = data.draw(st.integers(start, order.batch_size))
    assert np.array_equal(fresh.ids(epoch, step, start, stop), order.ids(epoch, step)[start:stop])


@settings(deadline=None, max_examples=40)
@given(cases, st.integers(0, 3))
def test_the_runs_of_the_windows_are_what_the_steps_read(case, epoch):
    """What is read ahead for a window is just what its steps take, lane by lane."""
    order = Order(*case, seed=2)
    windows = -(-order.steps_per_epoch // order.steps_per_window)
    for window in range(windows):
        first = window * order.steps_per_window
        steps = range(first, min(first + order.steps_per_window, order.steps_per_epoch))
        taken = np.concatenate([order.ids(epoch, step) for step in steps])
        runs = [run for lane in range(order.lanes) for run in order.runs(epoch, window, lane)]
        ahead = np.concatenate([np.arange(a, b + 1) for a, b in runs])
        assert sorted(taken.tolist()) == sorted(ahead.tolist())


def test_ranks_read_regions_of_their_own():
    """With 8 ranks, a window's blocks belong to one rank each, but for those that lanes share."""
    order = Order([5000] * 4, 64, block=50, window=6400, seed=0)
    assert order.lanes == 64 and Order([99], 50, 1, 1, 0).lanes == 50
    owners: dict[int, set[int]] = {}
    for rank in range(8):
        for step in range(order.steps_per_window):
            for sample in order.ids(0, step, 8 * rank, 8 * rank + 8):
                owners.setdefault(int(sample) // 50, set()).add(rank)
    shared = [block for block, ranks in owners.items() if len(ranks) > 1]
    assert len(shared) <= 8 and len(owners) > 100


def test_reads_are_long():
    """A window's reads are whole blocks, but for the ends of lanes: few for many samples."""
    order = Order([1000] * 20, 64, block=50, window=6400, seed=0)
    runs = [run for lane in range(order.lanes) for run in order.runs(0, 0, lane)]
    assert sum(b - a + 1 for a, b in runs) == 6400
    assert len(runs) <= 6400 / 50 + 2 * order.lanes


def test_epochs_and_seeds_differ():
    """Fifty orders, over five seeds and ten epochs, are fifty different ones; so are windows."""
    found = {
        epoch_ids(Order([30], 5, 1, 1 << 14, seed), epoch).tobytes()
        for seed in range(5)
        for epoch in range(10)
    }
    assert len(found) == 50
    order = Order([4000], 10, block=1000, window=100, seed=0)
    lane = np.array([order.ids(0, step, 0, 1)[0] for step in range(80)]).reshape(8, 10)
    assert len({np.argsort(window).tobytes() for window in lane}) == 8


@pytest.mark.parametrize("block", [1, 16])
def test_places_are_uniform(block):
    """Over epochs each sample stands in the first quarter of the steps a quarter of the time."""
    order = Order([64, 64], 8, block, window=64, seed=7)
    early = np.zeros(128)
    for epoch in range(400):
        early[epoch_ids(order, epoch)[:32]] += 1
    assert abs(early.mean() - 100) < 1e-9
    assert early.std() < 2 * np.sqrt(400 * 0.25 * 0.75)


def class_entropy(labels: np.ndarray) -> float:
    """Bits."""
    shares = np.unique(labels, return_counts=True)[1] / len(labels)
    return float(-(shares * np.log2(shares)).sum())


def test_batches_of_sorted_shards_are_mixed():
    """Shards sorted by class, the worst case: batches have nearly the entropy of random ones.

    100 classes of 200 samples; a batch of 64 at random has 5.55 bits; a block of 20 from every
    window in turn, as a plain shuffle buffer reads, would have far less.
    """
    labels = np.repeat(np.arange(100), 200)
    order = Order([2000] * 10, 64, block=20, window=2560, seed=0)
    found = np.mean([class_entropy(labels[order.ids(0, s)]) for s in range(order.steps_per_epoch)])
    random = np.random.default_rng(0)
    ideal = np.mean([class_entropy(random.choice(labels, 64, False)) for _ in range(300)])
    assert found > 0.97 * ideal
