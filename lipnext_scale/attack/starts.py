"""Random points to begin at: of (seed, sample, restart, method) alone.

So neither the batch that a sample is in nor the process that attacks it changes what is found.
"""

import torch
from torch import Tensor

from lipnext_scale.data.randomness import sample_bits


def random_starts(
    shape: tuple[int, ...], seed: int, ids: Tensor, restart: int, stream: int
) -> Tensor:
    """Points of the unit ball [N, *shape], in float32 on the CPU.

    The direction is uniform, the length too: in many dimensions points that are uniform in a ball
    all lie on its surface, and the image's own neighbourhood would never be looked at.
    """
    starts = torch.empty(len(ids), *shape)
    for start, bits in zip(
        starts, sample_bits(seed, restart, ids.cpu().numpy(), stream), strict=True
    ):
        generator = torch.Generator().manual_seed(int(bits) >> 1)
        start.normal_(generator=generator)
        start.mul_(torch.rand((), generator=generator) / start.norm().clamp_min(1e-30))
    return starts
