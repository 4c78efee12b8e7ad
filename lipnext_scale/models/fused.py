"""The fast form of a group of blocks: one autograd node, hand-written backward, reused memory.

It computes what `blocks.group_reference` computes (tests/models compare values and gradients) and
differs in what it does not do: no copy of the unshifted channels, no concatenations, no
pre-activation kept beside the activation (its signs are, one byte each), no gradient buffer per
operation, and the gradients of all matrices written where the bank's gradient is.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lipnext_scale.models.blocks import SHIFTS, BlockSpec, Matrices, matrix_list


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
        matrices = _unpacked(weights)
        kept: list[Tensor] = []
        u = x if pos is None else x + pos[0]
        for index in range(len(bias)):
            mixed = u.view(-1, u.shape[-1]) @ matrices[2 * index].mT
            _shift_(mixed.view(x.shape), spec, backward=False)
            # What is returned must be no view, or FSDP cannot hook on to it.
            z = torch.empty_like(x)
            rows = z.view(-1, z.shape[-1])
            torch.addmm(bias[index], mixed, matrices[2 * index + 1].mT, out=rows)
            choice = _activate_(rows, spec)
            if keep:
                kept += [u, mixed, choice]
            if pos is not None and index + 1 < len(bias):
                z.add_(pos[index + 1])
            u = z
        if keep:
            ctx.save_for_backward(*weights, *kept)
            ctx.count, ctx.spec, ctx.has_pos = len(bias), spec, pos is not None
        return u

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        spec, shape, channels = ctx.spec, grad_output.shape, grad_output.shape[-1]
        count, saved = ctx.count, ctx.saved_tensors
        weights, kept = saved[: -3 * count], saved[-3 * count :]
        matrices = _unpacked(weights)
        need_x, need_bias, need_pos = ctx.needs_input_grad[:3]
        need_pos, need_weights = need_pos and ctx.has_pos, any(ctx.needs_input_grad[5:])
        grad_weights = [torch.empty_like(w) for w in weights] if need_weights else []
        grad_matrices = _unpacked(grad_weights)
        grad_bias = grad_output.new_empty(count, channels) if need_bias else None
        grad_pos = grad_output.new_empty(count, *shape[1:3], 1) if need_pos else None

        # All products are square in the channels, so two buffers pass the gradient down the group.
        grad = grad_output.reshape(-1, channels).clone()
        other = torch.empty_like(grad)
        for index in reversed(range(count)):
            u, mixed, choice = kept[3 * index : 3 * index + 3]
            _activate_backward_(grad, choice, spec)
            if grad_bias is not None:
                torch.sum(grad, dim=0, out=grad_bias[index])
            if need_weights:
                torch.mm(grad.mT, mixed, out=grad_matrices[2 * index + 1])
            torch.mm(grad, matrices[2 * index + 1], out=other)
            _shift_(other.view(shape), spec, backward=True)
            if need_weights:
                torch.mm(other.mT, u.view(-1, channels), out=grad_matrices[2 * index])
            if index == 0 and not (need_x or need_pos):
                break
            torch.mm(other, matrices[2 * index], out=grad)
            if grad_pos is not None:
                torch.sum(grad.view(shape).sum(-1), dim=0, out=grad_pos[index].squeeze(-1))
        grad_x = grad.view(shape) if need_x else None
        nothing: list[None] = [None] * len(weights)
        return grad_x, grad_bias, grad_pos, None, None, *(grad_weights or nothing)


def _unpacked(weights: Sequence[Tensor]) -> Sequence[Tensor]:
    """The matrices [C, C], given as they are or as one bank [g, 2, C, C]."""
    return matrix_list(weights[0]) if len(weights) == 1 else weights


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
