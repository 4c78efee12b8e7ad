"""Families as others have written them: values and gradients, where the packages are installed."""

from collections.abc import Callable, Iterable

import pytest
import torch
from test_layers_families import WIDTH, drawn, normal
from torch import Tensor
from torch.func import functional_call

from lipnext_scale.models.layers import FAMILIES, Gated

Free = dict[str, Tensor]
ONE = torch.eye(WIDTH, dtype=torch.float64)


def of_one_mixer(layer: str) -> Free:
    return {name: tensor[0].requires_grad_() for name, tensor in drawn(layer).items()}


def assert_same(free: Free, ours: Iterable[Tensor], theirs: Iterable[Tensor]) -> None:
    """1e-8: what the series of exp and lot may leave, as where they meet their definitions."""
    pairs = list(zip(ours, theirs, strict=True))
    for our, their in pairs:
        torch.testing.assert_close(our, their, rtol=0, atol=1e-8)
    weights = [normal(*our.shape, seed=9 + index) for index, (our, _) in enumerate(pairs)]
    found = [
        torch.autograd.grad(outputs, list(free.values()), weights, materialize_grads=True)
        for outputs in zip(*pairs, strict=True)
    ]
    for name, our, their in zip(free, *found, strict=True):
        assert our.any()  # or nothing would be compared
        torch.testing.assert_close(our, their, rtol=0, atol=1e-8, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("layer, trivialization", [("cayley", "cayley"), ("exp", "expm")])
def test_geotorch(layer: str, trivialization: str) -> None:
    """It takes the skew matrix of the lower triangle; its Cayley transform is of half of it."""
    geotorch = pytest.importorskip("geotorch")
    group = geotorch.SO((WIDTH, WIDTH), triv=trivialization).double()
    group.base.copy_(ONE)
    free = of_one_mixer(layer)
    lower = free["X"].tril(-1)
    made = FAMILIES[layer].made({"X": -lower / 2 if layer == "cayley" else lower})
    assert_same(free, [made["matrix"]], [group(free["X"])])


def cholesky(free: Free) -> Tensor:
    """Of a matrix so long that the 1e-5 that it adds to the Gram matrix are 1e-13 of it."""
    from orthogonium.reparametrizers import BatchedCholeskyOrthogonalization

    return BatchedCholeskyOrthogonalization((1, WIDTH, WIDTH))(1e4 * free["A"][None])[0]


def exponential(free: Free) -> Tensor:
    """Of (W - Wᵀ)/2; the series is as long as one asks."""
    from orthogonium.reparametrizers import BatchedExponentialOrthogonalization

    return BatchedExponentialOrthogonalization((WIDTH, WIDTH), niters=30)(2 * free["X"])


def polar(free: Free) -> Tensor:
    """Björck's iteration, which needs singular values up to 1."""
    from orthogonium.reparametrizers import BatchedBjorckOrthogonalization

    a = free["A"] / torch.linalg.matrix_norm(free["A"], 2)
    return BatchedBjorckOrthogonalization((WIDTH, WIDTH), niters=25)(a)


def almost_orthogonal(free: Free) -> Tensor:
    from orthogonium.layers.conv.AOL.aol import MultiStepAOLReparametrizer

    rescale = MultiStepAOLReparametrizer(WIDTH, groups=1, niter=1).double()
    return rescale(free["A"][..., None, None])[..., 0, 0]


def cayley(free: Free) -> Tensor:
    from orthogonium.legacy.cayley_ortho_conv import cayley_func

    return cayley_func(free["X"])


LINEAR = {
    "cholesky": cholesky,
    "exp": exponential,
    "lot": polar,
    "aol": almost_orthogonal,
    "cayley": cayley,
}


@pytest.mark.parametrize("layer, public", LINEAR.items())
def test_orthogonium(layer: str, public: Callable[[Free], Tensor]) -> None:
    pytest.importorskip("orthogonium")
    free = of_one_mixer(layer)
    assert_same(free, [FAMILIES[layer].made(free)["matrix"]], [public(free)])


def test_orthogonium_sll() -> None:
    sll = pytest.importorskip("orthogonium.layers.conv.SLL")
    module = sll.SDPBasedLipschitzDense(WIDTH, WIDTH, WIDTH).double()
    family, free, x = FAMILIES["sll"], of_one_mixer("sll"), normal(50, WIDTH, seed=1)
    assert isinstance(family, Gated)
    parameters = {"weight": free["A"].mT, "bias": free["b"][None], "q": free["log_q"]}
    theirs = functional_call(module, parameters, (x,))
    assert_same(free, [family.mix(family.made(free), x)], [theirs])


def test_orthogonium_makes_the_rows_of_sandwich() -> None:
    """Cayley's transform of a tall matrix is [A B]ᵀ."""
    legacy = pytest.importorskip("orthogonium.legacy.cayley_ortho_conv")
    free = {name: tensor for name, tensor in of_one_mixer("sandwich").items() if name in "XY"}
    made = FAMILIES["sandwich"].made({**of_one_mixer("sandwich"), **free})
    tall = legacy.cayley_func(torch.cat([free["X"], free["Y"]]))
    assert_same(free, [made["A"], made["B"]], [tall[:WIDTH].mT, tall[WIDTH:].mT])
