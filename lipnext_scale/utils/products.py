"""Products of real matrices; on a CPU by the faster of two libraries that torch has.

torch multiplies float32 by MKL, which leaves AVX-512 unused on AMD's processors. oneDNN uses it:
x·Wᵀ and G·W take half of the time there, Gᵀ·x between a seventh more and a half. Both are sums of
float32 products in an order of their own, which is all that the certificate assumes.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def _is_onednn_faster() -> bool:
    known = torch.backends.mkldnn.is_available() and torch.backends.mkl.is_available()
    if not known or torch.backends.cpu.get_cpu_capability() != "AVX512":
        return False
    try:
        with Path("/proc/cpuinfo").open(encoding="utf-8", errors="replace") as info:
            return "AuthenticAMD" in info.read(2000)
    except OSError:
        return False


ONEDNN = _is_onednn_faster()


def product(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """x·weightᵀ + bias for x [m, n] and weight [k, n], without a gradient."""
    if ONEDNN and x.device.type == "cpu" and x.dtype == torch.float32 and x.numel():
        # oneDNN would copy a transposed x anyway; here a walk sees it.
        y = torch.ops.mkldnn._linear_pointwise(x.contiguous(), weight, bias, "none", [], "")
        return y if out is None else out.copy_(y)
    if bias is None:
        return torch.mm(x, weight.mT, out=out)
    return torch.addmm(bias, x, weight.mT, out=out)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return product(x, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        (x, weight), (need_x, need_weight) = ctx.saved_tensors, ctx.needs_input_grad
        grad_x = product(grad, weight.mT) if need_x else None
        return grad_x, product(grad.mT, x.mT) if need_weight else None


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x·weightᵀ with gradients."""
    return _Linear.apply(x, weight)
