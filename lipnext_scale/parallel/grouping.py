"""How many blocks form a group: the unit that is gathered, computed and freed together."""

import math

from lipnext_scale.models import LipNeXtConfig

# A group should be large enough for its transfer to be more than latency, and small enough that
# two of them (one computing, one on its way) are little beside the rest.
GROUP_BYTES = 256 << 20


def choose_group_size(config: LipNeXtConfig, shards: int, whole_matrices: bool) -> int:
    """Blocks per group for a model over `shards` ranks; what the configuration says, if it does.

    With whole matrices on every rank (the bank layout) a group's 2g matrices should be a multiple
    of the ranks, or some have more to do than others. Of such sizes the one nearest to GROUP_BYTES
    is taken, and among those near it one that divides the depth, so that no small group is left.
    """
    if config.blocks_per_bank:
        return config.blocks_per_bank
    step = shards // math.gcd(2, shards) if whole_matrices else 1
    if step >= config.depth:  # some ranks will have no matrix of the only group
        return config.depth
    block_bytes = 2 * config.width**2 * 4
    wanted = max(1, round(GROUP_BYTES / (step * block_bytes))) * step
    largest = min(wanted, config.depth)
    sizes = range(step, largest + 1, step)
    dividing = [size for size in sizes if config.depth % size == 0 and size > largest / 2]
    return dividing[-1] if dividing else sizes[-1]
