"""The fast form of a group of blocks: one autograd node, hand-written backward, reused memory.

It computes what `blocks.group_reference` computes (tests/models compare values and gradients) and
differs in what it does not do: no copy of the unshifted channels, no concatenations, no
pre-activation kept beside the activation (its signs are, one byte each), no gradient buffer per
operation, and the gradients of all matrices written where the bank's gradient is.

What lies between the products is done by torch in place, or on CUDA by the kernels of `kernels.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lipnext_scale.models import kernels
from lipnext_scale.models.blocks import SHIFTS, BlockSpec, Matrices, matrix_list
from lipnext_scale.utils.products import product


def fused_group(
    x: Tensor, matrices: Matrices, bias: Tensor, pos: Tensor | None, spec: BlockSpec
) -> Tensor:
    """`group_reference`, fast."""
    weights = (matrices,) if isinstance(matrices, Tensor) else tuple(matrices)
    keep = torch.is_grad_enabled()
    return _FusedGroup.apply(x.contiguous(), bias, pos, spec, keep, *weights)


class _FusedGroup(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        bias: Tensor,
        pos: Tensor | None,
        spec: BlockSpec,
        keep: bool,
        *weights: Tensor,
    ) -> Tensor:
        matrices, passes = _unpacked(weights), _passes(spec, x)
        kept: list[Tensor] = []
        u = x if pos is None else x + pos[0]
        for index in range(len(bias)):
            mixed = product(u.view(-1, u.shape[-1]), matrices[2 * index])
            passes.shift_(mixed.view(x.shape), backward=False)
            # What is returned must be no view, or FSDP cannot hook on to it.
            z = torch.empty_like(x)
            next_pos = pos[index + 1] if pos is not None and index + 1 < len(bias) else None
            choice = passes.layer(mixed, matrices[2 * index + 1], bias[index], next_pos, z)
            if keep:
                kept += [u, mixed, choice]
            u = z
        if keep:
            ctx.save_for_backward(*weights, *kept)
            ctx.count, ctx.passes, ctx.has_pos = len(bias), passes, pos is not None
        return u

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        shape, channels = grad_output.shape, grad_output.shape[-1]
        count, saved = ctx.count, ctx.saved_tensors
        weights, kept = saved[: -3 * count], saved[-3 * count :]
        matrices = _unpacked(weights)
        need_x, need_bias, need_pos = ctx.needs_input_grad[:3]
        need_pos, need_weights = need_pos and ctx.has_pos, any(ctx.needs_input_grad[5:])
        grad_weights = [torch.empty_like(w) for w in weights] if need_weights else []
        grad_matrices = _unpacked(grad_weights)
        passes: _Passes = ctx.passes
        new_sums = partial(grad_output.new_empty, dtype=passes.sum_dtype)
        grad_bias = new_sums((count, channels)) if need_bias else None
        grad_pos = new_sums((count, *shape[1:3], 1)) if need_pos else None

        # All products are square in the channels, so two buffers hold the gradient down the group.
        source = grad_output.reshape(-1, channels).contiguous()
        grad, other = torch.empty_like(source), torch.empty_like(source)
        for index in reversed(range(count)):
            u, mixed, choice = kept[3 * index : 3 * index + 3]
            block_bias = None if grad_bias is None else grad_bias[index]
            next_pos = None if grad_pos is None or index + 1 == count else grad_pos[index + 1]
            passes.activate_backward(source, choice, grad, shape, block_bias, next_pos)
            source = grad
            if need_weights:
                product(grad.mT, mixed.mT, out=grad_matrices[2 * index + 1])
            product(grad, matrices[2 * index + 1].mT, out=other)
            passes.shift_(other.view(shape), backward=True)
            if need_weights:
                product(other.mT, u.view(-1, channels).mT, out=grad_matrices[2 * index])
            if index == 0 and not (need_x or need_pos):
                break
            product(other, matrices[2 * index].mT, out=grad)
        if grad_pos is not None:
            passes.sum_tokens(grad.view(shape), grad_pos[0])
        grad_x = grad.view(shape) if need_x else None
        nothing: list[None] = [None] * len(weights)
        grad_bias = None if grad_bias is None else grad_bias.to(grad_output.dtype)
        grad_pos = None if grad_pos is None else grad_pos.to(grad_output.dtype)
        return grad_x, grad_bias, grad_pos, None, None, *(grad_weights or nothing)


def _unpacked(weights: Sequence[Tensor]) -> Sequence[Tensor]:
    """The matrices [C, C], given as they are or as one bank [g, 2, C, C]."""
    return matrix_list(weights[0]) if len(weights) == 1 else weights


# --------------------------------------------------------------------------------------------------
# What lies between the products.


def _passes(spec: BlockSpec, x: Tensor) -> "_Passes":
    plain = kernels.why_plain(spec, x) is not None
    return _Passes(spec, x.dtype) if plain else _KernelPasses(spec, torch.float32)


@dataclass(frozen=True)
class _Passes:
    """By torch, in place."""

    spec: BlockSpec
    sum_dtype: torch.dtype  # of the gradients of bias and pos, until the group is done

    def shift_(self, x: Tensor, backward: bool) -> None:
        _shift_(x, self.spec, backward)

    def layer(
        self, mixed: Tensor, weight: Tensor, bias: Tensor, next_pos: Tensor | None, z: Tensor
    ) -> Tensor:
        """z = act(mixed·Wᵀ + b) + next_pos; returns what the backward pass must know of act."""
        rows = z.view(mixed.shape)
        product(mixed, weight, bias, out=rows)
        choice = _activate_(rows, self.spec)
        if next_pos is not None:
            z.add_(next_pos)
        return choice

    def activate_backward(
        self,
        source: Tensor,
        choice: Tensor,
        grad: Tensor,
        shape: torch.Size,
        grad_bias: Tensor | None,
        grad_next_pos: Tensor | None,
    ) -> None:
        """From the gradient of z in `source` to that of mixed·Wᵀ in `grad`, which may be one."""
        if source is not grad:
            grad.copy_(source)
        if grad_next_pos is not None:
            self.sum_tokens(grad.view(shape), grad_next_pos)
        _activate_backward_(grad, choice, self.spec)
        if grad_bias is not None:
            torch.sum(grad, dim=0, out=grad_bias)

    def sum_tokens(self, grad: Tensor, grad_pos: Tensor) -> None:
        """The gradient of pos [H, W, 1] from that of what it was added to."""
        torch.sum(grad.sum(-1), dim=0, out=grad_pos.squeeze(-1))


class _KernelPasses(_Passes):
    """By one kernel each: see `kernels.py`."""

    def shift_(self, x: Tensor, backward: bool) -> None:
        if self.spec.shift_part:
            kernels.shift_(x, self.spec.shift_part, self.spec.padding, backward)

    def layer(
        self, mixed: Tensor, weight: Tensor, bias: Tensor, next_pos: Tensor | None, z: Tensor
    ) -> Tensor:
        rows = z.view(mixed.shape)
        product(mixed, weight, out=rows)
        return kernels.activate_(rows, bias, next_pos, int(rows.shape[-1] * self.spec.beta))

    def activate_backward(
        self,
        source: Tensor,
        choice: Tensor,
        grad: Tensor,
        shape: torch.Size,
        grad_bias: Tensor | None,
        grad_next_pos: Tensor | None,
    ) -> None:
        tokens = shape[1] * shape[2]
        bias_parts = None if grad_bias is None else kernels.bias_parts(source, tokens)
        pos_parts = None if grad_next_pos is None else kernels.pos_parts(source, tokens)
        kernels.activate_backward(source, choice, grad, bias_parts, pos_parts, tokens)
        if grad_bias is not None and bias_parts is not None:
            torch.sum(bias_parts, dim=0, out=grad_bias)
        if grad_next_pos is not None and pos_parts is not None:
            torch.sum(pos_parts, dim=0, out=grad_next_pos.view(-1))

    def sum_tokens(self, grad: Tensor, grad_pos: Tensor) -> None:
        torch.sum(grad, dim=(0, 3), dtype=self.sum_dtype, out=grad_pos.squeeze(-1))


def _shift_(x: Tensor, spec: BlockSpec, backward: bool) -> None:
    """`spatial_shift` in place, or its transpose: the same with every step reversed."""
    part = spec.shift_part
    if part == 0:
        return
    first = x.shape[-1] - 4 * part
    for index, (dim, step) in enumerate(SHIFTS):
        step = -step if backward else step
        channels = x[..., first + index * part : first + (index + 1) * part]
        channels.copy_(torch.roll(channels, step, dim))
        if spec.padding == "zero":
            channels.select(dim, 0 if step > 0 else -1).zero_()


def _activate_(z: Tensor, spec: BlockSpec) -> Tensor:
    """The activation in place on [rows, C]; returns one byte per decision for the backward pass."""
    if spec.activation == "minmax":
        one, two = z.chunk(2, dim=-1)
        # As torch.maximum: a tie gives each half of the gradient, so three values: 1, 0 and -1.
        order = torch.sign(one - two)
        larger = torch.maximum(one, two)
        torch.minimum(one, two, out=two)
        one.copy_(larger)
        return order.to(torch.int8)
    positive_part = z[:, : int(z.shape[-1] * spec.beta)]
    signs = torch.sign(positive_part).to(torch.int8)
    positive_part.abs_()
    return signs


def _activate_backward_(grad: Tensor, choice: Tensor, spec: BlockSpec) -> None:
    if spec.activation == "minmax":
        one, two = grad.chunk(2, dim=-1)
        # d max = ((1+s)·da + (1-s)·db)/2 and the other way round, with s the sign of a - b.
        half_difference = ((one - two) / 2).mul_(choice)
        mean = (one + two) / 2
        torch.add(mean, half_difference, out=one)
        torch.sub(mean, half_difference, out=two)
    else:
        grad[:, : choice.shape[-1]].mul_(choice)
