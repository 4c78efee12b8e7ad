"""The fast form of a group of blocks: one autograd node, hand-written backward, reused memory.

It computes what `blocks.group_reference` computes (tests/models compare values and gradients) and
differs in what it does not do: no copy of the unshifted channels, no concatenations, no
pre-activation kept beside the activation (its signs are, one byte each), no gradient buffer per
operation, and the gradients of all matrices written where the bank's gradient is.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lipnext_scale.models.blocks import SHIFTS, BlockSpec, Matrices, matrix_list


def fused_group(
    x: Tensor,
    matrices: Matrices,
    bias: Tensor,
    pos: Tensor | None,
    spec: BlockSpec,
    keep_products: bool = True,
) -> Tensor:
    """`group_reference`, fast.

    keep_products: keep every M·Rᵀ for the backward pass; else multiply again there. What is kept is
    half as large as the weights, unsharded: not for weights that are freed in between.
    """
    weights = (matrices,) if isinstance(matrices, Tensor) else tuple(matrices)
    keep = Keep(torch.is_grad_enabled(), keep_products)
    return _FusedGroup.apply(x.contiguous(), bias, pos, spec, keep, *weights)


class Keep(NamedTuple):
    """What a forward pass leaves for the backward pass."""

    activations: bool
    products: bool


class _FusedGroup(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        bias: Tensor,
        pos: Tensor | None,
        spec: BlockSpec,
        keep: Keep,
        *weights: Tensor,
    ) -> Tensor:
        rotations, layers = layer_matrices(_unpacked(weights), spec)
        kept: list[Tensor] = []
        u = x if pos is None else x + pos[0]
        for index in range(len(bias)):
            mixed = u.view(-1, u.shape[-1]) @ rotations[index].mT
            _shift_(mixed.view(x.shape), spec, backward=False)
            # What is returned must be no view, or FSDP cannot hook on to it.
            z = torch.empty_like(x)
            rows = z.view(-1, z.shape[-1])
            torch.addmm(bias[index], mixed, layers[index].mT, out=rows)
            choice = _activate_(rows, spec)
            if keep.activations:
                kept += [u, mixed, choice]
            if pos is not None and index + 1 < len(bias):
                z.add_(pos[index + 1])
            u = z
        if keep.activations:
            again = spec.parametrisation == "merged" or not keep.products
            products = [] if again else layers
            ctx.save_for_backward(*weights, *products, *kept)
            ctx.sizes = (len(weights), len(products), len(kept))
            ctx.spec, ctx.has_pos = spec, pos is not None
        return u

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        spec, shape, channels = ctx.spec, grad_output.shape, grad_output.shape[-1]
        weights, products, kept = _split(ctx.saved_tensors, ctx.sizes)
        count = len(kept) // 3
        matrices = _unpacked(weights)
        rotations, layers = layer_matrices(matrices, spec, products or None)
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
            torch.mm(grad, layers[index], out=other)
            _shift_(other.view(shape), spec, backward=True)
            if need_weights:
                torch.mm(other.mT, u.view(-1, channels), out=grad_matrices[2 * index])
            if index == 0 and not (need_x or need_pos):
                break
            torch.mm(other, rotations[index], out=grad)
            if grad_pos is not None:
                torch.sum(grad.view(shape).sum(-1), dim=0, out=grad_pos[index].squeeze(-1))
        if need_weights and spec.parametrisation == "product":
            _product_backward_(grad_matrices, matrices)
        grad_x = grad.view(shape) if need_x else None
        nothing: list[None] = [None] * len(weights)
        return grad_x, grad_bias, grad_pos, None, None, *(grad_weights or nothing)


def _unpacked(weights: Sequence[Tensor]) -> Sequence[Tensor]:
    """The matrices [C, C], given as they are or as one bank [2g, C, C]."""
    return matrix_list(weights[0]) if len(weights) == 1 else weights


def _split(tensors: Sequence[Tensor], sizes: Sequence[int]) -> list[Sequence[Tensor]]:
    ends = list(accumulate(sizes))
    return [tensors[end - size : end] for size, end in zip(sizes, ends, strict=True)]


def layer_matrices(
    matrices: Matrices, spec: BlockSpec, products: Sequence[Tensor] | None = None
) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """(R, W) of every block; `products` are the M·Rᵀ if they are known."""
    rotations, mixings = matrix_list(matrices)[0::2], matrix_list(matrices)[1::2]
    if spec.parametrisation == "merged":
        return rotations, mixings
    if products is None:
        products = [m @ r.mT for r, m in zip(rotations, mixings, strict=True)]
    return rotations, products


def _product_backward_(grads: Sequence[Tensor], matrices: Sequence[Tensor]) -> None:
    """W = M·Rᵀ: from the gradient of W, in M's place, to R's (added) and M's: dWᵀ·M and dW·R."""
    for index in range(0, len(grads), 2):
        rotation, mixing = matrices[index : index + 2]
        grad_rotation, grad_weight = grads[index : index + 2]
        grad_rotation.addmm_(grad_weight.mT, mixing)
        grad_weight.copy_(grad_weight @ rotation)


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
