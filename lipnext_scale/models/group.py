"""A group of LipNeXt blocks whose orthogonal matrices form one parameter, a bank."""

import torch
from torch import Tensor, nn

from lipnext_scale.manifold import random_orthogonal
from lipnext_scale.models.blocks import BlockSpec, group_reference
from lipnext_scale.models.fused import fused_group, layer_matrices


class BlockGroup(nn.Module):
    """The blocks [first, first + count) of a network: the unit of sharding, compiling, checkpoints.

    bank [2·count, C, C]: R and M (or W) of each block in turn. bias [count, C].
    pos [count, H, W, 1].
    """

    def __init__(
        self,
        first: int,
        count: int,
        width: int,
        tokens: tuple[int, int],
        spec: BlockSpec,
        has_pos: bool,
    ) -> None:
        super().__init__()
        self.first, self.count, self.spec = first, count, spec
        self.bank = nn.Parameter(torch.empty(2 * count, width, width))
        self.bias = nn.Parameter(torch.empty(count, width))
        self.pos = nn.Parameter(torch.empty(count, *tokens, 1)) if has_pos else None

    def forward(self, x: Tensor) -> Tensor:
        if torch.compiler.is_compiling():  # the compiler fuses the plain form itself
            return group_reference(x, self.bank, self.bias, self.pos, self.spec)
        return fused_group(x, self.bank, self.bias, self.pos, self.spec)

    def layers(self) -> tuple[Tensor, Tensor]:
        """(R, W) of every block as stacks [count, C, C], W as the forward pass computes it."""
        return layer_matrices(self.bank, self.spec)

    @torch.no_grad()
    def reset_parameters(self, seed: int) -> None:
        """R uniform on O(C), M = I (so W = Rᵀ), b = 0, pos = 0.

        Every matrix has its own seed, made of the block's number in the network: the start does not
        depend on how blocks are grouped or where the matrices live.
        """
        self.bias.zero_()
        if self.pos is not None:
            self.pos.zero_()
        for index in range(self.count):
            rotation, mixing = self.bank[2 * index], self.bank[2 * index + 1]
            rotation.copy_(initial_rotation(self.first + index, seed, rotation))
            if self.spec.parametrisation == "product":
                mixing.copy_(torch.eye(mixing.shape[-1], device=mixing.device))
            else:
                mixing.copy_(rotation.mT)


def initial_rotation(block: int, seed: int, like: Tensor) -> Tensor:
    """The first R of a block, from (seed, block) alone."""
    generator = torch.Generator().manual_seed((seed * 1_000_003 + block) % 2**63)
    return random_orthogonal(like.shape[-1], generator, like.dtype, like.device)
