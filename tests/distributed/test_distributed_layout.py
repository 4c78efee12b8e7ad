"""What goes where, without processes: groups of blocks, the mesh of ranks, ZeRO's partitions."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lipnext_scale.distributed import ParallelConfig, build_engine
from lipnext_scale.distributed.config import GROUP_BYTES, choose_group_size
from lipnext_scale.distributed.deepspeed import (
    ALIGNMENT,
    Slot,
    between,
    flat_group_slots,
    has_whole_pairs,
    parameter_slots,
)
from lipnext_scale.distributed.fsdp import REPLICATE, SHARD, build_mesh, choose_shard_size
from lipnext_scale.distributed.processes import fake_group
from lipnext_scale.distributed.rows import row_range
from lipnext_scale.models import LipNeXtConfig
from lipnext_scale.utils.config import ConfigError

unhurried = settings(deadline=None)

# ---- groups of blocks ----------------------------------------------------------------------------

configs = st.builds(LipNeXtConfig, depth=st.integers(1, 80), width=st.integers(12, 10_000))
shards = st.integers(1, 96)


@unhurried
@given(config=configs, shards=shards, whole=st.booleans(), explicit=st.integers(1, 80))
def test_groups_have_a_useful_size(
    config: LipNeXtConfig, shards: int, whole: bool, explicit: int
) -> None:
    """Near GROUP_BYTES unless the ranks or the depth forbid it; a configured size wins."""
    size = choose_group_size(config, shards, whole)
    smallest = shards if whole else 1
    assert 1 <= size <= config.depth
    assert size * 8 * config.width**2 <= 4 / 3 * GROUP_BYTES or size <= smallest
    assert 3 * size * 8 * config.width**2 >= GROUP_BYTES or size + smallest > config.depth / 2
    explicit = min(explicit, config.depth)
    assert choose_group_size(replace(config, blocks_per_bank=explicit), shards, whole) == explicit


@unhurried
@given(config=configs, shards=shards)
def test_no_rank_has_a_block_more_than_it_must(config: LipNeXtConfig, shards: int) -> None:
    """Groups divide by the ranks where some size does; no rank has one above the mean or more."""
    size, depth = choose_group_size(config, shards, whole_blocks=True), config.depth
    if shards <= depth:
        assert size % shards == 0
    held = [0] * shards
    for blocks in [min(size, depth - first) for first in range(0, depth, size)]:
        for rank in range(shards):
            start, stop = row_range(blocks, shards, rank)
            held[rank] += stop - start
    assert sum(held) == depth
    assert max(held) - depth / shards < 1


def test_a_size_that_leaves_no_small_group_is_preferred() -> None:
    """Of 30 blocks 8 would be GROUP_BYTES, and 6 divide them; 32 in all may be one group."""
    assert choose_group_size(LipNeXtConfig(depth=30, width=2048), 1, True) == 6
    assert choose_group_size(LipNeXtConfig(depth=32, width=1024), 1, True) == 32
    assert choose_group_size(LipNeXtConfig(depth=32, width=4096), 8, True) == 8
    assert choose_group_size(LipNeXtConfig(depth=32, width=4096), 8, False) == 2


# ---- the mesh ------------------------------------------------------------------------------------

sizes = st.integers(1, 64)


@unhurried
@given(world=sizes, wanted=st.integers(0, 64), per_node=sizes)
def test_the_shard_size_divides_the_ranks(world: int, wanted: int, per_node: int) -> None:
    """As wanted, or refused with both numbers; 0: a node, or all ranks if nodes are unequal."""
    if wanted == 0:
        alike = per_node > 1 and world % per_node == 0
        assert choose_shard_size(0, world, per_node) == (per_node if alike else world)
    elif world % wanted == 0:
        assert choose_shard_size(wanted, world, per_node) == wanted
    else:
        with pytest.raises(ConfigError) as refusal:
            choose_shard_size(wanted, world, per_node)
        assert str(refusal.value) == (
            f"parallel.shard_size = {wanted}: must divide the number of processes, {world}"
        )


@pytest.mark.parametrize("world, size", [(8, 8), (8, 1), (12, 3)])
def test_neighbours_share_a_copy(world: int, size: int) -> None:
    """Along `shard` ranks are consecutive, along `replicate` they are a shard's size apart."""
    for rank in {0, world // 2, world - 1}:
        with fake_group(rank, world):
            mesh = build_mesh("cpu", world, size)
            first = rank - rank % size
            assert mesh[SHARD].mesh.tolist() == list(range(first, first + size))
            assert mesh[REPLICATE].mesh.tolist() == list(range(rank % size, world, size))


# ---- ZeRO's partitions, against partitions that are made here number by number -------------------

SIZES = st.lists(st.integers(1, 40), min_size=1, max_size=6)
RANKS = st.integers(1, 9)
Entry = tuple[int, int] | None  # (parameter, which of its numbers); None: padding


def padded(entries: list[Entry], multiple: int) -> list[Entry]:
    return entries + [None] * (-len(entries) % multiple)


def equal_parts(entries: list[Entry], ranks: int) -> list[list[Entry]]:
    length = len(entries) // ranks
    return [entries[rank * length : (rank + 1) * length] for rank in range(ranks)]


def filled(length: int, slots: list[Slot]) -> list[Entry]:
    """The partition that slots describe."""
    partition: list[Entry] = [None] * length
    for slot in slots:
        assert slot.start < slot.stop
        partition[slot.in_partition] = [(slot.index, n) for n in range(slot.start, slot.stop)]
    assert len(partition) == length
    return partition


@given(SIZES, RANKS)
def test_a_group_is_cut_as_one(sizes: list[int], ranks: int) -> None:
    """ZeRO-1 and 2: parameters in a row, padded at the end, in equal parts of even length."""
    entries: list[Entry] = [(index, n) for index, size in enumerate(sizes) for n in range(size)]
    expected = equal_parts(padded(entries, ALIGNMENT * ranks), ranks)
    assert [filled(*flat_group_slots(sizes, ranks, rank)) for rank in range(ranks)] == expected


@given(SIZES, RANKS)
def test_every_parameter_is_cut_alone(sizes: list[int], ranks: int) -> None:
    """ZeRO-3: each is padded and cut by itself; a rank's parts of all follow each other."""
    expected: list[list[Entry]] = [[] for _ in range(ranks)]
    for index, size in enumerate(sizes):
        entries: list[Entry] = [(index, n) for n in range(size)]
        for rank, part in enumerate(equal_parts(padded(entries, ranks), ranks)):
            expected[rank] += part
    assert [filled(*parameter_slots(sizes, ranks, rank)) for rank in range(ranks)] == expected


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.integers(1, 6), RANKS)
def test_padding_makes_whole_pairs(banks: list[int], width: int, ranks: int) -> None:
    """The fewest that do so, fewer than the ranks."""
    sizes = [2 * blocks * width**2 for blocks in banks]

    def whole(padding: int) -> bool:
        with_padding = [*sizes, 2 * padding * width**2] if padding else sizes
        layouts = [flat_group_slots(with_padding, ranks, rank) for rank in range(ranks)]
        filled_up = sum(with_padding) == ranks * layouts[0][0]
        return filled_up and all(has_whole_pairs(*layout, width) for layout in layouts)

    padding = -sum(banks) % ranks  # as `DeepSpeedEngine._make_padding` has it
    assert 0 <= padding < ranks and whole(padding)
    assert not any(whole(fewer) for fewer in range(padding))


def test_numbers_across_tensors_that_follow_each_other() -> None:
    """DeepSpeed has the gradient of a partition in several tensors, cut anywhere."""
    whole = torch.arange(20.0)
    tensors = [whole[:3], whole[3:3], whole[3:12].view(3, 3), whole[12:]]
    for start in range(20):
        for stop in range(start + 1, 21):
            assert torch.equal(torch.cat(list(between(tensors, start, stop))), whole[start:stop])
    assert list(between(tensors, 5, 5)) == []


CUT = "ZeRO-3 on {} processes would cut through blocks: no multiple of them; "
ELSEWHERE = "use parallel.zero_stage = 2 or parallel.engine = 'fsdp'"
REFUSED = [
    # processes, blocks_per_bank → the refusal
    (4, 0, f"model.depth = 6: {CUT}{ELSEWHERE}"),
    (2, 3, f"model.blocks_per_bank = 3: {CUT}0 chooses a size that fits, or {ELSEWHERE}"),
]


@pytest.mark.parametrize("processes, blocks, message", REFUSED)
def test_zero_3_is_refused_where_it_would_cut_a_block(
    processes: int, blocks: int, message: str
) -> None:
    """Stage 2 pads and takes the same model; without `blocks_per_bank` sizes fit if they can."""
    zero_3 = ParallelConfig(engine="deepspeed", zero_stage=3)
    config = LipNeXtConfig(depth=6, width=16, image_size=8, blocks_per_bank=blocks)
    with fake_group(0, processes):
        with pytest.raises(ConfigError) as refusal:
            build_engine(zero_3, "cpu").place(config)
        assert str(refusal.value) == message.format(processes)
        build_engine(ParallelConfig(engine="deepspeed"), "cpu").place(config)
    with fake_group(0, 6):
        model = build_engine(zero_3, "cpu").place(replace(config, blocks_per_bank=0))
    assert all(group.count % 6 == 0 for group in model.block_groups())
