"""Large sets: what a process keeps of them."""

from pathlib import Path

import pytest
from gloo import run_processes
from huge_set import private_bytes, write_huge_set

from lipnext_scale.data import AugmentConfig, open_catalog
from lipnext_scale.data.source import Source, SourceOptions
from lipnext_scale.data.workers import BatchMaker

SAMPLES = 4_000_000


def open_at_a_late_step(rank: int, world_size: int, shards: str) -> tuple[int, int]:
    """(private bytes that opening took, first sample of step 100,000)"""
    before = private_bytes()
    catalog = open_catalog(shards, "data.synthetic.shards")
    options = SourceOptions(32, 32, 3, seed=0, augment=AugmentConfig())
    source = Source(catalog, options)
    assert catalog.label_range() == (0, 9) and source.order.steps_per_epoch == SAMPLES // 32
    first = int(BatchMaker([source], 0, 1).sample_ids(100_000)[0])
    return private_bytes() - before, first


@pytest.mark.slow
def test_a_set_of_millions_costs_each_rank_next_to_nothing(tmp_path: Path) -> None:
    """Four million samples have an index of 96 MB; two ranks keep a tenth of that each, at most."""
    found = run_processes(2, open_at_a_late_step, write_huge_set(tmp_path, SAMPLES))
    for taken, first in found:
        assert taken < 10_000_000
        assert first == found[0][1]
