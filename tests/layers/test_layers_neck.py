"""LiResNet's neck and head: a dense way from tokens to features, and rows of any length."""

from dataclasses import replace

import pytest
import torch
from layers.test_layers_certificate import TINY, images
from layers.test_layers_runs import recipe
from training.small import final_state

from lipnext_scale.attacks import Attacker, AttackSettings, hunt
from lipnext_scale.certification import Certifier, lipschitz_bound
from lipnext_scale.checkpoint.exports import load_export, save_export
from lipnext_scale.data import read_samples
from lipnext_scale.models import LipNeXt, freeze
from lipnext_scale.models.layers.cholesky import orthogonalised, orthogonalised_reference
from lipnext_scale.training.trainer import Trainer
from lipnext_scale.utils.config import ConfigError

DENSE = replace(TINY, neck="dense", neck_width=10, neck_depth=2, head="free")
NETWORKS = {
    "lipnext": ["model.neck=dense", "model.neck_width=32"],
    "liresnet": [
        *["model.layer=lip_reg", "model.kernel_size=3", "model.patch_size=2", "model.width=16"],
        *["model.neck=dense", "model.neck_width=16", "model.neck_depth=1", "model.head=free"],
    ],
}


def perturbed() -> LipNeXt:
    model = LipNeXt(DENSE, 0)
    with torch.no_grad():
        for parameter in model.neck.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=torch.Generator())
        model.head.weight *= torch.tensor([[0.1], [3.0], [20.0], [0.0]])
    return model


def test_rows_of_all_matrices_are_orthonormal() -> None:
    """Whatever the free parameters are."""
    neck = perturbed().double().neck
    shapes = [tuple(matrix.shape) for matrix in neck.matrices(torch.float64)]
    assert shapes == [(20, 320), (10, 20), (10, 10), (10, 10)]
    for matrix in neck.matrices(torch.float64):
        eye = torch.eye(len(matrix), dtype=torch.float64)
        torch.testing.assert_close(matrix @ matrix.mT, eye, rtol=0, atol=1e-9)


def test_gradients_are_those_of_finite_differences() -> None:
    neck = perturbed().double().neck
    x = torch.randn(2, 4, 4, 20, generator=torch.Generator(), dtype=torch.float64)
    names, values = zip(*neck.named_parameters(), strict=True)
    made = tuple(value.detach().clone().requires_grad_() for value in values)

    def function(*parameters):
        return torch.func.functional_call(neck, dict(zip(names, parameters, strict=True)), (x,))

    assert torch.autograd.gradcheck(function, made, fast_mode=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_wide_matrices_are_as_the_reference_makes_them(dtype: torch.dtype) -> None:
    """Values and gradients; A's condition is 10, so the reference's error is ~100 roundings."""
    generator = torch.Generator().manual_seed(0)
    q, _ = torch.linalg.qr(torch.randn(48, 12, generator=generator, dtype=torch.float64))
    a = (torch.logspace(0, -1, 12, dtype=torch.float64)[:, None] * q.mT).to(dtype)
    weight = torch.randn(12, 48, generator=generator, dtype=torch.float64).to(dtype)
    found = []
    for function in (orthogonalised, orthogonalised_reference):
        free = a.clone().requires_grad_()
        made = function(free)
        (made * weight).sum().backward()
        found += [made.detach(), free.grad]
    bound = 1e4 * torch.finfo(dtype).eps
    torch.testing.assert_close(found[0], found[2], rtol=0, atol=bound)
    torch.testing.assert_close(found[1], found[3], rtol=0, atol=bound * found[3].abs().max())


def test_a_frozen_one_is_the_same_function(tmp_path) -> None:
    model = perturbed()
    frozen = freeze(model)
    assert freeze(frozen) is frozen
    save_export(model, tmp_path / "x.safetensors")
    with torch.no_grad():
        torch.testing.assert_close(frozen(images()), model(images()), rtol=1e-3, atol=1e-3)
        assert torch.equal(load_export(tmp_path / "x.safetensors")(images()), frozen(images()))
    with pytest.raises(ValueError, match=r"neck 'dense'.*freeze\(model\)"):
        Certifier(model)


def test_k_is_the_product_of_all_norms() -> None:
    frozen = freeze(perturbed()).double()
    with torch.no_grad():
        frozen.neck.squares *= 1.5
        frozen.neck.dense[1] *= 2.0
    assert lipschitz_bound(frozen) == pytest.approx(3.0, rel=1e-4)
    assert lipschitz_bound(frozen) >= 3.0


def test_radii_do_not_change_with_the_length_of_free_rows() -> None:
    """All rows and biases twice as long: the same function, scaled."""
    frozen = freeze(perturbed()).double()
    labels, radii = Certifier(frozen)(images().double())
    with torch.no_grad():
        frozen.head.weight *= 2
        frozen.head.bias *= 2
    again = Certifier(frozen)(images().double())
    assert torch.equal(again[0], labels)
    torch.testing.assert_close(again[1], radii, rtol=1e-9, atol=0)
    assert (radii > 0).all()


@pytest.mark.parametrize("name", NETWORKS)
def test_it_learns_and_keeps_its_certificate(name: str, tmp_path) -> None:
    Trainer(recipe(tmp_path, *NETWORKS[name])).run()
    certifier = Certifier.load(tmp_path)
    samples = read_samples("builtin:digits/test-*.tar.gz", "data.test")
    labels, radii = certifier(samples.images)
    assert ((labels == samples.labels) & (radii > 0.1)).double().mean() > 0.5
    attacker = Attacker(certifier, AttackSettings(restarts=1, steps=10))
    targets = attacker.targets(samples.images[:60], torch.arange(60))
    assert not any(len(points.labels) for points in hunt(attacker, targets))
    beyond = attacker.attack("pgd", 0, targets, 8 * targets.radii, clip=False)
    assert beyond.changed.double().mean() > 0.5


def test_a_stopped_run_continues(tmp_path) -> None:
    overrides = [*NETWORKS["liresnet"], "optim.epochs=2"]
    Trainer(recipe(tmp_path / "whole", *overrides)).run()
    for last in (17, 44):
        Trainer(recipe(tmp_path / "halves", *overrides, f"run.max_steps={last}")).run()
    whole, halves = (final_state(tmp_path / name) for name in ("whole", "halves"))
    assert {"model.neck.dense", "slow.neck.squares", "exp_avg.neck.bias"} <= whole.keys()
    for key, value in whole.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(halves[key], value), key


def test_what_does_not_fit_is_refused(tmp_path) -> None:
    with pytest.raises(ConfigError, match=r"model\.neck_width = 33: must be 1 to 32 for 2×2 tok"):
        recipe(tmp_path, "model.neck=dense", "model.neck_width=33")
    with pytest.raises(ConfigError, match=r"model\.neck = 'pool': must be one of l2_pool, dense"):
        recipe(tmp_path, "model.neck=pool")
    with pytest.raises(ConfigError, match=r"model\.head = 'long': must be one of unit, free"):
        recipe(tmp_path, "model.head=long")
    with pytest.raises(ConfigError, match=r"deepspeed.*needs model\.neck = 'l2_pool'"):
        recipe(tmp_path, "model.neck=dense", "model.neck_width=8", "parallel.engine=deepspeed")
