"""Samples that cannot be used: the run ends with their names, or goes on without them."""

import re
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from sets_making import make_loader, write_set

from lipnext_scale.data import TestSet, open_catalog
from lipnext_scale.data.loader import NAMED_AT_ONCE, BadSamples
from lipnext_scale.data.source import BadReport
from lipnext_scale.utils.errors import RunFailed, UserError

BROKEN = (17, 123, 250, 399)  # one in a hundred of 400


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
    """By default; shard, key and reason in one line. A test set has no substitutes: a certificate
    over other samples than it says would be a lie."""
    with pytest.raises(RunFailed) as error:
        for _ in islice(make_loader(shards, 40, workers=workers), 10):
            pass
    message = str(error.value)
    assert "\n" not in message and "data.on_bad_sample=substitute" in message
    assert "is a damaged PNG: a checksum differs" in message
    assert any(f"train-00000{i // 100}.tar: sample {i:06d}" in message for i in BROKEN)
    test = TestSet(open_catalog(shards, "data.test"), 8, 3, workers=workers)
    with pytest.raises(UserError, match="data.test: .*sample 000017 is a damaged PNG"):
        list(test)


def epochs_of(shards: str, workers: int) -> tuple[list, list[BadReport]]:
    loader = make_loader(shards, 40, workers=workers, substitute=True)
    return list(islice(loader, 2 * loader.steps_per_epoch)), loader.stats.take_bad()


def test_another_sample_stands_in_always_the_same(shards):
    """1 % corruption: as many batches, every bad sample is reported, whichever process makes the
    batch."""
    (alone, bad), (by_workers, same_bad) = epochs_of(shards, 0), epochs_of(shards, 2)
    assert len(alone) == 20 and len(bad) == 8 and set(bad) == set(same_bad)
    assert sorted(report.sample for report in bad) == sorted(2 * BROKEN)
    assert all(f"sample {r.sample:06d}" in r.name and r.replaced for r in bad)
    for one, other in zip(alone, by_workers, strict=True):
        assert np.array_equal(one.ids, other.ids) and torch.equal(one.labels, other.labels)
        assert torch.equal(one.images, other.images)
        for place in np.flatnonzero(np.isin(one.ids, BROKEN)):
            assert one.images[place].float().std() > 0  # filled, not left as it was


@pytest.mark.parametrize("substitute", [True, False])
def test_a_shard_that_goes_away_is_as_bad_as_its_samples(tmp_path, substitute):
    """Though it is asked for ahead of time, where reads are long: the error shows in reading."""
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


def test_where_all_are_bad_no_substitute_is_found(tmp_path):
    """The run ends, and does not recommend what was tried."""
    loader = make_loader(write_set(tmp_path, [10]), 5, substitute=True)
    (tmp_path / "train-000000.tar").unlink()
    with pytest.raises(RunFailed, match="cannot be read") as error:
        next(iter(loader))
    assert "on_bad_sample" not in str(error.value)


# --- keeping account --------------------------------------------------------------------------


def reports(*samples: int) -> list[BadReport]:
    return [BadReport("data.train", i, f"a.tar: sample {i}", "is no PNG", True) for i in samples]


def numbers(lines: list[str]) -> list[int]:
    """The samples that lines name, one each."""
    return [int(re.search(r"data.train: a.tar: sample (\d+) is no PNG", line)[1]) for line in lines]


def test_each_is_named_once(tmp_path):
    """Though it comes again in every epoch, on another rank, and in another start of the run, which
    counts it. One rank keeps the list."""
    listed = tmp_path / "bad_samples.txt"
    silent = BadSamples(100, listed, writes=False)
    silent.add(reports(1, 2))
    assert len(silent) == 2 and not listed.exists()
    account = BadSamples(100, listed)
    assert numbers(account.add(reports(1, 2, 2))) == [1, 2]
    assert account.add(reports(1, 2)) == []
    again = BadSamples(100, listed)
    assert numbers(again.add(reports(2, 3))) == [3] and len(again) == 2
    assert numbers(listed.read_text().splitlines()) == [1, 2, 3]


def test_a_flood_is_summed_up_and_too_many_end_the_run(tmp_path):
    """The list names all, also those of the last time."""
    listed = tmp_path / "bad_samples.txt"
    account = BadSamples(60, listed)
    lines = account.add(reports(*range(50)))
    assert numbers(lines[:-1]) == list(range(NAMED_AT_ONCE))
    assert "40 more" in lines[-1] and str(listed) in lines[-1]
    with pytest.raises(
        RunFailed, match="61 bad samples, more than data.bad_sample_limit = 60"
    ) as e:
        account.add(reports(*range(40, 61)))
    assert str(listed) in str(e.value) and "\n" not in str(e.value)
    assert numbers(listed.read_text().splitlines()) == list(range(61))
