"""The fast form of a group of blocks: one autograd node, hand-written backward, reused memory.

It computes what `blocks.group_reference` computes (tests/models compare values and gradients) and
differs in what it does not do: no copy of the unshifted channels, no concatenations, no
pre-activation kept beside the activation (its signs are, one byte each), no gradient buffer per
operation, and the gradients of all matrices written where the bank's gradient is.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lipnext_scale.models.blocks import BlockSpec
from lipnext_scale.models.ops import SHIFTS


def fused_group(
    x: Tensor, bank: Tensor, bias: Tensor, pos: Tensor | None, spec: BlockSpec
) -> Tensor:
    """`group_reference`, fast."""
    return _FusedGroup.apply(x.contiguous(), bank, bias, pos, spec, torch.is_grad_enabled())


class _FusedGroup(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        bank: Tensor,
        bias: Tensor,
        pos: Tensor | None,
        spec: BlockSpec,
        keep: bool,
    ) -> Tensor:
        rotations, weights = layer_matrices(bank, spec)
        kept: list[Tensor] = []
        u = x if pos is None else x + pos[0]
        for index in range(len(bias)):
            mixed = u.view(-1, u.shape[-1]) @ rotations[index].mT
            _shift_(mixed.view(x.shape), spec, backward=False)
            z = torch.addmm(bias[index], mixed, weights[index].mT)
            choice = _activate_(z, spec)
            if keep:
                kept += [u, mixed, choice]
            if pos is not None and index + 1 < len(bias):
                z.view(x.shape).add_(pos[index + 1])
            u = z.view(x.shape)
        if keep:
            ctx.save_for_backward(
                bank, *([] if spec.parametrisation == "merged" else [weights]), *kept
            )
            ctx.spec, ctx.has_pos = spec, pos is not None
        return u

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        bank, *kept = ctx.saved_tensors
        spec, shape = ctx.spec, grad_output.shape
        rotations, weights = layer_matrices(
            bank, spec, kept.pop(0) if spec.parametrisation == "product" else None
        )
        count, channels = len(kept) // 3, shape[-1]
        need_x, need_bank, need_bias, need_pos = ctx.needs_input_grad[:4]
        need_pos = need_pos and ctx.has_pos
        grad_bank = torch.empty_like(bank) if need_bank else None
        grad_bias = bank.new_empty(count, channels) if need_bias else None
        grad_pos = bank.new_empty(count, *shape[1:3], 1) if need_pos else None

        # All products are square in the channels, so two buffers pass the gradient down the group.
        grad = grad_output.reshape(-1, channels).clone()
        other = torch.empty_like(grad)
        for index in reversed(range(count)):
            u, mixed, choice = kept[3 * index : 3 * index + 3]
            _activate_backward_(grad, choice, spec)
            if grad_bias is not None:
                torch.sum(grad, dim=0, out=grad_bias[index])
            if grad_bank is not None:
                torch.mm(grad.mT, mixed, out=grad_bank[2 * index + 1])
            torch.mm(grad, weights[index], out=other)
            _shift_(other.view(shape), spec, backward=True)
            if grad_bank is not None:
                torch.mm(other.mT, u.view(-1, channels), out=grad_bank[2 * index])
            if index == 0 and not (need_x or need_pos):
                break
            torch.mm(other, rotations[index], out=grad)
            if grad_pos is not None:
                torch.sum(grad.view(shape).sum(-1), dim=0, out=grad_pos[index].squeeze(-1))
        if grad_bank is not None and spec.parametrisation == "product":
            _product_backward_(grad_bank, bank)
        grad_x = grad.view(shape) if need_x else None
        return grad_x, grad_bank, grad_bias, grad_pos, None, None


def layer_matrices(
    bank: Tensor, spec: BlockSpec, products: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(R, W) of every block as stacks [g, C, C]; `products` are the M·Rᵀ if they are known."""
    rotations, mixings = bank[0::2], bank[1::2]
    if spec.parametrisation == "merged":
        return rotations, mixings
    return rotations, torch.bmm(mixings, rotations.mT) if products is None else products


def _product_backward_(grad_bank: Tensor, bank: Tensor) -> None:
    """W = M·Rᵀ: from the gradient of W, in M's place, to R's (added) and M's: dWᵀ·M and dW·R."""
    grad_rotations, grad_weights = grad_bank[0::2], grad_bank[1::2]
    rotations, mixings = bank[0::2], bank[1::2]
    grad_rotations += torch.bmm(grad_weights.mT, mixings)
    grad_weights.copy_(torch.bmm(grad_weights, rotations))


def _shift_(x: Tensor, spec: BlockSpec, backward: bool) -> None:
    """`spatial_shift` in place, or its transpose: the same with every step reversed."""
    part = spec.shift_part
    if part == 0:
        return
    first = x.shape[-1] - 4 * part
    for index, (dim, step) in enumerate(SHIFTS):
        step = -step if backward else step
        piece = x[..., first + index * part : first + (index + 1) * part]
        piece.copy_(torch.roll(piece, step, dim))
        if spec.padding == "zero":
            piece.select(dim, 0 if step > 0 else -1).zero_()


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
