"""The elementwise passes between the tensor-core products of a manifold step, each one operator.

A product of two float32 matrices runs on bf16 tensor cores as one product of thrice the inner
length. With hi = bf16(x) and lo = bf16(x - hi), |x - hi - lo| ≤ 2^-17·|x| and |lo| ≤ 2^-8·|x|, so

    [hi_a | hi_a | lo_a] · [hi_b ; lo_b ; hi_b] = hi_a·hi_b + hi_a·lo_b + lo_a·hi_b ≈ a·b

misses at most 2^-15·|a||b|: half of it is lo·lo. `split_left` and `split_right` make the operands.

Stacks are [k, d, d]. Each operator is its reference on the CPU.
"""

from collections.abc import Callable, Iterable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

# --------------------------------------------------------------------------------------------------
# References: what the operators compute.


def split_left_reference(x: Tensor) -> Tensor:
    """[hi | hi | lo], bf16 [k, d, 3d]."""
    hi, lo = _halves(x)
    return torch.cat([hi, hi, lo], dim=2)


def split_right_reference(x: Tensor) -> Tensor:
    """[hi ; lo ; hi], bf16 [k, 3d, d]."""
    hi, lo = _halves(x)
    return torch.cat([hi, lo, hi], dim=1)


def _halves(x: Tensor) -> tuple[Tensor, Tensor]:
    hi = x.bfloat16()
    return hi, (x - hi).bfloat16()


def scaled_cast_reference(x: Tensor, factor: Tensor, usable: Tensor) -> Tensor:
    """bf16(x·factor), or 0 where a step is not usable, whatever x and factor are."""
    return torch.where(usable, x * factor, 0).bfloat16()


def moments_reference_(
    product: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    buffer: Tensor | None,
    usable: Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    scale: float,
    synchronise: bool,
) -> Tensor:
    """Adam's direction from P = XᵀG, and the exponent of this step in bf16.

    A = skew(P); m ← β1·m + (1-β1)·A; v ← β2·v + (1-β2)·A²; Δ = bf16(scale·m / (√v + eps)); B += Δ.
    The exponent is Δ; on a step that synchronises it is bf16(B/2), and B ← 0. A step that is not
    usable changes nothing, and its exponent is 0.

    Δ is rounded before B adds it up, so that B is the sum of what the weights really moved by.
    Rounding to nearest is odd, so Δ stays exactly skew. m and B must be skew and v symmetric: the
    kernel reads their upper triangles alone. The caller puts Adam's bias corrections into `scale`
    and `eps`, as `direction_of` does.
    """
    a = (product - product.mT) / 2
    m = beta1 * exp_avg + (1 - beta1) * a
    v = beta2 * exp_avg_sq + (1 - beta2) * a * a
    exponent = (scale * m / (v.sqrt() + eps)).bfloat16()
    updates = [(exp_avg, m), (exp_avg_sq, v)]
    if buffer is not None:
        total = buffer + exponent
        if synchronise:
            exponent, total = (total / 2).bfloat16(), torch.zeros_like(total)
        updates.append((buffer, total))
    for old, new in updates:
        old.copy_(torch.where(usable, new, old))
    return torch.where(usable, exponent, 0)


def tail_operands_reference(
    square: Tensor, exponent: Tensor, shrink: Tensor
) -> tuple[Tensor, Tensor]:
    """bf16 of S = A² and of t³/6·A + t⁴/24·S: their product is the third and fourth Taylor terms
    of exp(tA), t the number of each matrix in `shrink`."""
    t = shrink[:, None, None]
    return square.bfloat16(), (t**3 / 6 * exponent + t**4 / 24 * square).bfloat16()


def change_right_reference(
    square: Tensor, exponent: Tensor, tail: Tensor | None, shrink: Tensor
) -> Tensor:
    """`split_right` of C = t·A + t²/2·S + tail, which is exp(tA) - I; bf16 [k, 3d, d]."""
    t = shrink[:, None, None]
    change = t * exponent + t**2 / 2 * square
    return split_right_reference(change if tail is None else change + tail)


# --------------------------------------------------------------------------------------------------
# Shapes: what the operators return for fake tensors. Results are contiguous.


def _split_left_shape(x: Tensor) -> Tensor:
    k, d, _ = x.shape
    return x.new_empty(k, d, 3 * d, dtype=torch.bfloat16)


def _split_right_shape(x: Tensor) -> Tensor:
    k, d, _ = x.shape
    return x.new_empty(k, 3 * d, d, dtype=torch.bfloat16)


def _same_shape(x: Tensor, *_: Any) -> Tensor:
    return x.new_empty(x.shape, dtype=torch.bfloat16)


# --------------------------------------------------------------------------------------------------
# Operators.

F = TypeVar("F", bound=Callable[..., Any])


def _operator(name: str, reference: F, shape: Callable[..., Any], mutates: Iterable[str] = ()) -> F:
    """lipnext::name. Tracers and dispatch modes see one operator, whatever it runs."""
    operator = torch.library.custom_op(f"lipnext::{name}", reference, mutates_args=mutates)
    operator.register_fake(shape)
    return cast(F, operator)


split_left = _operator("split_left", split_left_reference, _split_left_shape)
split_right = _operator("split_right", split_right_reference, _split_right_shape)
scaled_cast = _operator("scaled_cast", scaled_cast_reference, _same_shape)
moments_ = _operator(
    "moments_", moments_reference_, _same_shape, mutates=("exp_avg", "exp_avg_sq", "buffer")
)
tail_operands = _operator(
    "tail_operands", tail_operands_reference, lambda x, *_: (_same_shape(x), _same_shape(x))
)
change_right = _operator(
    "change_right", change_right_reference, lambda x, *_: _split_right_shape(x)
)
