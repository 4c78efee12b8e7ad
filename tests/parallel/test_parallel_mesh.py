"""The mesh of ranks: which share a copy of the model, which hold the same part of it."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lipnext_scale.config import ConfigError
from lipnext_scale.parallel.fsdp import (
    REPLICATE,
    SHARD,
    build_mesh,
    choose_shard_size,
    sharding_mesh,
)
from lipnext_scale.plan import fake_group

sizes = st.integers(1, 64)
unhurried = settings(deadline=None)


@unhurried
@given(nodes=sizes, per_node=sizes)
def test_by_itself_a_node_shares_a_copy(nodes: int, per_node: int) -> None:
    """Unless nodes have one rank each: then all of them do, for a copy each would save nothing."""
    expected = per_node if per_node > 1 else nodes
    assert choose_shard_size(0, nodes * per_node, per_node) == expected


@unhurried
@given(world=sizes, per_node=sizes)
def test_the_size_always_divides_the_ranks(world: int, per_node: int) -> None:
    """Nodes that do not fill up (or one that would be larger than all) share one copy."""
    size = choose_shard_size(0, world, per_node)
    assert world % size == 0 and size in (per_node, world)


@unhurried
@given(world=sizes, wanted=sizes, per_node=sizes)
def test_a_wanted_size_is_taken_or_refused(world: int, wanted: int, per_node: int) -> None:
    """Taken if it divides the ranks, whatever the nodes; otherwise the message has both numbers."""
    if world % wanted == 0:
        assert choose_shard_size(wanted, world, per_node) == wanted
    else:
        with pytest.raises(ConfigError) as refusal:
            choose_shard_size(wanted, world, per_node)
        assert str(refusal.value) == (
            f"parallel.shard_size = {wanted}: must divide the number of processes, {world}"
        )


@pytest.mark.parametrize("world, size", [(1, 1), (8, 8), (8, 4), (8, 1), (12, 3)])
def test_neighbours_share_a_copy(world: int, size: int) -> None:
    """Along `shard` ranks are consecutive, along `replicate` they are a shard's size apart."""
    for rank in {0, world // 2, world - 1}:
        with fake_group(rank, world):
            mesh = build_mesh("cpu", world, size)
            first = rank - rank % size
            assert mesh.shape == (world // size, size)
            assert mesh[SHARD].mesh.tolist() == list(range(first, first + size))
            assert mesh[REPLICATE].mesh.tolist() == list(range(rank % size, world, size))
            assert mesh[SHARD].get_local_rank() == rank % size


@pytest.mark.parametrize("size, axes", [(8, (SHARD,)), (4, (REPLICATE, SHARD))])
def test_fsdp_gets_an_axis_to_replicate_only_if_it_does(size: int, axes: tuple[str, ...]) -> None:
    """One copy over all ranks is plain FSDP, without all-reduces in groups of one."""
    with fake_group(0, 8):
        assert sharding_mesh(build_mesh("cpu", 8, size)).mesh_dim_names == axes
