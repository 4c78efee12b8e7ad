"""Batches: their order, and a loader that is put back where another one stopped."""

from itertools import islice

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from shard_making import noise

from lipnext_scale.config import ConfigError
from lipnext_scale.data import Batch, DataConfig, MemoryLoader, Samples
from lipnext_scale.data.loader import epoch_order


def make_samples(count: int) -> Samples:
    images = torch.from_numpy(noise(count, 2, 5, 5))
    return Samples(images, torch.arange(count) % 7, [f"{i:03d}" for i in range(count)])


def make_loader(count: int, batch_size: int, seed: int = 0, augment: bool = True) -> MemoryLoader:
    config = DataConfig("train", "test", batch_size, crop_padding=2 if augment else 0, flip=augment)
    return MemoryLoader(make_samples(count), config, seed)


def assert_same_batch(one: Batch, other: Batch) -> None:
    assert (one.epoch, one.last_of_epoch) == (other.epoch, other.last_of_epoch)
    assert np.array_equal(one.ids, other.ids)
    assert torch.equal(one.labels, other.labels)
    assert torch.equal(one.images, other.images)


sizes = st.tuples(st.integers(1, 40), st.integers(1, 12)).filter(lambda pair: pair[0] >= pair[1])


# --- an epoch ---------------------------------------------------------------------------------


@settings(deadline=None)
@given(sizes, st.integers(0, 2**70), st.integers(1, 3))
def test_an_epoch_has_every_sample_at_most_once_in_equal_batches(size, seed, epochs):
    """Batches are full; what does not fill one is left out; no sample comes twice in an epoch."""
    count, batch_size = size
    loader = make_loader(count, batch_size, seed)
    steps = loader.steps_per_epoch
    assert steps == count // batch_size
    batches = list(islice(loader, steps * epochs))
    for epoch in range(epochs):
        own = batches[epoch * steps : (epoch + 1) * steps]
        assert [batch.epoch for batch in own] == [epoch] * steps
        assert [batch.last_of_epoch for batch in own] == [False] * (steps - 1) + [True]
        ids = np.concatenate([batch.ids for batch in own])
        assert len(ids) == steps * batch_size == len(set(ids.tolist()))
        assert ids.min() >= 0 and ids.max() < count


@given(sizes)
@settings(deadline=None)
def test_images_and_labels_are_those_of_the_ids(size):
    """Without augmentation a batch is the rows of the set that its ids name."""
    samples, loader = make_samples(size[0]), make_loader(*size, augment=False)
    for batch in islice(loader, 2 * loader.steps_per_epoch):
        assert batch.images.dtype == torch.uint8
        assert torch.equal(batch.images, samples.images[batch.ids])
        assert torch.equal(batch.labels, samples.labels[batch.ids])


@settings(deadline=None)
@given(st.integers(0, 60), st.integers(0, 2**70), st.integers(0, 10**6))
def test_the_order_is_a_permutation_from_seed_and_epoch_alone(count, seed, epoch):
    """Asked again, whatever was drawn from the global generators in between, it is the same."""
    first = epoch_order(count, seed, epoch)
    np.random.rand(3)
    torch.rand(3)
    assert np.array_equal(epoch_order(count, seed, epoch), first)
    assert np.array_equal(np.sort(first), np.arange(count))


def test_epochs_and_seeds_differ():
    """Fifty orders of thirty samples, over five seeds and ten epochs, are fifty different ones."""
    orders = {epoch_order(30, seed, epoch).tobytes() for seed in range(5) for epoch in range(10)}
    assert len(orders) == 50
    loader = make_loader(32, 8)
    batches = list(islice(loader, 8))
    assert not np.array_equal(
        np.concatenate([b.ids for b in batches[:4]]), np.concatenate([b.ids for b in batches[4:]])
    )


def test_what_is_left_out_changes(tmp_path):
    """A set that does not fill its batches leaves out other samples each time, all of them seen."""
    loader = make_loader(11, 4)
    seen = np.concatenate([batch.ids for batch in islice(loader, 2 * 12)])
    assert set(seen.tolist()) == set(range(11))


def test_seeds_differ_in_the_augmentation_too():
    """Two seeds, the same samples: other crops."""
    pixels = []
    for seed in (0, 1):
        batches = list(islice(make_loader(32, 8, seed), 4))
        order = np.argsort(np.concatenate([batch.ids for batch in batches]))
        pixels.append(torch.cat([batch.images for batch in batches])[order])
    assert not torch.equal(*pixels)


def test_too_large_a_batch_is_refused():
    """A loader that would never hand out a batch names the key, the value and the set."""
    with pytest.raises(ConfigError, match="^data.batch_size = 5: .* the 4 samples of data.train"):
        make_loader(4, 5)


# --- its place --------------------------------------------------------------------------------


@settings(deadline=None)
@given(sizes, st.integers(0, 99), st.data())
def test_continuing_from_any_step(size, seed, data):
    """A fresh loader with the state hands out the very batches that the first one goes on with."""
    whole = make_loader(*size, seed)
    steps = whole.steps_per_epoch
    step = data.draw(st.integers(0, 3 * steps), label="step")
    first = iter(whole)
    for _ in range(step):
        next(first)
    state = dict(whole.state_dict())
    resumed = make_loader(*size, seed)
    resumed.load_state_dict(state)
    assert resumed.state_dict() == state
    for expected, batch in islice(zip(first, resumed, strict=True), steps + 2):
        assert_same_batch(batch, expected)
        assert resumed.state_dict() == whole.state_dict()


@pytest.mark.parametrize("epoch", [1, 2])
def test_continuing_from_the_end_of_an_epoch(epoch):
    """After an epoch's last batch comes the first one of the next, not a repetition or a gap."""
    whole = make_loader(10, 3)
    first = iter(whole)
    for _ in range(epoch * 3):
        last = next(first)
    assert last.last_of_epoch and last.epoch == epoch - 1
    resumed = make_loader(10, 3)
    resumed.load_state_dict(whole.state_dict())
    batch = next(iter(resumed))
    assert batch.epoch == epoch
    assert_same_batch(batch, next(first))


def test_a_loader_that_has_gone_on_can_be_put_back():
    """Its own state, loaded later, repeats the batches from there, also within an epoch."""
    loader = make_loader(20, 3)
    batches = iter(loader)
    for _ in range(8):
        next(batches)
    state = dict(loader.state_dict())
    expected = [next(batches) for _ in range(9)]
    loader.load_state_dict(state)
    for batch, again in zip(expected, loader, strict=False):
        assert_same_batch(again, batch)


def test_state_is_plain():
    """Integers and text alone: it goes into a checkpoint that carries no code."""
    loader = make_loader(20, 3)
    next(iter(loader))
    assert all(type(value) in (int, str) for value in loader.state_dict().values())


def test_a_new_iteration_goes_on_where_the_last_one_stopped():
    """The loader, not the iterator, knows the place."""
    whole = list(islice(make_loader(20, 3), 5))
    loader = make_loader(20, 3)
    parts = list(islice(loader, 2)) + list(islice(loader, 3))
    for expected, batch in zip(whole, parts, strict=True):
        assert_same_batch(batch, expected)


# --- the set itself ---------------------------------------------------------------------------


def test_the_stored_images_stay_as_they_are():
    """Neither augmentation nor what is done to a batch reaches the set in memory."""
    samples = make_samples(24)
    kept = samples.images.clone()
    for padding, flip in ((0, False), (0, True), (2, False), (2, True)):
        loader = MemoryLoader(samples, DataConfig("a", "b", 5, padding, flip), seed=0)
        for batch in islice(loader, 6):
            batch.images.fill_(255)
            batch.labels.fill_(-1)
        assert torch.equal(samples.images, kept)
    assert torch.equal(samples.labels, torch.arange(24) % 7)
