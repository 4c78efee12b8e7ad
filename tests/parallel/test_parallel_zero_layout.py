"""Where ZeRO cuts: against partitions that are made here number by number; what it may not cut."""

import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lipnext_scale.config import ConfigError
from lipnext_scale.errors import UserError
from lipnext_scale.models import LipNeXtConfig
from lipnext_scale.parallel import ParallelConfig, build_engine, zero
from lipnext_scale.parallel.zero_state import (
    ALIGNMENT,
    Slot,
    flat_group_slots,
    has_whole_matrices,
    padding_matrices,
    parameter_slots,
)
from lipnext_scale.plan import fake_group

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
        partition[slot.there] = [(slot.index, n) for n in range(slot.start, slot.stop)]
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
def test_padding_makes_whole_matrices(banks: list[int], width: int, ranks: int) -> None:
    """The fewest that do so, for every rank; fewer than two each."""
    sizes = [2 * blocks * width**2 for blocks in banks]
    matrices = 2 * sum(banks)

    def whole(padding: int) -> bool:
        with_padding = [*sizes, padding * width**2] if padding else sizes
        layouts = [flat_group_slots(with_padding, ranks, rank) for rank in range(ranks)]
        filled_up = sum(with_padding) == ranks * layouts[0][0]
        return filled_up and all(has_whole_matrices(*layout, width) for layout in layouts)

    padding = padding_matrices(matrices, width, ranks)
    assert 0 <= padding < 2 * ranks and whole(padding)
    assert not any(whole(fewer) for fewer in range(padding))


def test_a_partition_that_cuts_a_matrix_is_noticed() -> None:
    """At its start, at its end, or by numbers before it."""
    assert has_whole_matrices(8, [Slot(0, 4, 12, 0)], 2)
    for length, slot in ((8, Slot(0, 5, 12, 0)), (8, Slot(0, 4, 11, 0)), (8, Slot(0, 4, 8, 3))):
        assert not has_whole_matrices(length, [slot], 2)
    assert not has_whole_matrices(9, [Slot(0, 4, 12, 0)], 2)


SMALL = LipNeXtConfig(depth=6, width=16, image_size=8)
ZERO_3 = ParallelConfig(engine="deepspeed", zero_stage=3)
CUT = [
    # processes, blocks_per_bank → the refusal
    (
        8,
        0,
        "model.depth = 6: ZeRO-3 on 8 processes would cut through matrices: 2·depth = 12 is no "
        "multiple of 8; use parallel.zero_stage = 2 or parallel.engine = 'fsdp'",
    ),
    (
        4,
        3,
        "model.blocks_per_bank = 3: ZeRO-3 on 4 processes would cut through matrices: a bank of 6 "
        "is no multiple of 4; 0 chooses a size that fits, or use parallel.zero_stage = 2 or "
        "parallel.engine = 'fsdp'",
    ),
]


@pytest.mark.parametrize("processes, blocks, message", CUT)
def test_zero_3_is_refused_where_it_would_cut_a_matrix(
    processes: int, blocks: int, message: str
) -> None:
    """In one line that names the numbers; stage 2 pads and takes the same model."""
    config = LipNeXtConfig(depth=6, width=16, image_size=8, blocks_per_bank=blocks)
    with fake_group(0, processes):
        with pytest.raises(ConfigError) as refusal:
            build_engine(ZERO_3, "cpu").place(config)
        assert str(refusal.value) == message
        build_engine(ParallelConfig(engine="deepspeed"), "cpu").place(config)


@pytest.mark.parametrize("processes", [1, 2, 3, 4, 6, 12])
def test_zero_3_chooses_banks_that_it_does_not_cut(processes: int) -> None:
    """Whenever the processes divide the 12 matrices."""
    with fake_group(0, processes):
        model = build_engine(ZERO_3, "cpu").place(SMALL)
    assert all(2 * group.count % processes == 0 for group in model.block_groups())
    assert all(parameter.is_meta for parameter in model.parameters())


def test_without_deepspeed_its_engine_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """In one line with the command that installs it."""
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    with fake_group(0, 2), pytest.raises(UserError) as refusal:
        build_engine(ParallelConfig(engine="deepspeed"), "cpu").build(SMALL, seed=0)
    assert str(refusal.value) == (
        "parallel.engine = 'deepspeed': DeepSpeed is not installed here: "
        "pip install 'lipnext_scale[deepspeed]'"
    )


def test_bf16_reaches_the_groups() -> None:
    """As the type of what they compute; the weights are cast when they get memory."""
    with fake_group(0, 2):
        config = ParallelConfig(engine="deepspeed", precision="bf16")
        model = build_engine(config, "cpu").place(SMALL)
    assert {group.compute_dtype for group in model.block_groups()} == {torch.bfloat16}


def test_an_older_deepspeed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked for its version only: the engine reaches into what others do not have."""
    pytest.importorskip("deepspeed")
    zero.require_deepspeed()
    monkeypatch.setattr(zero, "version", lambda name: "0.16.4+cu12")
    with pytest.raises(ConfigError, match="'deepspeed': DeepSpeed 0.16.4.* is older than 0.19.8"):
        zero.require_deepspeed()
    monkeypatch.setattr(zero, "version", lambda name: "0.20.0")
    zero.require_deepspeed()


def test_the_oldest_deepspeed_is_that_of_the_package() -> None:
    asked = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert f'"deepspeed>={".".join(map(str, zero.OLDEST_DEEPSPEED))}"' in asked
