"""Batches: the same for any number of ranks and workers, and continued from any place."""

import os
from itertools import islice

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sets_making import make_loader, make_source, write_set
from shard_making import noise

from lipnext_scale.data import AugmentConfig, Batch, StreamLoader
from lipnext_scale.data.loader import BatchMaker
from lipnext_scale.utils.config import ConfigError

UNEVEN = [5, 1, 9, 0, 3, 7, 2, 8, 4, 6, 11, 1, 7]  # 64 samples in 13 shards
PLAIN = AugmentConfig()


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_set(tmp_path_factory.mktemp("shards"), UNEVEN)


@pytest.fixture(scope="module")
def generated(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A second set, of other images, that is longer than the first."""
    return write_set(tmp_path_factory.mktemp("generated"), [40, 60], "edm", first=1000)


Batches = list[tuple[np.ndarray, torch.Tensor]]


def together(loaders: list[StreamLoader], steps: int) -> Batches:
    """(ids, images) of the global batches that the ranks' loaders make."""
    ranks = [list(islice(loader, steps)) for loader in loaders]
    return [
        (np.concatenate([b.ids for b in parts]), torch.cat([b.images for b in parts]))
        for parts in zip(*ranks, strict=True)
    ]


def assert_same(found: Batches, expected: Batches) -> None:
    for (ids, images), (same_ids, same_images) in zip(found, expected, strict=True):
        assert np.array_equal(ids, same_ids) and torch.equal(images, same_images)


def assert_same_batch(one: Batch, other: Batch) -> None:
    assert (one.epoch, one.last_of_epoch) == (other.epoch, other.last_of_epoch)
    assert np.array_equal(one.ids, other.ids)
    assert torch.equal(one.labels, other.labels)
    assert torch.equal(one.images, other.images)


# --- what is in a batch -----------------------------------------------------------------------


def test_images_and_labels_are_those_of_the_ids(shards):
    """Without augmentation a batch has the pixels and classes that its ids name."""
    for batch in islice(make_loader(shards, 8, augment=PLAIN), 12):
        assert batch.images.dtype == torch.uint8 and batch.images.shape == (8, 3, 8, 8)
        for image, label, sample in zip(batch.images, batch.labels, batch.ids, strict=True):
            expected = noise(8, 8, 3, seed=int(sample)).transpose(2, 0, 1)
            assert np.array_equal(image.numpy(), expected) and int(label) == sample % 7


def test_an_epoch_that_does_not_fill_its_batches(shards):
    """64 samples in batches of 12: five, and the four that are left come in other epochs."""
    loader = make_loader(shards, 12)
    assert loader.steps_per_epoch == 5
    batches = list(islice(loader, 50))
    assert [b.last_of_epoch for b in batches[:10]] == 2 * ([False] * 4 + [True])
    assert [b.epoch for b in batches[::5]] == list(range(10))
    assert {int(i) for b in batches for i in b.ids} == set(range(64))
    with pytest.raises(ConfigError, match=r"^data.train = .* 64 samples, fewer than the 65"):
        make_loader(shards, 65)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_batch_is_its_own(shards, workers):
    """What is done to a batch does not reach the next ones, which may have its memory. Batches that
    are kept keep their pixels: more of them than there are buffers, or only a view of one."""
    expected = list(islice(make_loader(shards, 8), 20))
    batches = iter(make_loader(shards, 8, workers=workers))
    for same in expected[:6]:
        batch = next(batches)
        assert_same_batch(batch, same)
        batch.images.fill_(0)
    kept = [next(batches).images[:, :2].flatten(2) for _ in range(14)]
    for images, same in zip(kept, expected[6:], strict=True):
        assert torch.equal(images, same.images[:, :2].flatten(2))
    del batches


def test_memory_and_files_are_used_again(shards):
    """A loop that keeps nothing goes round in the memory of a few batches; no file stays open."""
    before = len(os.listdir("/proc/self/fd"))
    places = {batch.images.data_ptr() for batch in islice(make_loader(shards, 8, workers=2), 40)}
    assert len(places) <= 2 * (2 * 2) + 3
    for _ in range(3):
        list(islice(make_loader(shards, 8), 5))
    assert len(os.listdir("/proc/self/fd")) <= before + 2  # shared memory of multiprocessing


def test_stats_have_the_share_of_waiting(shards):
    loader = make_loader(shards, 8)
    list(islice(loader, 6))
    assert 0 < loader.stats.take()["data/wait_share"] <= 1
    assert loader.stats.take()["data/wait_share"] == 0  # begun anew


# --- ranks and workers ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def reference(shards, generated) -> Batches:
    """Ten batches of 8 real and 24 synthetic images, across an epoch's end, by one rank without
    workers."""
    return together([make_loader(shards, 8, synthetic=(generated, 24))], 10)


def ranks_of(shards: str, generated: str, world: int, workers: int) -> list[StreamLoader]:
    synthetic = (generated, 24)
    return [make_loader(shards, 8, r, world, workers, synthetic=synthetic) for r in range(world)]


@pytest.mark.parametrize("world, workers", [(1, 2), (2, 0), (4, 1)])
def test_batches_do_not_depend_on_ranks_and_workers(shards, generated, reference, world, workers):
    """The same samples, augmented to the same pixels, in order."""
    assert_same(together(ranks_of(shards, generated, world, workers), 10), reference)


@pytest.mark.parametrize("stop", [3, 8])
def test_continuing_with_other_ranks_and_workers(shards, generated, reference, stop):
    """Four ranks with a worker stop, two without go on: also at an epoch's end (8)."""
    four = ranks_of(shards, generated, 4, 1)
    together(four, stop)
    states = [loader.state_dict() for loader in four]
    assert all(state == states[0] for state in states)
    two = ranks_of(shards, generated, 2, 0)
    for loader in two:
        loader.load_state_dict(states[0])
    assert_same(together(two, 10 - stop), reference[stop:])


@settings(deadline=None, max_examples=15)
@given(batch=st.integers(1, 20), block=st.integers(1, 5), window=st.integers(1, 64), data=st.data())
def test_continuing_from_any_step(shards, batch, block, window, data):
    """A fresh loader with the state hands out the very batches that the first one goes on with."""
    options = {"read_block": block, "window": window}
    loader = make_loader(shards, batch, **options)
    step = data.draw(st.integers(0, 2 * loader.steps_per_epoch), label="step")
    first = iter(loader)
    for _ in range(step):
        next(first)
    state = loader.state_dict()
    resumed = make_loader(shards, batch, **options)
    resumed.load_state_dict(state)
    assert resumed.state_dict() == state
    for expected, found in islice(zip(first, resumed, strict=True), 3):
        assert_same_batch(found, expected)
        assert resumed.state_dict() == loader.state_dict()


def test_the_loader_knows_the_place(shards):
    """Not the iterator; and what workers made ahead does not count."""
    expected = list(islice(make_loader(shards, 4), 7))
    loader = make_loader(shards, 4, workers=2, prefetch=3)
    for number, batch in enumerate([*islice(loader, 2), *islice(loader, 5)]):
        assert_same_batch(batch, expected[number])
    assert loader.state_dict()["step"] == 7


def test_state_is_plain_and_has_the_place_of_each_source(shards, generated, tmp_path):
    """64 real samples by 8, 100 synthetic ones by 24: after 9 steps each is in its own epoch. Other
    samples are not continued on."""
    loader = make_loader(shards, 8, synthetic=(generated, 24))
    list(islice(loader, 9))
    state = loader.state_dict()
    places = [(part["set"], part["epoch"], part["step"]) for part in state["sources"]]
    assert places == [("data.train", 1, 1), ("data.synthetic.shards", 2, 1)]
    values = [value for part in state["sources"] for value in part.values()]
    assert all(type(value) in (int, str) for value in [state["step"], *values])
    other = make_loader(write_set(tmp_path, UNEVEN, first=1), 8, synthetic=(generated, 24))
    with pytest.raises(ConfigError, match=r"^data\.train = .*not the samples that the run"):
        other.load_state_dict(state)


# --- mixtures ---------------------------------------------------------------------------------


@pytest.mark.parametrize("real, synthetic", [(8, 24), (8, 8), (4, 1), (3, 4)])
def test_every_batch_has_the_exact_mixture(shards, generated, real, synthetic):
    """In each batch so many of each; no synthetic sample comes twice in an epoch of its own."""
    loader = make_loader(shards, real, synthetic=(generated, synthetic))
    seen = []
    for batch in islice(loader, 100 // synthetic):
        assert int((batch.ids < 64).sum()) == real and len(batch.ids) == real + synthetic
        seen += [int(i) for i in batch.ids if i >= 64]
    assert len(set(seen)) == len(seen)
    assert loader.steps_per_epoch == 64 // real


@pytest.mark.parametrize("world", [1, 2, 8])
def test_every_rank_has_the_same_mixture(shards, generated, world):
    """1:3 on any number of ranks: each rank, and each half of it, has it to within one sample."""
    for loader in ranks_of(shards, generated, world, 0):
        for part in np.split(next(iter(loader)).ids, 2):
            assert abs(int((part < 64).sum()) - 32 / world / 8) < 1


def test_sources_have_their_own_augmentation(shards, tmp_path):
    """Real images are mirrored, generated ones are left as they are."""
    same = write_set(tmp_path, UNEVEN, "edm")
    sources = [
        make_source(shards, 8, augment=AugmentConfig(flip=True)),
        make_source(same, 8, key="data.synthetic.shards", augment=PLAIN),
    ]
    changed = {0: 0, 1: 0}
    for batch in islice(StreamLoader(BatchMaker(sources)), 16):
        for image, sample in zip(batch.images, batch.ids, strict=True):
            source, number = divmod(int(sample), 64)
            stored = torch.from_numpy(noise(8, 8, 3, seed=number).transpose(2, 0, 1).copy())
            assert torch.equal(image, stored) or torch.equal(image, stored.flip(2))
            changed[source] += not torch.equal(image, stored)
    assert changed[1] == 0 and 32 < changed[0] < 96
