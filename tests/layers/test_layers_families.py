"""Every family is what its paper defines, contracts whatever its parameters are, has gradients."""

import math

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import gradcheck

from lipnext_scale.models.layers import FAMILIES, Gated
from lipnext_scale.models.layers.lip_reg import norm

WIDTH = 12
LINEAR = [name for name, family in FAMILIES.items() if not isinstance(family, Gated)]
GATED = [name for name, family in FAMILIES.items() if isinstance(family, Gated)]
ORTHOGONAL = ["cayley", "exp", "lot", "cholesky", "bro"]
CONTRACTIONS = [*ORTHOGONAL, "aol"]


def normal(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def drawn(layer: str) -> dict[str, Tensor]:
    """Free parameters of three mixers, well-conditioned matrices among them."""
    free = {}
    for name, shape in FAMILIES[layer].shapes(WIDTH).items():
        free[name] = normal(3, *shape) / 12
        if name in ("A", "V"):
            free[name] += torch.eye(*shape, dtype=torch.float64)
    return free


def symmetric_power(matrix: Tensor, exponent: float) -> Tensor:
    values, vectors = torch.linalg.eigh(matrix)
    return vectors @ torch.diag_embed(values**exponent) @ vectors.mT


def defined(layer: str, free: dict[str, Tensor]) -> Tensor:
    """The matrix of a linear family as its paper writes it."""
    one = torch.eye(WIDTH, dtype=torch.float64)
    if layer in ("cayley", "exp"):
        a = free["X"] - free["X"].mT
        return torch.matrix_exp(a) if layer == "exp" else (one - a) @ torch.linalg.inv(one + a)
    if layer == "bro":
        v = free["V"]
        return one - 2 * v @ torch.linalg.inv(v.mT @ v) @ v.mT
    a = free["A"]
    if layer == "lot":
        return symmetric_power(a @ a.mT, -0.5) @ a
    if layer == "cholesky":
        return torch.linalg.inv(torch.linalg.cholesky(a @ a.mT)) @ a
    if layer == "aol":
        return a @ torch.diag_embed((a.mT @ a).abs().sum(-1) ** -0.5)
    return one + a


@pytest.mark.parametrize("layer", LINEAR)
def test_a_linear_family_is_its_definition(layer: str) -> None:
    """exp and lot are series: 2³·7e-10 of one, and a last step from 1e-5 of the other."""
    free = drawn(layer)
    made = FAMILIES[layer].made(free)["matrix"]
    bound = 1e-8 if layer in ("exp", "lot") else 1e-11
    torch.testing.assert_close(made, defined(layer, free), rtol=0, atol=bound)
    if layer in ORTHOGONAL:
        gram = made.mT @ made
        torch.testing.assert_close(
            gram, torch.eye(WIDTH).expand_as(gram).double(), rtol=0, atol=bound
        )


@pytest.mark.parametrize("layer", GATED)
def test_a_gated_family_is_its_definition(layer: str) -> None:
    family, free, x = FAMILIES[layer], drawn(layer), normal(3, 50, WIDTH, seed=1)
    assert isinstance(family, Gated)
    made = family.made(free)
    assert {n: t.shape[1:] for n, t in made.items()} == family.made_shapes(WIDTH)
    for index in range(3):
        f, relu = {n: t[index] for n, t in free.items()}, torch.relu
        if layer == "cpl":  # ‖A‖ bounded from above, by 12^(1/64) of it at most
            a = f["A"]
            size = a[0, 0] / made["Q"][index, 0, 0]
            true = torch.linalg.matrix_norm(a, 2)
            assert true <= size * (1 + 1e-12) and size <= true * 12 ** (1 / 64)
            expected = x[index] - 2 / size**2 * relu(x[index] @ a.mT + f["b"]) @ a
        elif layer == "sll":
            a, q = f["A"], f["log_q"].exp()
            t = ((a.mT @ a).abs() * q / q[:, None]).sum(-1)
            expected = x[index] - 2 * (relu(x[index] @ a + f["b"]) / t) @ a.mT
        else:
            z = f["X"] - f["X"].mT + f["Y"].mT @ f["Y"]
            n = torch.linalg.inv(torch.eye(WIDTH) + z)
            a, b = ((torch.eye(WIDTH) - z) @ n).mT, (-2 * f["Y"] @ n).mT
            torch.testing.assert_close(a @ a.mT + b @ b.mT, torch.eye(WIDTH).double())
            psi, root = f["log_psi"].exp(), math.sqrt(2)
            expected = root * (psi * relu(root * x[index] @ b.mT / psi + f["b"])) @ a
        mixed = family.mix({n: t[index] for n, t in made.items()}, x[index])
        torch.testing.assert_close(mixed, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("layer, trivialization", [("cayley", "cayley"), ("exp", "matrix_exp")])
def test_as_torch_parametrises_orthogonal_matrices(layer: str, trivialization: str) -> None:
    """torch takes the skew matrix of the lower triangle; its Cayley transform is of half of it."""
    linear = nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.float64)
    nn.utils.parametrizations.orthogonal(
        linear, orthogonal_map=trivialization, use_trivialization=False
    )
    original = normal(WIDTH, WIDTH) / 4
    with torch.no_grad():
        linear.parametrizations.weight.original.copy_(original)
    lower = original.tril(-1)
    free = -lower / 2 if layer == "cayley" else lower
    made = FAMILIES[layer].made({"X": free})["matrix"]
    base = getattr(linear.parametrizations.weight[0], "base", None)
    expected = linear.weight if base is None else base @ linear.weight
    torch.testing.assert_close(made, expected, rtol=0, atol=1e-8)


def adversarial(shape: tuple[int, ...]) -> dict[str, Tensor]:
    x = normal(*shape, seed=3)
    columns = torch.logspace(-15, 15, shape[-1], dtype=torch.float64)
    return {
        "zeros": x * 0,
        "rank one": x[..., :1] * torch.ones(shape[-1]) if len(shape) > 1 else x,
        "huge": 1e30 * x,
        "large": 1e8 * x,
        "tiny": 1e-30 * x,
        "repeated rows": x[:1].expand(shape),
        "badly scaled": columns * x,
        "one entry": torch.zeros(shape)
        .index_put((torch.tensor(0),) * len(shape), torch.tensor(5.0))
        .double(),
    }


CASES = list(adversarial((2, 2)))


@pytest.mark.parametrize("dtype, slack", [(torch.float64, 1e-9), (torch.float32, 1e-3)])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("layer", [*CONTRACTIONS, *GATED])
def test_no_parameters_expand(layer: str, case: str, dtype: torch.dtype, slack: float) -> None:
    """In float64, which is frozen; float32 of training loses digits where A is as long as 1e6."""
    if (
        dtype == torch.float32
        and layer in ("cayley", "sandwich")
        and case in ("huge", "large", "badly scaled")
    ):
        slack = 0.5
    shapes = FAMILIES[layer].shapes(WIDTH)
    made = FAMILIES[layer].made({n: adversarial(s)[case].to(dtype) for n, s in shapes.items()})
    if layer == "sandwich":
        matrix = torch.cat([made["A"], made["B"]], dim=-1)
    else:
        matrix = made["Q" if layer in GATED else "matrix"]
    assert matrix.isfinite().all()
    assert torch.linalg.matrix_norm(matrix.double(), 2) <= 1 + slack
    if layer in ("cayley", "exp") and dtype == torch.float64:
        assert (matrix.mT @ matrix - torch.eye(WIDTH)).abs().max() < 1e-7


def test_cayley_comes_near_minus_one() -> None:
    """Eigenvalues of A = ±i·s become (1 - s²)/(1 + s²) ± …: -1 + 2e-12 for s = 1e6."""
    x = torch.zeros(WIDTH, WIDTH, dtype=torch.float64)
    x[0, 1] = 1e6
    made = FAMILIES["cayley"].made({"X": x})["matrix"]
    torch.testing.assert_close(made[:2, :2], -torch.eye(2).double(), rtol=0, atol=1e-5)
    torch.testing.assert_close(made @ made.mT, torch.eye(WIDTH).double(), rtol=0, atol=1e-9)


@pytest.mark.parametrize("layer", FAMILIES)
def test_gradients(layer: str) -> None:
    width, family = 4, FAMILIES[layer]
    names = list(family.shapes(width))
    inputs = [
        (normal(2, *shape, seed=5) + (torch.eye(*shape) if len(shape) > 1 else 0)).requires_grad_()
        for shape in family.shapes(width).values()
    ]

    def outputs(*free: Tensor) -> tuple[Tensor, ...]:
        return tuple(family.made(dict(zip(names, free, strict=True))).values())

    assert gradcheck(outputs, inputs)


@pytest.mark.parametrize("layer", FAMILIES)
def test_gradients_are_finite_at_zero(layer: str) -> None:
    family = FAMILIES[layer]
    free = {n: torch.zeros(2, *s, requires_grad=True) for n, s in family.shapes(6).items()}
    sum(tensor.sum() for tensor in family.made(free).values()).backward()
    assert all(tensor.grad is None or tensor.grad.isfinite().all() for tensor in free.values())


def test_the_norm_of_lip_reg_is_bounded_from_above() -> None:
    matrix = torch.eye(WIDTH) + normal(20, WIDTH, WIDTH) * torch.linspace(0, 0.5, 20)[:, None, None]
    true = torch.linalg.matrix_norm(matrix, 2)
    bound = norm(matrix.requires_grad_()).flatten()
    assert (bound >= true * (1 - 1e-12)).all() and (bound <= true * 12 ** (1 / 128)).all()
    bound.sum().backward()
    assert matrix.grad is not None and matrix.grad.isfinite().all()


@pytest.mark.parametrize("layer", ORTHOGONAL)
def test_the_second_mixer_starts_as_the_transpose_of_the_first(layer: str) -> None:
    """As manifold does: W·R = I."""
    family = FAMILIES[layer]
    made = family.made(family.initial(WIDTH, torch.Generator().manual_seed(7)))["matrix"]
    torch.testing.assert_close(made[1] @ made[0], torch.eye(WIDTH), rtol=0, atol=1e-4)
