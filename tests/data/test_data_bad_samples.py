"""Samples that cannot be used: the run ends with their names, or goes on without them."""

import re
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from sets_making import make_loader, write_set

from lipnext_scale.data import open_catalog
from lipnext_scale.data.datasets import TestSet
from lipnext_scale.data.loader import NAMED_AT_ONCE, BadSamples
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


@pytest.mark.parametrize("substitute", [True, False])
def test_a_shard_that_goes_away_is_as_bad_as_its_samples(tmp_path, substitute):
    """Though it is asked for ahead of time, where reads are long: only reading it tells."""
    shards = write_set(tmp_path, [10] * 4)
    loader = make_loader(shards, 20, read_block=5, window=40, substitute=substitute)
    (tmp_path / "train-000002.tar").unlink()
    if substitute:
        assert len(list(islice(loader, 2))) == 2
        bad = loader.stats.take_bad()
        assert {report.sample for report in bad} == set(range(20, 30))
        assert all("cannot be read: No such file" in report.reason for report in bad)
    else:
        with pytest.raises(RunFailed, match=r"train-000002.tar: .*cannot be read: No such file"):
            list(islice(loader, 2))


def test_an_evaluation_has_no_substitutes(shards):
    """A certificate over other samples than it says would be a lie."""
    for workers in (0, 2):
        test = TestSet(open_catalog(shards, "data.test"), 8, 3, workers=workers)
        with pytest.raises(UserError, match="data.test: .*sample 000017 is a damaged PNG"):
            list(test)


# --- keeping account --------------------------------------------------------------------------


def reports(*samples: int) -> list[BadReport]:
    return [BadReport("data.train", i, f"a.tar: sample {i}", "is no PNG", True) for i in samples]


@pytest.fixture
def listed(tmp_path) -> Path:
    return tmp_path / "bad_samples.txt"


def numbers(lines: list[str]) -> list[int]:
    """The samples that lines name, one each."""
    return [int(re.search(r"data.train: a.tar: sample (\d+) is no PNG", line)[1]) for line in lines]


def test_each_is_named_once(listed):
    """Though it comes again in every epoch, and on another rank."""
    account = BadSamples(100, listed)
    assert numbers(account.add(reports(1, 2, 2))) == [1, 2]
    assert account.add(reports(1, 2)) == []
    assert numbers(account.add(reports(2, 3))) == [3] and len(account) == 3
    assert numbers(listed.read_text().splitlines()) == [1, 2, 3]


def test_a_flood_is_summed_up_in_the_log_and_named_in_the_list(listed):
    account = BadSamples(100, listed)
    lines = account.add(reports(*range(50)))
    assert len(lines) == NAMED_AT_ONCE + 1
    assert numbers(lines[:-1]) == list(range(NAMED_AT_ONCE))
    assert "40 more" in lines[-1] and str(listed) in lines[-1]
    account.add(reports(*range(40, 60)))
    assert numbers(listed.read_text().splitlines()) == list(range(60))


def test_another_start_of_the_run_names_only_new_ones(listed):
    """It meets the old ones again, and counts them."""
    BadSamples(100, listed).add(reports(1, 2))
    account = BadSamples(100, listed)
    assert numbers(account.add(reports(2, 3))) == [3] and len(account) == 2
    assert numbers(listed.read_text().splitlines()) == [1, 2, 3]


def test_one_rank_keeps_the_list(listed):
    account = BadSamples(100, listed, writes=False)
    account.add(reports(1, 2))
    assert len(account) == 2 and not listed.exists()


def test_too_many_end_the_run(listed):
    """All are named by then, also those of the last time."""
    account = BadSamples(3, listed)
    account.add(reports(1, 2, 3))
    with pytest.raises(RunFailed, match="24 bad samples, more than data.bad_sample_limit = 3") as e:
        account.add(reports(*range(10, 31)))
    assert str(listed) in str(e.value) and "\n" not in str(e.value)
    assert numbers(listed.read_text().splitlines()) == [1, 2, 3, *range(10, 31)]
