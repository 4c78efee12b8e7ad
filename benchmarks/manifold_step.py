"""One optimizer step on orthogonal matrices, in units of one product of the same shape.

    python -m benchmarks.manifold_step [--width 1024] [--matrices 4] [--rounds 12]

ManifoldAdam at order 2, order 4 and the bounded rule, beside what others pay for orthogonality:
geoopt's RiemannianAdam (a step), and forward + backward of the parametrisations of torch and
geotorch (to which an optimizer's step would still be added).
"""

import argparse
import sys
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import orthogonal

from benchmarks.timing import interleaved, machine, print_rows
from lipnext_scale.manifold import random_orthogonal
from lipnext_scale.optim import ManifoldAdam
from lipnext_scale.utils.cpu import keep_freed_memory

try:
    import geoopt
    import geotorch
except ModuleNotFoundError as missing:
    why = f"error: {missing.name} is not installed: make bench, or pip install '.[bench]'"
    print(why, file=sys.stderr)
    sys.exit(2)

PRODUCT = "one product"
ORDER4 = "ManifoldAdam, order 4"


def bank(matrices: int, width: int) -> nn.Parameter:
    parameter = nn.Parameter(torch.stack([random_orthogonal(width) for _ in range(matrices)]))
    parameter.grad = torch.randn_like(parameter) * 1e-3
    return parameter


def manifold_step(matrices: int, width: int, norm: float, rule: str) -> Callable[[], object]:
    """A step whose ‖Δ‖_F is about `norm`: with constant gradients Adam moves every entry by lr.

    The Lookahead step exponentiates half the sum of its period, three times as much: with 0.3
    that is 0.9, still order 4.
    """
    optimizer = ManifoldAdam([bank(matrices, width)], lr=norm / width, exp_rule=rule)
    return optimizer.step


def geoopt_step(matrices: int, width: int) -> Callable[[], object]:
    start = bank(matrices, width)
    manifold = geoopt.CanonicalStiefel()
    parameter = geoopt.ManifoldParameter(start.data.clone(), manifold=manifold)
    parameter.grad = start.grad
    return geoopt.optim.RiemannianAdam([parameter], lr=1e-4).step


def parametrised(layers: list[nn.Linear]) -> Callable[[], object]:
    """Computing the orthogonal weights and differentiating through them, once for each matrix."""
    gradients = [torch.randn(layer.weight.shape) for layer in layers]

    def forward_and_backward() -> None:
        for layer, gradient in zip(layers, gradients, strict=True):
            layer.weight.backward(gradient)

    return forward_and_backward


def torch_layers(matrices: int, width: int, kind: str) -> list[nn.Linear]:
    return [
        orthogonal(nn.Linear(width, width, bias=False), orthogonal_map=kind)
        for _ in range(matrices)
    ]


def geotorch_layers(matrices: int, width: int) -> list[nn.Linear]:
    layers = [nn.Linear(width, width, bias=False) for _ in range(matrices)]
    for layer in layers:
        geotorch.orthogonal(layer, "weight")
    return layers


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.manifold_step")
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--matrices", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=12)
    arguments = parser.parse_args()
    keep_freed_memory()
    torch.manual_seed(0)
    k, d = arguments.matrices, arguments.width
    left, right = torch.randn(k, d, d), torch.randn(k, d, d)

    def product() -> Tensor:
        return torch.matmul(left, right)

    order4 = manifold_step(k, d, 0.3, "paper")
    quick = {
        PRODUCT: product,
        "ManifoldAdam, order 2": manifold_step(k, d, 0.01, "paper"),
        ORDER4: order4,
        "ManifoldAdam, bounded, ‖Δ‖_F = 0.3": manifold_step(k, d, 0.3, "bounded"),
        "geoopt RiemannianAdam step": geoopt_step(k, d),
        "torch orthogonal, cayley": parametrised(torch_layers(k, d, "cayley")),
    }
    slow = {
        PRODUCT: product,
        ORDER4: order4,
        "torch orthogonal, matrix_exp": parametrised(torch_layers(k, d, "matrix_exp")),
        "geotorch orthogonal": parametrised(geotorch_layers(k, d)),
    }
    print(f"[{k}, {d}, {d}] float32; {machine()}")
    print_rows(interleaved(quick, arguments.rounds), PRODUCT, ORDER4)
    print_rows(interleaved(slow, max(3, arguments.rounds // 6)), PRODUCT, ORDER4)


if __name__ == "__main__":
    main()
