"""A group of LipNeXt blocks: the unit of sharding, compiling and recomputing."""

from typing import Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lipnext_scale.manifold import random_orthogonal
from lipnext_scale.models.blocks import BlockSpec, Matrices, group_reference
from lipnext_scale.models.fused import fused_group, layer_matrices

WeightLayout = Literal["bank", "row"]


class BlockGroup(nn.Module):
    """The blocks [first, first + count) of a network.

    Their orthogonal matrices, R and M (or W) of each block in turn, are
        layout bank: one parameter, bank [2·count, C, C], so that a shard is a stack of whole ones;
        layout row:  a parameter [C, C] each, `matrices`, so that a shard is some rows of each.
    bias [count, C], pos [count, H, W, 1].
    """

    def __init__(
        self,
        first: int,
        count: int,
        width: int,
        tokens: tuple[int, int],
        spec: BlockSpec,
        has_pos: bool,
        layout: WeightLayout = "bank",
    ) -> None:
        super().__init__()
        self.first, self.count, self.spec = first, count, spec
        if layout == "bank":
            self.bank = nn.Parameter(torch.empty(2 * count, width, width))
        else:
            self.matrices = nn.ParameterList(torch.empty(width, width) for _ in range(2 * count))
        self.bias = nn.Parameter(torch.empty(count, width))
        self.pos = nn.Parameter(torch.empty(count, *tokens, 1)) if has_pos else None
        # Set from outside: recompute the activations in the backward pass instead of keeping them;
        # keep every M·Rᵀ until then (`fused_group`); compute in another type than the parameters
        # have (FSDP casts by itself and needs it not).
        self.recompute = False
        self.keep_products = True
        self.compute_dtype: torch.dtype | None = None

    @property
    def layout(self) -> WeightLayout:
        return "bank" if "bank" in self._parameters else "row"

    def orthogonal_weights(self) -> Matrices:
        return self.bank if self.layout == "bank" else list(self.matrices)

    def orthogonal_parameters(self) -> list[nn.Parameter]:
        """The parameters that hold the matrices."""
        return [self.bank] if self.layout == "bank" else list(self.matrices)

    def forward(self, x: Tensor) -> Tensor:
        if self.recompute and torch.is_grad_enabled():
            return checkpoint(self._blocks, x, use_reentrant=False, preserve_rng_state=False)
        return self._blocks(x)

    def _blocks(self, x: Tensor) -> Tensor:
        weights = self.orthogonal_weights()
        weights = (
            self._cast(weights) if isinstance(weights, Tensor) else [self._cast(w) for w in weights]
        )
        pos = None if self.pos is None else self._cast(self.pos)
        inputs = (self._cast(x), weights, self._cast(self.bias), pos, self.spec)
        if torch.compiler.is_compiling():  # the compiler fuses the plain form itself
            return group_reference(*inputs)
        return fused_group(*inputs, keep_products=self.keep_products)

    def _cast(self, tensor: Tensor) -> Tensor:
        return tensor if self.compute_dtype is None else tensor.to(self.compute_dtype)

    def layers(self) -> list[tuple[Tensor, Tensor]]:
        """(R, W) of every block, W as the forward pass computes it."""
        return list(zip(*layer_matrices(self.orthogonal_weights(), self.spec), strict=True))

    @torch.no_grad()
    def reset_parameters(self, seed: int) -> None:
        """R uniform on O(C), M = I (so W = Rᵀ), b = 0, pos = 0."""
        self.bias.zero_()
        if self.pos is not None:
            self.pos.zero_()
        for index, matrix in enumerate(self.orthogonal_weights()):
            matrix.copy_(self.initial_matrix(index, seed, matrix))

    def initial_matrix(self, index: int, seed: int, like: Tensor) -> Tensor:
        """The first value of the group's matrix `index`, on the device and in the type of `like`.

        It comes from (seed, block) alone: the start does not depend on how blocks are grouped, how
        matrices are laid out or on which process they live.
        """
        width = like.shape[-1]
        if index % 2 and self.spec.parametrisation == "product":
            return torch.eye(width, dtype=like.dtype, device=like.device)
        block = self.first + index // 2
        generator = torch.Generator().manual_seed((seed * 1_000_003 + block) % 2**63)
        rotation = random_orthogonal(width, generator, like.dtype, like.device)
        return rotation.mT if index % 2 else rotation
