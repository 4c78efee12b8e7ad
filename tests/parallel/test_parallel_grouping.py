"""How many blocks form a group: balanced over the ranks, of a useful size, or as configured."""

import math
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from lipnext_scale.models import LipNeXtConfig
from lipnext_scale.parallel.config import GROUP_BYTES, choose_group_size
from lipnext_scale.parallel.rows import row_range

configs = st.builds(LipNeXtConfig, depth=st.integers(1, 80), width=st.integers(12, 10_000))
shards = st.integers(1, 96)
unhurried = settings(deadline=None)


def groups(depth: int, size: int) -> list[int]:
    """Blocks of every group."""
    return [min(size, depth - first) for first in range(0, depth, size)]


@unhurried
@given(config=configs, shards=shards, whole=st.booleans())
def test_a_group_has_some_of_the_blocks(config: LipNeXtConfig, shards: int, whole: bool) -> None:
    assert 1 <= choose_group_size(config, shards, whole) <= config.depth


@unhurried
@given(config=configs, shards=shards)
def test_a_groups_matrices_divide_by_the_ranks(config: LipNeXtConfig, shards: int) -> None:
    """Whenever some number of blocks up to the depth would do, so does the one chosen."""
    size = choose_group_size(config, shards, whole_matrices=True)
    if shards // math.gcd(2, shards) <= config.depth:
        assert 2 * size % shards == 0
    else:
        assert size == config.depth


@unhurried
@given(config=configs, shards=shards)
def test_no_rank_has_a_matrix_more_than_it_must(config: LipNeXtConfig, shards: int) -> None:
    """The most that a rank holds, over all groups, is less than one above the mean."""
    held = [0] * shards
    for blocks in groups(config.depth, choose_group_size(config, shards, whole_matrices=True)):
        for rank in range(shards):
            start, stop = row_range(2 * blocks, shards, rank)
            held[rank] += stop - start
    assert sum(held) == 2 * config.depth
    assert max(held) - 2 * config.depth / shards < 1


@unhurried
@given(config=configs, shards=shards, whole=st.booleans(), explicit=st.integers(1, 80))
def test_what_is_configured_wins(
    config: LipNeXtConfig, shards: int, whole: bool, explicit: int
) -> None:
    """Even where it is balanced badly."""
    explicit = min(explicit, config.depth)
    asked = replace(config, blocks_per_bank=explicit)
    assert choose_group_size(asked, shards, whole) == explicit


@unhurried
@given(config=configs, shards=shards, whole=st.booleans())
def test_groups_are_not_larger_than_useful(config: LipNeXtConfig, shards: int, whole: bool) -> None:
    """At most a third above GROUP_BYTES, unless fewer blocks would not divide by the ranks."""
    size = choose_group_size(config, shards, whole)
    smallest = shards // math.gcd(2, shards) if whole else 1
    assert size * 8 * config.width**2 <= 4 / 3 * GROUP_BYTES or size <= smallest


@unhurried
@given(config=configs, shards=shards, whole=st.booleans())
def test_groups_are_not_smaller_than_useful(
    config: LipNeXtConfig, shards: int, whole: bool
) -> None:
    """Not below a third of GROUP_BYTES, unless it is (nearly) all blocks that there are."""
    size = choose_group_size(config, shards, whole)
    smallest = shards // math.gcd(2, shards) if whole else 1
    assert 3 * size * 8 * config.width**2 >= GROUP_BYTES or size + smallest > config.depth / 2


def test_a_size_that_leaves_no_small_group_is_preferred() -> None:
    """Of 30 blocks 8 would be GROUP_BYTES, and 6 divide them; 32 in all may be one group."""
    assert choose_group_size(LipNeXtConfig(depth=30, width=2048), 1, True) == 6
    assert choose_group_size(LipNeXtConfig(depth=32, width=1024), 1, True) == 32
    assert choose_group_size(LipNeXtConfig(depth=32, width=4096), 8, True) == 4
    assert choose_group_size(LipNeXtConfig(depth=32, width=4096), 8, False) == 2
