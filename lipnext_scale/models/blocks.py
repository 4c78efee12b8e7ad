"""LipNeXt blocks (paper §3.3) as readable functions; `fused.py` has the fast form of a group."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

# --------------------------------------------------------------------------------------------------
# The operations of LipNeXt: pure functions on channels-last tensors [N, H, W, C], 1-Lipschitz.
#
# Written to be read. `fused.py` has the fast version of a whole group of blocks.

# The four shifted channel parts, in order: (dimension, step), dimension 1 = H and 2 = W.
SHIFTS = ((1, 1), (1, -1), (2, 1), (2, -1))


def space_to_depth(images: Tensor, patch_size: int, width: int) -> Tensor:
    """NCHW images → tokens [N, H/p, W/p, width]: every p×p patch becomes channels, then zeros.

    A permutation of the input with zeros appended: an isometry without parameters.
    """
    tokens = F.pixel_unshuffle(images, patch_size).permute(0, 2, 3, 1)
    return F.pad(tokens, (0, width - tokens.shape[-1]))


def shift_width(width: int, shift_ratio: float) -> int:
    """k = int(αC): how many channels each of the four parts has."""
    return int(width * shift_ratio)


def spatial_shift(x: Tensor, part: int, padding: str) -> Tensor:
    """Roll the last four parts of `part` channels by one token down, up, right, left (paper §3.2).

    Circular padding makes it a permutation, hence an isometry; zero padding drops what leaves.
    """
    if part == 0:
        return x
    still, *moving = x.split([x.shape[-1] - 4 * part, *[part] * 4], dim=-1)
    moved = [
        roll_tokens(channels, dim, step, padding)
        for channels, (dim, step) in zip(moving, SHIFTS, strict=True)
    ]
    return torch.cat([still, *moved], dim=-1)


def roll_tokens(x: Tensor, dim: int, step: int, padding: str) -> Tensor:
    """x moved by one token along H or W; zero padding drops what leaves."""
    rolled = torch.roll(x, step, dim)
    if padding == "zero":
        kept = torch.ones(x.shape[dim], dtype=x.dtype, device=x.device)
        kept[0 if step > 0 else -1] = 0
        shape = [1] * x.dim()
        shape[dim] = -1
        rolled = rolled * kept.view(shape)
    return rolled


def beta_abs(x: Tensor, beta: float) -> Tensor:
    """|·| of the first int(βC) channels, identity on the rest (paper §3.3)."""
    count = int(x.shape[-1] * beta)
    return torch.cat([x[..., :count].abs(), x[..., count:]], dim=-1)


def minmax(x: Tensor) -> Tensor:
    """(max(x₁, x₂), min(x₁, x₂)) of the two halves of the channels (paper, Theorem 2)."""
    one, two = x.chunk(2, dim=-1)
    return torch.cat([torch.maximum(one, two), torch.minimum(one, two)], dim=-1)


def activated(x: Tensor, spec: "BlockSpec") -> Tensor:
    return beta_abs(x, spec.beta) if spec.activation == "beta_abs" else minmax(x)


def l2_pool(x: Tensor) -> Tensor:
    """The l2 norm over H and W of each channel, in float32 or better. Its gradient at 0 is 0."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    return torch.linalg.vector_norm(x, dim=(1, 2), dtype=dtype)


# The orthogonal matrices of a group, R₀, W₀, R₁, W₁, …: as one bank [g, 2, C, C] or one by one.
Matrices = Tensor | Sequence[Tensor]


@dataclass(frozen=True)
class BlockSpec:
    """What the blocks of a network have in common beside their weights."""

    shift_part: int
    padding: str
    activation: str
    beta: float


def block_reference(
    x: Tensor, rotation: Tensor, weight: Tensor, bias: Tensor, pos: Tensor | None, spec: BlockSpec
) -> Tensor:
    """Z = act(W·S(R·(X + pos)) + b) on [N, H, W, C]."""
    if pos is not None:
        x = x + pos
    x = F.linear(x, rotation)
    x = spatial_shift(x, spec.shift_part, spec.padding)
    x = F.linear(x, weight, bias)
    return activated(x, spec)


def mixed_group(
    x: Tensor,
    mixers: Sequence[Callable[[Tensor], Tensor]],
    bias: Tensor,
    pos: Tensor | None,
    spec: BlockSpec,
) -> Tensor:
    """Blocks whose mixers are any functions of [N, H, W, C], two of each block in turn."""
    for index, block_bias in enumerate(bias.unbind(0)):
        x = mixers[2 * index](x if pos is None else x + pos[index])
        x = mixers[2 * index + 1](spatial_shift(x, spec.shift_part, spec.padding)) + block_bias
        x = activated(x, spec)
    return x


def matrix_list(matrices: Matrices) -> Sequence[Tensor]:
    """The matrices one by one.

    One unbind, not indexing: each index would cost a zero-filled bank in the backward pass.
    """
    return matrices.flatten(0, 1).unbind(0) if isinstance(matrices, Tensor) else matrices


def group_reference(
    x: Tensor, matrices: Matrices, bias: Tensor, pos: Tensor | None, spec: BlockSpec
) -> Tensor:
    """The blocks of a group one after the other."""
    matrices = matrix_list(matrices)
    positions = [None] * len(bias) if pos is None else pos.unbind(0)
    for index, (block_bias, block_pos) in enumerate(zip(bias.unbind(0), positions, strict=True)):
        rotation, weight = matrices[2 * index], matrices[2 * index + 1]
        x = block_reference(x, rotation, weight, block_bias, block_pos, spec)
    return x
