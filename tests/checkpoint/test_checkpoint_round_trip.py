"""What some ranks saved is loaded by others, cut differently, bit for bit."""

import threading
from pathlib import Path

import torch
import torch.distributed as dist
from checkpoint_parts import (
    assert_holds,
    cut,
    message_of,
    random_bits,
    same_bits,
    sample_shards,
    whole,
)
from gloo import run_processes
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch.distributed import checkpoint as dcp

from lipnext_scale.checkpoint import (
    CheckpointWriter,
    StateShard,
    StateShards,
    latest_checkpoint,
    load_shards,
    read_facts,
    stored_shapes,
)
from lipnext_scale.checkpoint.shards import assign_writers

WORLD = 3
DTYPES = ["float32", "float64", "bfloat16", "float16", "int64", "uint8", "bool"]

# --- any split to any other -------------------------------------------------------------------


@st.composite
def splits(draw, shape: tuple[int, ...], processes: int):
    """How processes hold a tensor: None for a copy each, or (dimension, where each part begins)."""
    if not shape or draw(st.integers(0, 4)) == 0:
        return None
    dimension = draw(st.integers(0, len(shape) - 1))
    positions = st.integers(0, shape[dimension])
    cuts = sorted(draw(st.lists(positions, min_size=processes - 1, max_size=processes - 1)))
    return dimension, [0, *cuts, shape[dimension]]


@st.composite
def cases(draw):
    """Numbers of saving and loading processes, and for each tensor how both hold it."""
    saving, loading = draw(st.integers(1, WORLD)), draw(st.integers(1, WORLD))
    tensors = []
    for _ in range(draw(st.integers(1, 4))):
        shape = tuple(draw(st.lists(st.integers(0, 6), max_size=3)))
        dtype = draw(st.sampled_from(DTYPES))
        tensors.append((shape, dtype, draw(splits(shape, saving)), draw(splits(shape, loading))))
    return saving, loading, tensors


def shard_of(tensor: torch.Tensor, split, rank: int) -> StateShard:
    if split is None:
        return whole(tensor)
    dimension, bounds = split
    return cut(tensor, dimension, bounds[rank], bounds[rank + 1])


def save_and_load(rank: int, world_size: int, directory: str, all_cases: list) -> None:
    groups = {size: dist.new_group(range(size)) for size in range(1, WORLD + 1)}
    for index, (saving, loading, tensors) in enumerate(all_cases):
        path = Path(directory) / str(index)
        full = [
            random_bits(shape, getattr(torch, d), i) for i, (shape, d, *_) in enumerate(tensors)
        ]
        if rank < saving:
            shards: StateShards = {}
            for i, (_, _, split, _) in enumerate(tensors):
                shard = shard_of(full[i], split, rank)
                if shard.tensor.numel() or not full[i].numel() or i % 2:  # or it is left out
                    shards[f"t{i}"] = shard
            CheckpointWriter(path, 1, group=groups[saving]).save(1, shards, {}, asynchronous=False)
        dist.barrier()
        if rank < loading:
            load_and_compare(path, tensors, full, rank, groups[loading])


def load_and_compare(path: Path, tensors: list, full: list, rank: int, group) -> None:
    """Each shard is a view into a larger tensor, around which nothing may change."""
    marked = [random_bits(tuple(t.shape), t.dtype, 1000 + i) for i, t in enumerate(full)]
    around = [tensor.clone() for tensor in marked]
    found = latest_checkpoint(path)
    shards = {f"t{i}": shard_of(marked[i], tensors[i][3], rank) for i in range(len(tensors))}
    load_shards(found, shards, group)
    assert stored_shapes(found) == {f"t{i}": tuple(t.shape) for i, t in enumerate(full)}
    for i, (_, _, _, split) in enumerate(tensors):
        shard_of(around[i], split, rank).tensor.copy_(shard_of(full[i], split, rank).tensor)
        assert same_bits(marked[i], around[i]), (i, tensors[i])


many_cases = st.lists(cases(), min_size=10, max_size=10)
# No shrinking: each attempt would start processes, and the assertion names the tensor anyway.
in_processes = settings(deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])


@settings(in_processes, max_examples=3)
@given(many_cases)
def test_any_split_is_loaded_into_any_other(tmp_path_factory, all_cases):
    """Uneven, empty, replicated, along any dimension, scalars: every bit where it belongs."""
    run_processes(WORLD, save_and_load, str(tmp_path_factory.mktemp("any")), all_cases)


# --- replicas ---------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 50), max_size=12), st.integers(1, 5))
def test_copies_are_shared_out_once_and_evenly(sizes, world_size):
    """Each shard has one writer; loads differ by no more than the largest shard."""
    layout = {f"t{i}": ((0,), size) for i, size in enumerate(sizes)}
    writes = assign_writers([layout] * world_size)
    assert sorted(name for names in writes for name in names) == sorted(layout)
    loads = [sum(layout[name][1] for name in names) for names in writes]
    assert max(loads) - min(loads) <= max(sizes, default=0)


# --- beside the training ----------------------------------------------------------------------


def test_what_changes_after_save_is_not_stored(tmp_path, monkeypatch):
    """The stored values and facts are those at save(), whatever the training does next."""
    may_write, write = threading.Event(), dcp.save

    def write_later(*args, **kwargs):
        assert may_write.wait(timeout=30)
        return write(*args, **kwargs)

    monkeypatch.setattr(dcp, "save", write_later)
    writer = CheckpointWriter(tmp_path, 2)
    for step in (1, 2):  # the second save uses the memory of the first one's copies
        may_write.clear()
        shards, facts = sample_shards(step), {"places": [step]}
        writer.save(step, shards, facts)
        for shard in shards.values():
            shard.tensor.zero_()
        facts["places"].append("later")
        assert latest_checkpoint(tmp_path) != tmp_path / f"step-{step:09d}"
        may_write.set()
        writer.wait()
        assert_holds(latest_checkpoint(tmp_path), step)
        assert read_facts(latest_checkpoint(tmp_path))["places"] == [step]


# --- what does not fit ------------------------------------------------------------------------


def load_what_does_not_fit(rank: int, world_size: int, directory: str) -> list[str]:
    group, path = dist.group.WORLD, Path(directory) / "step-000000001"
    writer = CheckpointWriter(Path(directory), 1, group=group)
    writer.save(1, sample_shards(1, rank, world_size), {}, asynchronous=False)
    good = sample_shards(1)
    wrong = [
        {"tail": whole(torch.zeros(3))},
        {"bank": whole(torch.zeros(12, 6))},
        {"head": whole(torch.zeros(3, 12, dtype=torch.float64))},
    ]
    messages = []
    for shards in wrong:
        mine = shards if rank == 1 else good
        messages.append(message_of(load_shards, path, mine, group))
    load_shards(path, good, group)  # all ranks are in step again
    return messages


def test_what_does_not_fit_is_named_on_all_processes(tmp_path):
    """An unknown name, another shape or dtype on one rank: all raise, with path, name and both."""
    first, second = run_processes(2, load_what_does_not_fit, str(tmp_path))
    path = tmp_path / "step-000000001"
    assert (
        first
        == second
        == [
            f"{path}: has no tensor tail, of shape (3,) in this run",
            f"{path}: its bank has shape (12, 5), in this run (12, 6)",
            f"{path}: its head is torch.float32, in this run torch.float64",
        ]
    )
