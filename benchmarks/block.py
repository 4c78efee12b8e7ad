"""Forward and backward of 8 blocks, in units of their 48 bare products.

    python -m benchmarks.block [--rounds 15]

64 tokens × batch 64. A block has two products and two more for each in the backward pass. The bare
products have the operands that the network would have: every block its own weights and activations.
"""

import argparse
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.timing import interleaved, machine, print_rows
from lipnext_scale.models import BlockGroup, BlockSpec, fused_group, group_reference
from lipnext_scale.utils import products
from lipnext_scale.utils.cpu import keep_freed_memory
from lipnext_scale.utils.products import product

BLOCKS, BATCH, SIDE = 8, 64, 8
BARE = "48 bare products"


def bare_products(width: int) -> Callable[[], object]:
    rows = BATCH * SIDE * SIDE
    blocks = [
        [torch.randn(rows, width) for _ in range(4)] + [torch.randn(width, width) for _ in range(2)]
        for _ in range(BLOCKS)
    ]

    def run() -> None:
        for u, mixed, _, _, rotation, weight in blocks:
            product(u, rotation)
            product(mixed, weight)
        for u, mixed, grad, grad_mixed, rotation, weight in reversed(blocks):
            product(grad.mT, mixed.mT)
            product(grad, weight.mT)
            product(grad_mixed.mT, u.mT)
            product(grad_mixed, rotation.mT)

    return run


def blocks(width: int, forward: Callable[..., Tensor]) -> Callable[[], object]:
    spec = BlockSpec(width // 16, "circular", "beta_abs", 0.75)
    group = BlockGroup(0, BLOCKS, width, (SIDE, SIDE), spec, has_pos=True)
    group.reset_parameters(0)
    x = torch.randn(BATCH, SIDE, SIDE, width, requires_grad=True)
    gradient = torch.randn(BATCH, SIDE, SIDE, width)
    inputs = [x, *group.parameters()]

    def run() -> None:
        output = forward(x, group.bank, group.bias, group.pos, spec)
        torch.autograd.grad(output, inputs, gradient)

    return run


def by_mkl(run: Callable[[], object]) -> Callable[[], object]:
    """The same with torch's own products, where `product` takes oneDNN's."""

    def other() -> None:
        products.ONEDNN, before = False, products.ONEDNN
        run()
        products.ONEDNN = before

    return other


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.block")
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    keep_freed_memory()
    torch.manual_seed(0)
    print(f"{BLOCKS} blocks, {SIDE * SIDE} tokens × batch {BATCH}, float32; {machine()}")
    for width in (128, 512):
        runs = {
            BARE: bare_products(width),
            "fused": blocks(width, fused_group),
            "plain": blocks(width, group_reference),
        }
        if products.ONEDNN:
            runs["fused, products by MKL"] = by_mkl(runs["fused"])
        seconds = interleaved(runs, arguments.rounds)
        print(f"width {width}")
        print_rows(seconds, BARE)


if __name__ == "__main__":
    main()
