"""Test sets: every sample exactly once, on any number of ranks, and checked before it is used."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sets_making import write_set
from shard_making import encode, noise, write_tar

from lipnext_scale.data import (
    DataConfig,
    TestSet,
    evaluation,
    open_catalog,
    open_test_set,
    rank_share,
)
from lipnext_scale.data.augment import centre_crop, resize_short_side
from lipnext_scale.data.evaluation import require_fits
from lipnext_scale.utils.config import ConfigError


@given(st.integers(1, 200), st.integers(1, 40))
def test_every_sample_counts_on_one_rank(count, world):
    """All ranks have equally many, and those that count are all samples, once."""
    shares = [rank_share(count, rank, world) for rank in range(world)]
    assert len({len(ids) for ids, _ in shares}) == 1
    counted = torch.cat([ids[real] for ids, real in shares])
    assert sorted(counted.tolist()) == list(range(count))


@pytest.mark.parametrize("world, workers", [(1, 2), (2, 0), (7, 0)])
def test_thirteen_uneven_shards(tmp_path, monkeypatch, world, workers):
    """Batches of all ranks together hold each sample once, with its own pixels and class."""
    monkeypatch.setattr(evaluation, "BATCH", 6)
    pattern = write_set(tmp_path, [5, 1, 9, 0, 3, 7, 2, 8, 4, 6, 11, 1, 8])
    catalog, seen, passes = open_catalog(pattern, "data.test"), [], set()
    for rank in range(world):
        batches = list(TestSet(catalog, 8, 3, 0, workers, rank, world))
        passes.add(len(batches))
        for batch in batches:
            for image, label, sample, counted in zip(
                batch.images, batch.labels, batch.ids.tolist(), batch.counted, strict=True
            ):
                expected = noise(8, 8, 3, seed=sample).transpose(2, 0, 1)
                assert np.array_equal(image, expected) and int(label) == sample % 7
                seen += [sample] if counted else []
    assert sorted(seen) == list(range(65)) and len(passes) == 1


def test_test_images_are_resized_and_cut_in_the_middle(tmp_path):
    """Of any size; always the same pixels, and greyscale becomes colour among colour."""
    shapes = [(20, 30, 3), (40, 17, 3), (16, 16), (9, 50, 3)]
    members = []
    for i, shape in enumerate(shapes):
        members += [(f"{i}.cls", b"0"), (f"{i}.png", encode(noise(*shape, seed=i)))]
    path = write_tar(tmp_path / "a.tar", members)
    config = DataConfig(path, path, test_resize=12)
    test = open_test_set(config, image_size=10, channels=3, num_classes=1)
    for i, shape in enumerate(shapes):
        image = noise(*shape, seed=i)
        image = image if image.ndim == 3 else np.repeat(image[:, :, None], 3, 2)
        assert np.array_equal(test.image(i), centre_crop(resize_short_side(image, 12), 10))


@pytest.mark.parametrize(
    "shape, label, channels, message",
    [
        ((8, 9, 3), 0, 3, "model.image_size = 8: the images of data.test are 3×8×9"),
        ((8, 8), 0, 3, "model.in_channels = 3: the images of data.test are 1×8×8"),
        ((8, 8, 3), 0, 1, "model.in_channels = 1: the images of data.test are 3×8×8"),
        ((8, 8, 3), 5, 3, "model.num_classes = 5: data.test has labels from 5 to 5"),
        ((8, 8, 3), -1, 3, "model.num_classes = 5: data.test has labels from -1 to -1"),
    ],
)
def test_a_set_that_is_not_what_the_model_takes(tmp_path, shape, label, channels, message):
    """Refused before anything is trained or certified, by the model's key."""
    members = [("a.cls", str(label).encode()), ("a.png", encode(noise(*shape)))]
    catalog = open_catalog(write_tar(tmp_path / "a.tar", members), "data.test")
    with pytest.raises(ConfigError, match=f"^{message}"):
        require_fits([(catalog, False)], 8, channels, 5)
