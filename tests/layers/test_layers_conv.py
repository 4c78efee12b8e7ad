"""3×3 convolutions: against the block-circulant matrix written out, in runs; refusals."""

import dataclasses

import numpy as np
import pytest
import torch
from test_layers_certificate import TINY, images
from test_layers_families import GATED, ORTHOGONAL, adversarial, normal
from test_layers_runs import recipe
from torch import Tensor
from torch.autograd import gradcheck

from lipnext_scale import plan
from lipnext_scale.attacks import Attacker, AttackSettings, hunt
from lipnext_scale.certification import Certifier
from lipnext_scale.certification.certifier import convolution_bound, measure_layers
from lipnext_scale.checkpoint.exports import load_export, save_export
from lipnext_scale.data import read_samples
from lipnext_scale.models import LipNeXt, freeze
from lipnext_scale.models.layers import CONVOLUTIONS, FAMILIES, convolution
from lipnext_scale.models.layers.conv import convolve, convolve_spectrum, spectrum, transposed
from lipnext_scale.training.trainer import Trainer
from lipnext_scale.utils.config import ConfigError

WIDTH = 5
SIDES = (1, 2, 3, 4, 5)


def circulant(kernel: Tensor, side: int) -> Tensor:
    """The convolution as a matrix [T·C, T·C], from its definition alone."""
    out, channels, size, _ = kernel.shape
    matrix = np.zeros((side, side, out, side, side, channels))
    for row, column, i, j in np.ndindex(side, side, size, size):
        above, left = (row - i + size // 2) % side, (column - j + size // 2) % side
        matrix[row, column, :, above, left] += kernel[:, :, i, j].detach().numpy()
    return torch.from_numpy(matrix.reshape(side * side * out, side * side * channels))


def stored(layer: str, free: dict[str, Tensor], side: int) -> Tensor:
    """The kernel that freezing makes."""
    family = convolution(layer, side)
    made = family.stored(family.made(free))
    return made["Q" if layer in GATED else "kernel"]


@pytest.mark.parametrize("side", SIDES)
def test_a_convolution_is_its_matrix(side: int) -> None:
    """Also where the grid is smaller than the kernel, transposed, and in the Fourier domain."""
    kernel, x = normal(WIDTH, WIDTH, 3, 3), normal(2, side, side, WIDTH, seed=1)
    matrix = circulant(kernel, side)
    expected = (x.flatten(1) @ matrix.mT).view_as(x)
    torch.testing.assert_close(convolve(x, kernel), expected)
    torch.testing.assert_close(convolve_spectrum(x, spectrum(kernel, side)), expected)
    torch.testing.assert_close(circulant(transposed(kernel), side), matrix.mT)
    full = normal(WIDTH, WIDTH, side, side, seed=2)
    expected = (x.flatten(1) @ circulant(full, side).mT).view_as(x)
    torch.testing.assert_close(convolve(x, full), expected)


@pytest.mark.parametrize("side", [3, 4])
@pytest.mark.parametrize("layer", CONVOLUTIONS)
def test_a_family_is_its_dense_definition_of_the_matrix(layer: str, side: int) -> None:
    """AOL and SLL too: a column's sum over the matrix is that over channels and offsets.

    exp and lot are series, as of `test_a_linear_family_is_its_definition`. A norm is bounded by
    other roots of the dimension there.
    """
    shapes, dense = convolution(layer, side).shapes(WIDTH), FAMILIES[layer]
    free = {n: normal(*shape, seed=4) / 12 for n, shape in shapes.items()}
    for name in {"A", "V"} & free.keys():
        free[name][..., 1, 1] += torch.eye(*free[name].shape[:2])
    if side == 3 and layer in ("aol", "sll"):
        side = 5  # or offsets meet, and their sums with signs are less
    whole = {
        n: circulant(t, side) if t.dim() == 4 else t.repeat(side * side) for n, t in free.items()
    }
    if layer == "bro":  # circulant writes squares; these are columns of each token
        assert whole["V"].shape == (WIDTH * side * side, side * side)
    found = circulant(stored(layer, free, side), side)
    made = dense.made(whole)["Q" if layer in GATED else "matrix"]
    if layer == "cpl":
        made = made * (torch.linalg.matrix_norm(found, 2) / torch.linalg.matrix_norm(made, 2))
        assert 0.95 < torch.linalg.matrix_norm(found, 2) <= 1
    bound = 1e-8 if layer in ("exp", "lot") else 1e-11
    if layer in ("aol", "sll") and side == 4:
        assert (found.abs() <= made.abs() + 1e-12).all()  # wrapped sums are no less
    else:
        torch.testing.assert_close(found, made, rtol=0, atol=bound)
    if layer in ORTHOGONAL:
        one = torch.eye(len(found), dtype=torch.float64)
        torch.testing.assert_close(found @ found.mT, one, rtol=0, atol=bound)


@pytest.mark.parametrize("case", adversarial((2, 2)))
@pytest.mark.parametrize("layer", [name for name in CONVOLUTIONS if name != "lip_reg"])
def test_no_parameters_expand(layer: str, case: str) -> None:
    for side in (2, 4):
        shapes = convolution(layer, side).shapes(WIDTH)
        kernel = stored(layer, {n: adversarial(s)[case] for n, s in shapes.items()}, side)
        assert kernel.isfinite().all()
        matrix = circulant(kernel, side)
        assert torch.linalg.matrix_norm(matrix, 2) <= 1 + 1e-9
        if layer in ("cayley", "exp") and case not in ("huge", "badly scaled"):
            assert (matrix.mT @ matrix - torch.eye(len(matrix))).abs().max() < 1e-7


@pytest.mark.parametrize("side", SIDES)
def test_k_is_the_largest_singular_value(side: int) -> None:
    kernels = {
        "any": normal(WIDTH, WIDTH, 3, 3),
        "full": normal(WIDTH, WIDTH, side, side),
        "orthogonal": stored("lot", {"A": normal(WIDTH, WIDTH, 3, 3)}, side),
        "one frequency": torch.ones(WIDTH, WIDTH, 3, 3).double(),
        "zero": torch.zeros(WIDTH, WIDTH, 3, 3).double(),
    }
    for name, kernel in kernels.items():
        true = torch.linalg.matrix_norm(circulant(kernel, side), 2).item()
        bound = convolution_bound(kernel, side)
        assert true * (1 - 1e-13) <= bound <= true * (1 + 2e-6) + 1e-12, name
    assert not convolution_bound(1e200 * kernels["any"], side) < np.inf


@pytest.mark.parametrize("layer", CONVOLUTIONS)
def test_gradients(layer: str) -> None:
    """Of what is made and of lip_reg's norm, and finite at zero."""
    family = convolution(layer, 3)
    names = list(family.shapes(2))

    def outputs(*free: Tensor) -> tuple[Tensor, ...]:
        made = family.made(dict(zip(names, free, strict=True)))
        norm = [] if family.norm is None else [family.norm(made)]
        return (*made.values(), *norm)

    inputs = [normal(*shape, seed=5).requires_grad_() for shape in family.shapes(2).values()]
    assert gradcheck(outputs, inputs)
    zeros = [torch.zeros(shape, requires_grad=True) for shape in family.shapes(2).values()]
    sum(tensor.abs().square().sum() for tensor in outputs(*zeros)).backward()
    assert all(tensor.grad is None or tensor.grad.isfinite().all() for tensor in zeros)


@pytest.mark.parametrize("layer", CONVOLUTIONS)
def test_a_frozen_network_is_the_function_that_was_trained(layer: str, tmp_path) -> None:
    config = dataclasses.replace(TINY, layer=layer, kernel_size=3)
    model = LipNeXt(config, 0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.03 * torch.randn(parameter.shape, generator=torch.Generator())
        expected, frozen = model(images()), freeze(model)
        torch.testing.assert_close(frozen(images()), expected, rtol=0, atol=1e-3)
        save_export(model, tmp_path / "x.safetensors")
        assert torch.equal(load_export(tmp_path / "x.safetensors")(images()), frozen(images()))
        rows = model(images(), with_head=True)[1].norm(dim=1)
    bound = 1.0
    for block in measure_layers(frozen):
        bound *= block.rotation * block.weight
    if layer == "lip_reg":  # what the loss sees is K, bounded from above
        assert bound <= rows[0] * (1 + 1e-5) and rows[0] <= bound * 20 ** (6 / 128)
    else:
        assert bound <= 1 + 1e-4


@pytest.mark.parametrize("layer", CONVOLUTIONS)
def test_every_convolution_learns_and_keeps_its_certificate(layer: str, tmp_path) -> None:
    settings = f"model.layer={layer} model.kernel_size=3 model.patch_size=2 model.width=16"
    Trainer(recipe(tmp_path, *settings.split(), "optim.epochs=3")).run()
    certifier = Certifier.load(tmp_path)
    samples = read_samples("builtin:digits/test-*.tar.gz", "data.test")
    labels, radii = certifier(samples.images)
    right = labels == samples.labels
    assert right.double().mean() > 0.4
    assert (right & (radii > 0.05)).double().mean() > 0.2
    attacker = Attacker(certifier, AttackSettings(restarts=1, steps=10))
    targets = attacker.targets(samples.images[:30], torch.arange(30))
    assert not any(len(points.labels) for points in hunt(attacker, targets))
    beyond = attacker.attack("pgd", 0, targets, 8 * targets.radii, clip=False)
    assert beyond.changed.double().mean() > 0.5


@pytest.mark.parametrize("kernel_size", [1, 3])
def test_a_network_of_zeros_has_a_radius(kernel_size: int) -> None:
    """Its features are 0 whatever the image is: the bias of the head decides."""
    model = freeze(LipNeXt(dataclasses.replace(TINY, layer="aol", kernel_size=kernel_size), 0))
    with torch.no_grad():
        for parameter in model.groups.parameters():
            parameter.zero_()
        model.head.bias.copy_(torch.tensor([0.0, 1.0, 0.0, 0.0]))
    labels, radii = Certifier(model)(images())
    assert (labels == 1).all() and (radii > 1e3).all()


REFUSED = {
    r"model\.kernel_size = 2: must be 1 or 3": ["model.layer=aol", "model.kernel_size=2"],
    r"model\.kernel_size = 3: must be 1 for layer 'sandwich'; 3 needs one of cayley, exp, lot": [
        "model.layer=sandwich",
        "model.kernel_size=3",
    ],
    r"model\.kernel_size = 3: must be 1 for layer 'manifold'": ["model.kernel_size=3"],
    r"model\.padding = 'zero': must be circular for kernel_size 3": [
        "model.layer=aol",
        "model.kernel_size=3",
        "model.padding=zero",
    ],
    r"model\.patch_size = 2: must leave at most 16×16 tokens, not 32×32": [
        "model.layer=bro",
        "model.kernel_size=3",
        "model.image_size=64",
        "model.patch_size=2",
    ],
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_has_no_convolution_is_refused(message: str, tmp_path) -> None:
    with pytest.raises(ConfigError, match=message):
        recipe(tmp_path, *REFUSED[message])


@pytest.mark.slow
def test_a_plan_counts_complex_products(capsys) -> None:
    settings = "model.layer=bro model.kernel_size=3 model.depth=1 model.width=64".split()
    plan.main(["--config", "builtin:digits.yaml", *settings])
    assert "73,728 parameters of matrices" in capsys.readouterr().out  # 2·64²·9
