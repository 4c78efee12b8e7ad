"""Frozen networks: the function that was trained, with a bound that their stored numbers prove."""

import dataclasses

import pytest
import torch
from torch import Tensor

from lipnext_scale.certification import Certifier, lipschitz_bound
from lipnext_scale.certification.certifier import gate_bound, measure_layers, norm_bound
from lipnext_scale.checkpoint.exports import load_export, save_export
from lipnext_scale.models import LipNeXt, LipNeXtConfig, freeze
from lipnext_scale.models.layers import FAMILIES

TINY = LipNeXtConfig(3, 20, 8, 2, 1, 4, blocks_per_bank=2)


def perturbed(layer: str, scale: float = 0.3) -> LipNeXt:
    """As after some training: no parameter is at its start."""
    model, generator = LipNeXt(dataclasses.replace(TINY, layer=layer), 0), torch.Generator()
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator.manual_seed(parameter.numel()))
            parameter += scale * noise / parameter.shape[-1] ** 0.5
    return model


def images(count: int = 6) -> Tensor:
    return torch.rand(count, 1, 8, 8, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("layer", FAMILIES)
def test_a_frozen_network_is_the_function_that_was_trained(layer: str, tmp_path) -> None:
    """To float32, also after an export; the rows of the head have no K in them any more."""
    model = perturbed(layer)
    frozen = freeze(model)
    assert freeze(frozen) is frozen
    save_export(model, tmp_path / "x.safetensors")
    with torch.no_grad():
        expected = model(images())
        torch.testing.assert_close(frozen(images()), expected, rtol=0, atol=1e-3)
        assert torch.equal(load_export(tmp_path / "x.safetensors")(images()), frozen(images()))
        assert frozen(images(), with_head=True)[1].norm(dim=1) == pytest.approx(torch.ones(4))


@pytest.mark.parametrize("layer", FAMILIES)
def test_k_bounds_the_stored_network_and_is_tight(layer: str) -> None:
    """Against singular values, mixer by mixer; of gates the bound that they prove."""
    frozen = freeze(perturbed(layer)).double()
    true = 1.0
    for group in frozen.block_groups():
        if group.family is None:
            true *= torch.linalg.matrix_norm(group.bank, 2).prod().item()
        elif layer == "sandwich":
            both = torch.cat([group.free["A"], group.free["B"]], dim=-1)
            true *= torch.linalg.matrix_norm(both, 2).square().prod().item()
        else:
            norms = torch.linalg.matrix_norm(group.free["Q"], 2)
            true *= (2 * norms.square() - 1).clamp_min(1).prod().item()
    bound = lipschitz_bound(frozen)
    assert true <= bound <= true * (1 + 2e-5)
    assert bound <= 1 + 1e-5 or layer == "lip_reg"


@pytest.mark.parametrize("layer", ["cpl", "sandwich"])
def test_gates_are_bounded_by_slopes_that_attain_it(layer: str) -> None:
    """All diagonals 0 ≤ D ≤ 1 of a small mixer, of matrices that are no contractions."""
    generator = torch.Generator().manual_seed(0)
    corners = torch.cartesian_prod(*[torch.tensor([0.0, 1.0])] * 6).double()
    for scale in (0.3, 0.5, 1.0):
        one, two = scale * torch.randn(2, 6, 6, generator=generator, dtype=torch.float64)
        if layer == "cpl":
            jacobians = torch.eye(6) - 2 * one.mT @ (corners[:, :, None] * one)
            bound = gate_bound({"Q": one, "c": one[0]})
        else:
            jacobians = 2 * one.mT @ (corners[:, :, None] * two)
            bound = gate_bound({"A": one, "B": two, "c": one[0]})
        assert torch.linalg.matrix_norm(jacobians, 2).max() <= bound
    if layer == "cpl":  # D = 1 attains 2‖Q‖² - 1, as far as that is above 1
        assert torch.linalg.matrix_norm(jacobians, 2).max() == pytest.approx(bound, rel=1e-5)


@pytest.mark.parametrize("kind", ["contraction", "projection", "equal", "spread", "zero", "wide"])
def test_the_norm_of_any_matrix_is_bounded_tightly(kind: str) -> None:
    generator = torch.Generator().manual_seed(2)
    u, _, v = torch.linalg.svd(torch.randn(30, 30, generator=generator, dtype=torch.float64))
    values = torch.linspace(0.2, 1.4, 30, dtype=torch.float64)
    chosen = {
        "contraction": values / 2,
        "projection": (values > 1).double(),
        "equal": torch.full((30,), 0.7, dtype=torch.float64),
        "zero": values * 0,
    }
    matrix = u @ torch.diag(chosen.get(kind, values)) @ v
    matrix = torch.cat([matrix, matrix], dim=1) if kind == "wide" else matrix
    true = torch.linalg.matrix_norm(matrix, 2).item()
    assert true * (1 - 1e-14) <= norm_bound(matrix) <= true * (1 + 2e-6)


def test_a_network_that_is_not_frozen_is_refused() -> None:
    model = perturbed("cayley")
    with pytest.raises(ValueError, match=r"'cayley'.*freeze\(model\)"):
        Certifier(model)


def test_several_processes_share_the_blocks() -> None:
    frozen = freeze(perturbed("cpl"))
    whole = measure_layers(frozen)
    parts = [measure_layers(frozen, part, 2) for part in range(2)]
    assert whole == [parts[0][0], parts[1][0], parts[0][1]]


def test_manifold_is_bounded_as_before() -> None:
    """By its distance from O(d) alone: a matrix of norm ½ counts as √(1 + ¾)."""
    model = LipNeXt(dataclasses.replace(TINY, depth=1, blocks_per_bank=0), 0).double()
    with torch.no_grad():
        model.groups[0].bank[0, 0] *= 0.5
    assert lipschitz_bound(model) == pytest.approx(1.75**0.5, rel=1e-2)
