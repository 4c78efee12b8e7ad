"""The mesh of ranks: replicate × shard.

Ranks that differ along `shard` hold different parts of one copy of the model; ranks that differ
along `replicate` hold the same parts and average their gradients. Neighbouring ranks share a copy,
so that with a shard axis of a node's size weights travel within the node only (HSDP).
"""

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lipnext_scale.config import ConfigError

REPLICATE, SHARD = "replicate", "shard"


def choose_shard_size(wanted: int, world_size: int, local_world_size: int) -> int:
    """As wanted; by itself the ranks of a node.

    Where nodes have one rank each, or unequally many, all ranks share one copy.
    """
    if wanted == 0:
        nodes_are_alike = local_world_size > 1 and world_size % local_world_size == 0
        return local_world_size if nodes_are_alike else world_size
    if world_size % wanted:
        raise ConfigError(
            "parallel.shard_size", wanted, f"must divide the number of processes, {world_size}"
        )
    return wanted


def build_mesh(device_type: str, world_size: int, shard_size: int) -> DeviceMesh:
    shape = (world_size // shard_size, shard_size)
    return init_device_mesh(device_type, shape, mesh_dim_names=(REPLICATE, SHARD))


def sharding_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """What FSDP is given: both axes, or the shard axis alone where nothing is replicated."""
    return mesh[SHARD] if mesh[REPLICATE].size() == 1 else mesh
