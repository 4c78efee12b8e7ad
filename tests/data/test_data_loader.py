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

from lipnext_scale.config import ConfigError
from lipnext_scale.data import AugmentConfig, Batch, StreamLoader
from lipnext_scale.data.workers import BatchMaker

UNEVEN = [5, 1, 9, 0, 3, 7, 2, 8, 4, 6, 11, 1, 7]  # 64 samples in 13 shards
PLAIN = AugmentConfig()


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_set(tmp_path_factory.mktemp("shards"), UNEVEN)


@pytest.fixture(scope="module")
def generated(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A second set, of other images, that is longer than the first."""
    return write_set(tmp_path_factory.mktemp("generated"), [40, 60], "edm", first=1000)


def together(loaders: list[StreamLoader], steps: int) -> list[tuple[np.ndarray, torch.Tensor]]:
    """(ids, images) of the global batches that the ranks' loaders make."""
    ranks = [list(islice(loader, steps)) for loader in loaders]
    return [
        (np.concatenate([b.ids for b in parts]), torch.cat([b.images for b in parts]))
        for parts in zip(*ranks, strict=True)
    ]


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


def test_thirteen_uneven_shards_on_four_ranks(shards):
    """Nothing twice, nothing lost: the ranks' batches of an epoch are all 64 samples, once."""
    loaders = [make_loader(shards, 16, rank, 4) for rank in range(4)]
    for _ in range(3):
        batches = together(loaders, loaders[0].steps_per_epoch)
        assert sorted(np.concatenate([ids for ids, _ in batches]).tolist()) == list(range(64))


def test_an_epoch_that_does_not_fill_its_batches(shards):
    """64 samples in batches of 12: five, and the four that are left come in other epochs."""
    loader = make_loader(shards, 12)
    assert loader.steps_per_epoch == 5
    batches = list(islice(loader, 50))
    assert [b.last_of_epoch for b in batches[:10]] == 2 * ([False] * 4 + [True])
    assert [b.epoch for b in batches[::5]] == list(range(10))
    assert {int(i) for b in batches for i in b.ids} == set(range(64))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_batch_is_its_own(shards, workers):
    """What is done to a batch does not reach the next ones, which may have its memory."""
    expected = list(islice(make_loader(shards, 8), 20))
    for batch, same in zip(make_loader(shards, 8, workers=workers), expected, strict=False):
        assert_same_batch(batch, same)
        batch.images.fill_(0)


@pytest.mark.parametrize("workers", [0, 2])
def test_kept_batches_keep_their_pixels(shards, workers):
    """Also more of them than there are buffers, and if only a view of the images is kept."""
    expected = [batch.images.clone() for batch in islice(make_loader(shards, 8), 20)]
    batches = iter(make_loader(shards, 8, workers=workers))
    kept = [next(batches).images for _ in range(14)]
    kept = [images[:, :2].flatten(2) for images in kept]
    kept += [next(batches).images[:, :2].flatten(2) for _ in range(6)]
    for images, same in zip(kept, expected, strict=True):
        assert torch.equal(images, same[:, :2].flatten(2))
    del batches


def test_buffers_are_used_again(shards):
    """A loop that keeps nothing goes round in the memory of a few batches."""
    places = {batch.images.data_ptr() for batch in islice(make_loader(shards, 8, workers=2), 40)}
    assert len(places) <= 2 * (2 * 2) + 3


def test_no_file_stays_open(shards):
    """A process that makes many loaders, one after the other, does not run out of descriptors."""
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        list(islice(make_loader(shards, 8), 5))
    assert len(os.listdir("/proc/self/fd")) <= before + 2  # shared memory of multiprocessing


# --- ranks and workers ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def reference(shards, generated) -> dict[str, list[tuple[np.ndarray, torch.Tensor]]]:
    """Ten batches, across an epoch's end, by one rank without workers."""
    return {
        "real": together([make_loader(shards, 16)], 10),
        "mixed": together([make_loader(shards, 8, synthetic=(generated, 24))], 10),
    }


@pytest.mark.parametrize("kind", ["real", "mixed"])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_ids_and_pixels_do_not_depend_on_ranks_and_workers(
    shards, generated, reference, world, workers, kind
):
    """World 1, 2, 4 × workers 0, 2: the same samples, augmented to the same pixels, in order."""
    part, synthetic = (16, None) if kind == "real" else (8, (generated, 24))
    loaders = [
        make_loader(shards, part, rank, world, workers, synthetic=synthetic)
        for rank in range(world)
    ]
    for (ids, images), (same_ids, same_images) in zip(
        together(loaders, 10), reference[kind], strict=True
    ):
        assert np.array_equal(ids, same_ids) and torch.equal(images, same_images)


# --- its place --------------------------------------------------------------------------------


@settings(deadline=None, max_examples=25)
@given(batch=st.integers(1, 20), block=st.integers(1, 5), window=st.integers(1, 64), data=st.data())
def test_continuing_from_any_step(shards, batch, block, window, data):
    """A fresh loader with the state hands out the very batches that the first one goes on with."""
    options = {"read_block": block, "window": window}
    whole = make_loader(shards, batch, **options)
    steps = whole.steps_per_epoch
    step = data.draw(st.integers(0, 2 * steps), label="step")
    first = iter(whole)
    for _ in range(step):
        next(first)
    state = whole.state_dict()
    resumed = make_loader(shards, batch, **options)
    resumed.load_state_dict(state)
    assert resumed.state_dict() == state
    for expected, found in islice(zip(first, resumed, strict=True), 3):
        assert_same_batch(found, expected)
        assert resumed.state_dict() == whole.state_dict()


@pytest.mark.slow
@pytest.mark.parametrize("stop", [1, 3, 4, 5, 8, 9])
def test_continuing_with_other_ranks_and_workers(shards, generated, reference, stop):
    """Four ranks with two workers stop, two with one go on: also across an epoch's end (4, 8)."""
    synthetic = (generated, 24)
    four = [make_loader(shards, 8, rank, 4, 2, synthetic=synthetic) for rank in range(4)]
    together(four, stop)
    states = [loader.state_dict() for loader in four]
    assert all(state == states[0] for state in states)
    two = [make_loader(shards, 8, rank, 2, 1, synthetic=synthetic) for rank in range(2)]
    for loader in two:
        loader.load_state_dict(states[0])
    for (ids, images), (same_ids, same_images) in zip(
        together(two, 10 - stop), reference["mixed"][stop:], strict=True
    ):
        assert np.array_equal(ids, same_ids) and torch.equal(images, same_images)


def test_what_workers_made_ahead_does_not_count(shards):
    """Two workers with three batches each ahead: the state is that of the batch handed out."""
    loader = make_loader(shards, 4, workers=2, prefetch=3)
    batches = iter(loader)
    for step in range(1, 6):
        next(batches)
        assert loader.state_dict()["step"] == step
    del batches


def test_a_new_iteration_goes_on_where_the_last_one_stopped(shards):
    """The loader, not the iterator, knows the place."""
    whole = list(islice(make_loader(shards, 5), 7))
    loader = make_loader(shards, 5)
    parts = list(islice(loader, 2)) + list(islice(loader, 5))
    for expected, batch in zip(whole, parts, strict=True):
        assert_same_batch(batch, expected)


def test_state_is_plain_and_tells_the_place_of_each_source(shards, generated):
    """64 real samples by 8, 100 synthetic ones by 24: after 9 steps each is in its own epoch."""
    loader = make_loader(shards, 8, synthetic=(generated, 24))
    list(islice(loader, 9))
    state = loader.state_dict()
    places = [(part["set"], part["epoch"], part["step"]) for part in state["sources"]]
    assert places == [("data.train", 1, 1), ("data.synthetic.shards", 2, 1)]
    values = [value for part in state["sources"] for value in part.values()]
    assert all(type(value) in (int, str) for value in [state["step"], *values])


def test_other_samples_are_not_continued_on(shards, tmp_path):
    """The state remembers what it was trained on: one other shard, or another order of them."""
    state = make_loader(shards, 8).state_dict()
    other = write_set(tmp_path, UNEVEN, first=1)
    with pytest.raises(ConfigError, match=r"^data\.train = .*not the samples that the run"):
        make_loader(other, 8).load_state_dict(state)


def test_too_large_a_batch_is_refused(shards):
    """A loader that would never hand out a batch names the key, the value and the set."""
    with pytest.raises(ConfigError, match=r"^data.train = .* 64 samples, fewer than the 65"):
        make_loader(shards, 65)


# --- mixtures ---------------------------------------------------------------------------------


@pytest.mark.parametrize("real, synthetic", [(8, 24), (8, 8), (4, 1), (1, 5), (3, 4)])
def test_every_batch_has_the_exact_mixture(shards, generated, real, synthetic):
    """In each batch so many of each; no synthetic sample comes twice in an epoch of its own."""
    loader = make_loader(shards, real, synthetic=(generated, synthetic))
    seen = []
    for batch in islice(loader, 100 // synthetic):
        assert int((batch.ids < 64).sum()) == real and len(batch.ids) == real + synthetic
        seen += [int(i) for i in batch.ids if i >= 64]
    assert len(set(seen)) == len(seen)
    assert loader.steps_per_epoch == 64 // real


@pytest.mark.parametrize("world", [1, 2, 4, 8])
def test_every_rank_has_the_same_mixture(shards, generated, world):
    """1:3 on any number of ranks: each rank, and each half of it, has it to within one sample."""
    for rank in range(world):
        loader = make_loader(shards, 8, rank, world, synthetic=(generated, 24))
        batch = next(iter(loader))
        share = 32 // world
        for part in np.split(batch.ids, 2):
            assert abs(int((part < 64).sum()) - share / 8) < 1


def test_sources_have_their_own_augmentation(shards, tmp_path):
    """Real images are mirrored, generated ones are left as they are."""
    same = write_set(tmp_path, UNEVEN, "edm")
    mirrored = AugmentConfig(flip=True)
    sources = [
        make_source(shards, 8, augment=mirrored),
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


# --- what it costs ----------------------------------------------------------------------------


def test_stats_tell_waiting_stages_and_what_is_ready(shards):
    loader = make_loader(shards, 8, workers=2)
    list(islice(loader, 6))
    told = loader.stats.take()
    assert 0 < told["data/wait_share"] <= 1
    assert 0 <= told["data/ready_batches"] <= 5
    for stage in ("read", "decode", "augment"):
        assert told[f"data/{stage}_images_per_second"] > 0
    assert "data/read_images_per_second" not in loader.stats.take()  # begun anew
