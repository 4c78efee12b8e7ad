"""Samples that cannot be used: the run ends with their names, or goes on without them."""

from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from sets_making import make_loader, write_set

from lipnext_scale.data import open_catalog
from lipnext_scale.data.bad_samples import NAMED_AT_ONCE, BadSamples
from lipnext_scale.data.evaluation import TestSet
from lipnext_scale.data.source import BadReport
from lipnext_scale.errors import RunFailed, UserError

COUNT, BROKEN = 400, (17, 123, 250, 399)  # one in a hundred


@pytest.fixture(scope="module")
def shards(tmp_path_factory) -> str:
    """A set of which four images have a changed byte, unknown to its index."""
    pattern = write_set(tmp_path_factory.mktemp("broken"), [100] * 4, index=False)
    catalog = open_catalog(pattern, "data.train")
    for sample in BROKEN:
        shard, record = catalog.locate(sample)
        content = bytearray(Path(shard.path).read_bytes())
        content[record.offset + 60] ^= 1
        Path(shard.path).write_bytes(content)
    return pattern


@pytest.mark.parametrize("workers", [0, 2])
def test_a_bad_sample_ends_the_run_by_name(shards, workers):
    """Unless told otherwise; shard, key and reason in one line."""
    with pytest.raises(RunFailed) as error:
        for _ in islice(make_loader(shards, 40, workers=workers), 10):
            pass
    message = str(error.value)
    assert "\n" not in message and "data.on_bad_sample=substitute" in message
    assert "is a damaged PNG: a checksum differs" in message
    assert any(f"train-00000{i // 100}.tar: sample {i:06d}" in message for i in BROKEN)


def epochs_of(shards: str, workers: int, epochs: int = 2) -> tuple[list, list[BadReport]]:
    loader = make_loader(shards, 40, workers=workers, substitute=True)
    batches = list(islice(loader, epochs * loader.steps_per_epoch))
    return batches, loader.stats.take_bad()


def test_another_sample_stands_in_and_each_bad_one_is_named(shards):
    """1 % corruption: the number of batches is unchanged, and every bad sample is reported."""
    batches, bad = epochs_of(shards, 0, epochs=1)
    assert len(batches) == 10
    assert sorted(report.sample for report in bad) == list(BROKEN)
    for report in bad:
        assert f"sample {report.sample:06d}" in report.name and report.replaced


def test_the_substitute_is_a_real_sample_and_always_the_same(shards):
    """Whoever makes the batch; in another epoch it may be another one."""
    (alone, bad), (by_workers, same_bad) = epochs_of(shards, 0), epochs_of(shards, 2)
    assert len(bad) == 8 and set(bad) == set(same_bad)
    for one, other in zip(alone, by_workers, strict=True):
        assert np.array_equal(one.ids, other.ids) and torch.equal(one.labels, other.labels)
        assert torch.equal(one.images, other.images)
    places = [(b, int(p)) for b in alone for p in np.flatnonzero(np.isin(b.ids, BROKEN))]
    assert len(places) == 8
    for batch, place in places:
        assert batch.images[place].float().std() > 0  # filled, not left as it was


def test_an_evaluation_has_no_substitutes(shards):
    """A certificate over other samples than it says would be a lie."""
    for workers in (0, 2):
        test = TestSet(open_catalog(shards, "data.test"), 8, 3, workers=workers)
        with pytest.raises(UserError, match="data.test: .*sample 000017 is a damaged PNG"):
            list(test)


# --- keeping account --------------------------------------------------------------------------


def reports(*samples: int) -> list[BadReport]:
    return [BadReport("data.train", i, f"a.tar: sample {i}", "is no PNG", True) for i in samples]


def test_each_is_named_once():
    """Though it comes again in every epoch, and on another rank."""
    account = BadSamples(limit=100)
    assert len(account.add(reports(1, 2, 2))) == 2
    assert account.add(reports(1, 2)) == []
    (line,) = account.add(reports(2, 3))
    assert "data.train: a.tar: sample 3 is no PNG" in line and len(account) == 3


def test_a_flood_is_summed_up():
    account = BadSamples(limit=100)
    lines = account.add(reports(*range(50)))
    assert len(lines) == NAMED_AT_ONCE + 1 and "40 more" in lines[-1]


def test_too_many_end_the_run():
    account = BadSamples(limit=3)
    account.add(reports(1, 2, 3))
    with pytest.raises(RunFailed, match="4 bad samples, more than data.bad_sample_limit = 3"):
        account.add(reports(4))
