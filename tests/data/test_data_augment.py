"""Crops and flips: what they can give, from what they are drawn, and how evenly."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from shard_making import noise

from lipnext_scale.data.augment import random_crop, random_flip, sample_bits

seeds = st.integers(0, 2**70)
epochs = st.integers(0, 2**40)
id_lists = st.lists(st.integers(0, 2**40), min_size=1, max_size=12)


def images_of(ids: np.ndarray, channels: int = 1, height: int = 4, width: int = 5) -> torch.Tensor:
    """An image of non-zero pixels for every id, the same for the same id."""
    made = [noise(channels, height, width, seed=int(i)) | np.uint8(1) for i in ids]
    return torch.from_numpy(np.stack(made))


def all_crops(image: torch.Tensor, padding: int) -> dict[tuple[int, int], torch.Tensor]:
    _, height, width = image.shape
    padded = F.pad(image, (padding,) * 4)
    return {
        (top, left): padded[:, top : top + height, left : left + width]
        for top in range(2 * padding + 1)
        for left in range(2 * padding + 1)
    }


def crop(images, ids, seed=0, epoch=0):
    return random_crop(images, 2, seed, epoch, ids)


def flip(images, ids, seed=0, epoch=0):
    return random_flip(images, seed, epoch, ids)


# --- what comes out ---------------------------------------------------------------------------


@settings(deadline=None, max_examples=60)
@given(id_lists, st.integers(1, 3), st.sampled_from([1, 3]), seeds, epochs)
def test_a_crop_is_one_of_the_possible_ones(ids, padding, channels, seed, epoch):
    """Every output is one of the (2p+1)² windows of its zero-padded image, all channels alike."""
    ids = np.array(ids)
    images = images_of(ids, channels)
    cropped = random_crop(images, padding, seed, epoch, ids)
    assert cropped.shape == images.shape and cropped.dtype == torch.uint8
    for image, result in zip(images, cropped, strict=True):
        assert any(torch.equal(result, window) for window in all_crops(image, padding).values())


@settings(deadline=None)
@given(id_lists, seeds, epochs)
def test_a_flip_is_the_image_or_its_mirror(ids, seed, epoch):
    """Left and right change places in some images; rows and channels never."""
    ids = np.array(ids)
    images = images_of(ids, 3)
    for image, result in zip(images, random_flip(images, seed, epoch, ids), strict=True):
        assert torch.equal(result, image) or torch.equal(result, image.flip(2))


def test_no_padding_is_no_crop():
    """Padding 0 gives the images back."""
    images = images_of(np.arange(5))
    assert torch.equal(random_crop(images, 0, 0, 0, np.arange(5)), images)


@pytest.mark.parametrize("augment", [crop, flip])
def test_the_input_is_not_modified(augment):
    """The images given are the same afterwards."""
    ids = np.arange(40)
    images = images_of(ids)
    kept = images.clone()
    augment(images, ids)
    assert torch.equal(images, kept)


# --- from what it is drawn --------------------------------------------------------------------


@pytest.mark.parametrize("augment", [crop, flip])
@settings(deadline=None, max_examples=60)
@given(ids=id_lists, seed=seeds, epoch=epochs, data=st.data())
def test_a_sample_does_not_see_its_batch(augment, ids, seed, epoch, data):
    """From (seed, epoch, id) alone: in any order, and alone, a sample comes out the same."""
    ids = np.array(ids)
    images = images_of(ids)
    together = augment(images, ids, seed, epoch)
    torch.rand(5)
    np.random.rand(5)
    assert torch.equal(augment(images, ids, seed, epoch), together)
    order = np.array(data.draw(st.permutations(range(len(ids)))))
    assert torch.equal(augment(images[order], ids[order], seed, epoch), together[order])
    for i in range(len(ids)):
        alone = augment(images[i : i + 1], ids[i : i + 1], seed, epoch)
        assert torch.equal(alone[0], together[i])


@pytest.mark.parametrize("augment", [crop, flip])
def test_seed_epoch_and_sample_all_matter(augment):
    """One image, 256 times: other seeds, epochs or ids give others, also with two exchanged."""
    image = images_of(np.zeros(1)).expand(256, -1, -1, -1)
    ids = np.arange(256)
    results = [
        augment(image, ids, seed=1, epoch=2),
        augment(image, ids, seed=2, epoch=2),
        augment(image, ids, seed=1, epoch=3),
        augment(image, ids, seed=2, epoch=1),
        augment(image, ids + 256, seed=1, epoch=2),
    ]
    for i, one in enumerate(results):
        for other in results[:i]:
            same = (one == other).all(dim=(1, 2, 3)).float().mean()
            assert same < 0.65  # a half for flips, 1/25 for crops


def test_crop_and_flip_are_independent():
    """Whether an image is mirrored says nothing of where it is cut."""
    ids = np.arange(20_000)
    bits = [sample_bits(3, 5, ids, stream) >> np.uint64(63) for stream in (1, 2, 3)]
    for i, one in enumerate(bits):
        for other in bits[:i]:
            assert abs((one == other).mean() - 0.5) < 0.02


# --- how evenly -------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [0, 1, 12345])
@pytest.mark.parametrize("by", ["sample", "epoch"])
def test_offsets_are_uniform(seed, by):
    """Over samples of an epoch, or epochs of a sample, each of the 25 places has its share."""
    image = images_of(np.zeros(1), height=3, width=3)
    count, padding = 5000 if by == "sample" else 1500, 2
    if by == "sample":
        cropped = random_crop(image.expand(count, -1, -1, -1), padding, seed, 7, np.arange(count))
    else:
        cropped = torch.cat(
            [random_crop(image, padding, seed, epoch, np.array([9])) for epoch in range(count)]
        )
    windows = all_crops(image[0], padding)
    counts = [int((cropped == window).all(dim=(1, 2, 3)).sum()) for window in windows.values()]
    assert sum(counts) == count  # the windows are all different
    expected = count / len(windows)
    chi_squared = sum((observed - expected) ** 2 / expected for observed in counts)
    assert chi_squared < 60  # 24 degrees of freedom: above 60 once in 10,000 draws


@pytest.mark.parametrize("seed", [0, 1, 12345])
def test_about_half_are_flipped(seed):
    """Of 10,000 samples a half, within three standard deviations; and of one sample's epochs."""
    images = torch.arange(2, dtype=torch.uint8).view(1, 1, 1, 2)
    count = 10_000
    flipped = random_flip(images.expand(count, -1, -1, -1), seed, 3, np.arange(count))[:, 0, 0, 0]
    assert abs(flipped.float().mean() - 0.5) < 0.015
    over_epochs = [
        int(random_flip(images, seed, e, np.array([5]))[0, 0, 0, 0]) for e in range(2000)
    ]
    assert abs(np.mean(over_epochs) - 0.5) < 0.034
