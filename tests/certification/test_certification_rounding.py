"""Computed features are within the bound of the exact ones: networks that once broke it.

test_certification_fuzz.py tries many others.
"""

import math
from dataclasses import replace
from fractions import Fraction
from itertools import product

import mpmath
import numpy as np
import pytest
import torch
from exact_network import decimals, exact_features, exact_logits, extended, needs_extended
from test_certification_fuzz import align, draw_matrix, norm

from lipnext_scale.certification import Certifier, lipschitz_bound
from lipnext_scale.certification.certifier import Affine
from lipnext_scale.models import LipNeXt, LipNeXtConfig, freeze

BOTH = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])


def trained_like(config: LipNeXtConfig, seed: int) -> LipNeXt:
    """Random orthogonal matrices, and biases and positions that are not zero."""
    model, generator = LipNeXt(config, seed), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for group in model.block_groups():
            group.bias.normal_(0, 0.3, generator=generator)
            if group.pos is not None:
                group.pos.normal_(0, 0.3, generator=generator)
    return model


def bound_at(model: LipNeXt, images: torch.Tensor) -> np.ndarray:
    n = (images.double() - 0.5).flatten(1).norm(dim=1)
    return Certifier(model).rounding.error.at(n).numpy()


@BOTH
@pytest.mark.parametrize("seed", range(3))
def test_features_against_sixty_digits(dtype: torch.dtype, seed: int) -> None:
    """Digits enough to trust; the fuzz, in 80 bits, prints how tight the bound is."""
    config = LipNeXtConfig(3, 12, 4, 2, 3, 3, shift_ratio=1 / 8)
    model = trained_like(config, seed).to(dtype)
    image = torch.rand(1, 3, 4, 4, generator=torch.Generator().manual_seed(seed)).to(dtype)
    with mpmath.workdps(60), torch.no_grad():
        exact, computed = exact_features(model, image, decimals), decimals(model.features(image))
        error = mpmath.sqrt(((computed - exact) ** 2).sum())
    assert 0 < error <= bound_at(model, image)[0]


def pos_alone(dtype: torch.dtype, width: int) -> tuple[LipNeXt, torch.Tensor]:
    """Every number comes from pos, once for each channel, and every sum rounds downwards."""
    config = LipNeXtConfig(1, width, 16, 2, 1, 2, beta=0, shift_ratio=0)
    model = LipNeXt(config, 0).to(dtype)
    with torch.no_grad():
        model.groups[0].bank.fill_(32 / width)
        align(model)
    return model, torch.full((4, 1, 16, 16), 0.5, dtype=dtype)


@needs_extended
@BOTH
@pytest.mark.parametrize("width", [64, 512])
def test_pos_counts_once_for_every_channel(dtype: torch.dtype, width: int) -> None:
    """Its norm is √C·‖pos‖. Without the root the error was up to 4.6 times the bound."""
    model, images = pos_alone(dtype, width)
    with torch.no_grad():
        error = norm(extended(model.features(images)) - exact_features(model, images))
    assert (error <= bound_at(model, images)).all()


def cancelling(dtype: torch.dtype) -> tuple[LipNeXt, torch.Tensor]:
    """W·(R·x) is what is left of numbers that are 1e6 times larger."""
    model, generator = LipNeXt(LipNeXtConfig(1, 16, 4, 4, 1, 2), 0).to(dtype), torch.Generator()
    with torch.no_grad():
        for matrix, kind in zip(model.groups[0].bank[0], ("null space", "steep"), strict=True):
            matrix.copy_(draw_matrix(kind, 16, None, generator.manual_seed(1)))
    return model, torch.rand(4, 1, 4, 4, generator=generator).to(dtype)


def stored_weights(model: LipNeXt) -> tuple[torch.Tensor, int]:
    """(matrices or kernels [L, 2, …], the terms in a sum)."""
    group = model.block_groups()[0]
    weights = group.bank if group.family is None else next(iter(group.free.values()))
    return weights, model.config.width * weights[0, 0, 0, 0].numel()


def worst_case(model: LipNeXt, byte: int) -> mpmath.mpf:
    """The error of features where every operation rounds upwards by as much as it may.

    For constant, positive weights: then all channels of all tokens are one number.
    """
    config, up = model.config, 1 + mpmath.mpf(torch.finfo(model.head.weight.dtype).eps) / 2
    tokens = (config.image_size // config.patch_size) ** 2
    group = model.block_groups()[0]
    weights, terms = stored_weights(model)

    def features(up: mpmath.mpf) -> mpmath.mpf:
        x = (mpmath.mpf(byte) / 255 * up**2 - 0.5) * up
        for index in range(config.depth):
            rotation, weight = (mpmath.mpf(m.flatten()[0].item()) for m in weights[index])
            x = (x + mpmath.mpf(group.pos[index][0, 0].item())) * up
            x = terms * rotation * x * up**terms
            x = (terms * weight * x + mpmath.mpf(group.bias[index][0].item())) * up ** (terms + 1)
        if model.neck is None:
            return x * mpmath.sqrt(tokens * up**tokens) * up
        for index, matrix in enumerate(model.neck.matrices(model.head.weight.dtype)):
            count = matrix.shape[1]
            bias = mpmath.mpf(model.neck.bias[index - 1][0].item()) if index else 0
            x = (count * mpmath.mpf(matrix[0, 0].item()) * x + bias) * up ** (count + bool(index))
        return x

    return mpmath.sqrt(config.features) * (features(up) - features(mpmath.mpf(1)))


# (depth, width, image, patch, pos, bias): each has another part of the bound that cannot be missed.
WORST = {
    "pixels": (1, 1, 1, 1, 0.0, 0.0),
    "pos": (1, 16, 4, 4, 1e3, 0.0),
    "bias": (1, 16, 4, 4, 0.0, 1e6),
    "pooling": (1, 1, 64, 1, 0.0, 0.0),
    "products": (4, 64, 8, 8, 0.0, 0.0),
    "blocks": (8, 1, 1, 1, 1.0, 0.0),
    "all": (3, 16, 16, 4, 1.0, 1.0),
    "kernels": (3, 4, 8, 2, 1.0, 1.0),
    "full kernels": (3, 4, 8, 2, 0.0, 1e6),
    "neck": (1, 4, 16, 2, 0.0, 0.0),
    "neck, bias": (1, 16, 4, 4, 0.0, 1e6),
}
CONVOLVED = {"kernels": "lip_reg", "full kernels": "cayley"}


@BOTH
@pytest.mark.parametrize("name", WORST)
def test_the_worst_arithmetic_is_within_the_bound(dtype: torch.dtype, name: str) -> None:
    """And takes a good part of it: a term that was forgotten would show."""
    depth, width, side, patch, pos, bias = WORST[name]
    config = LipNeXtConfig(depth, width, side, patch, 1, 2)
    if name in CONVOLVED:
        config = replace(config, layer=CONVOLVED[name], kernel_size=3)
    if name.startswith("neck"):
        config = replace(config, neck="dense", neck_width=16, neck_depth=1)
    model = freeze(LipNeXt(config, 0)).to(dtype)
    with torch.no_grad():
        group = model.groups[0]
        # Of norm 2, whose bound is exact.
        weights, terms = stored_weights(model)
        weights.fill_(2 / terms)
        group.pos.fill_(pos)
        group.bias.fill_(0 if model.neck is not None else bias)
        for matrix in model.neck.matrices(dtype) if model.neck is not None else ():
            matrix.fill_(2 / math.sqrt(matrix.numel()))
            model.neck.bias.fill_(bias)
    image = torch.full((1, 1, side, side), 200 / 255, dtype=torch.float64)
    with mpmath.workdps(60):
        share = float(worst_case(model, 200) / bound_at(model, image)[0])
    assert 0.4 < share <= 1


def worst_gated(model: LipNeXt, byte: int) -> mpmath.mpf:
    """The same of gated mixers, of constant weights whose signs let no error cancel."""
    config, up = model.config, 1 + mpmath.mpf(torch.finfo(model.head.weight.dtype).eps) / 2
    width, tokens = config.width, (config.image_size // config.patch_size) ** 2
    group, (_, terms) = model.block_groups()[0], stored_weights(model)

    def features(up: mpmath.mpf) -> mpmath.mpf:
        x = (mpmath.mpf(byte) / 255 * up**2 - 0.5) * up
        for index, which in product(range(config.depth), (0, 1)):
            made = {
                n: mpmath.mpf(t[index, which].flatten()[0].item()) for n, t in group.free.items()
            }
            inner, outer = (made["Q"], made["Q"]) if "Q" in made else (made["B"], made["A"])
            inside = (terms * inner * x + made["c"]) * up ** (terms + 1)
            assert inside > 0
            y = 2 * terms * outer * inside * up**terms
            x = (x - y) * up if "Q" in made else y
            if which:
                x = (x + mpmath.mpf(group.bias[index][0].item())) * up
        return x * mpmath.sqrt(tokens * up**tokens) * up

    return mpmath.sqrt(width) * abs(features(up) - features(mpmath.mpf(1)))


# (layer, depth, width, image, patch, c, bias)
WORST_GATED = {
    "products": ("cpl", 2, 64, 8, 8, 0.0, 0.0),
    "inner bias": ("cpl", 1, 16, 4, 4, 1e6, 0.0),
    "bias": ("cpl", 1, 1, 4, 1, 0.0, 1e6),
    "difference": ("cpl", 4, 1, 1, 1, 0.0, 0.0),
    "kernels": ("cpl", 2, 4, 8, 2, 0.0, 0.0),
    "kernels, inner bias": ("cpl", 1, 4, 8, 2, 1e6, 0.0),
    "sandwich": ("sandwich", 2, 64, 8, 8, 0.0, 0.0),
    "sandwich, inner bias": ("sandwich", 1, 16, 4, 4, 1e6, 0.0),
}


@BOTH
@pytest.mark.parametrize("name", WORST_GATED)
def test_the_worst_arithmetic_of_gates_is_within_the_bound(dtype: torch.dtype, name: str) -> None:
    layer, depth, width, side, patch, inner_bias, bias = WORST_GATED[name]
    config = LipNeXtConfig(depth, width, side, patch, 1, 2, layer=layer, positional_embedding=False)
    config = replace(config, kernel_size=3 if name.startswith("kernels") else 1)
    model = freeze(LipNeXt(config, 0)).to(dtype)
    with torch.no_grad():
        group, (_, terms) = model.groups[0], stored_weights(model)
        for key, tensor in group.free.items():
            tensor.fill_(inner_bias if key == "c" else 2 / terms)
        if layer == "cpl":  # x - 2·4·x is negative, and the second mixer must see that
            group.free["Q"][:, 1] *= -1
        group.bias.fill_(bias)
    image = torch.full((1, 1, side, side), 200 / 255, dtype=torch.float64)
    with mpmath.workdps(60):
        share = float(worst_gated(model, 200) / bound_at(model, image)[0])
    assert 0.4 < share <= 1


def test_every_byte_through_a_network_of_one_number() -> None:
    """Nothing but the rounding of pixels, to which the bound is closest here."""
    for dtype in (torch.float32, torch.float64):
        config = LipNeXtConfig(1, 1, 1, 1, 1, 2)
        model = LipNeXt(config, 0).to(dtype)
        with torch.no_grad():
            model.groups[0].bank.fill_(1)
            pixels = torch.arange(256, dtype=torch.uint8).view(-1, 1, 1, 1)
            computed = model.features(pixels.to(dtype) / 255).flatten().tolist()
        bound = Certifier(model).rounding.error
        for byte, value in enumerate(computed):
            n = abs(Fraction(byte, 255) - Fraction(1, 2))
            error = abs(Fraction(value) - n)
            assert error <= Fraction(bound.at(torch.tensor(float(n))).item())


def test_both_ends_of_a_radius_lose_their_rounding() -> None:
    """r·K + E(n) + E(n + r) is at most the computed margin over d, whatever E is."""
    model = LipNeXt(LipNeXtConfig(2, 16, 8, 2, 1, 5), 0).double()
    images = torch.rand(20, 1, 8, 8, dtype=torch.float64)
    certifier = Certifier(model)
    n = (images - 0.5).flatten(1).norm(dim=1)
    for offset, slope in ((0.0, 0.0), (1e-3, 0.0), (0.0, 1e-3), (1e-3, 1e-2)):
        certifier.rounding = replace(certifier.rounding, error=Affine(offset, slope))
        labels, radii = certifier(images)
        logits, rows = model(images), model.head.rows()
        for i, (label, radius) in enumerate(zip(labels.tolist(), radii.tolist(), strict=True)):
            if radius == 0:
                continue
            for j in set(range(5)) - {label}:
                apart = (rows[label] - rows[j]).norm()
                spent = (
                    certifier.lipschitz_bound * radius + 2 * offset + slope * (2 * n[i] + radius)
                )
                assert apart * spent <= logits[i, label] - logits[i, j]
    assert (radii > 0).any()


def put_boundary_into_the_error(model: LipNeXt, images: torch.Tensor) -> None:
    """A head of two classes that separates the computed features from the exact ones."""
    with torch.no_grad():
        computed = extended(model.features(images))[0]
        apart = computed - exact_features(model, images)[0]
        distance = np.sqrt((apart * apart).sum())
        row = apart / distance if distance else np.ones_like(apart) / len(apart) ** 0.5
        row = torch.from_numpy(row.astype(np.float64))
        model.head.weight.copy_(torch.stack([row, -row]))
        # All but a hundredth of the error lies on this side of the boundary.
        middle = float(computed @ row.numpy() - 0.99 * distance)
        model.head.bias.copy_(torch.tensor([-middle, middle], dtype=torch.float64))


@needs_extended
@pytest.mark.parametrize(
    "make", [lambda: pos_alone(torch.float32, 128), lambda: cancelling(torch.float64)]
)
def test_a_label_that_rounding_made_is_not_certified(make) -> None:
    """The exact label is another than the computed one: any radius would be wrong.

    With kernels that sum otherwise there may be no error to put a boundary into.
    """
    model, images = make()
    put_boundary_into_the_error(model, images)
    labels, radii = Certifier(model)(images)
    exact = exact_logits(model, images).argmax(axis=1)
    assert (radii.numpy()[labels.numpy() != exact] == 0).all()


@needs_extended
@BOTH
def test_another_machine_may_sum_in_another_order(dtype: torch.dtype) -> None:
    """The channels between R and W in another order: as exact, and within the bound too."""
    model, images = cancelling(dtype)
    order = torch.randperm(16, generator=torch.Generator().manual_seed(0))
    rotation, weight = model.groups[0].bank[0].detach()
    elsewhere = LipNeXt(LipNeXtConfig(1, 16, 4, 4, 1, 2)).to(dtype)
    with torch.no_grad():
        elsewhere.groups[0].bank.copy_(torch.stack([rotation[order], weight[:, order]]))
        computed = extended(elsewhere.features(images))
    assert (norm(computed - exact_features(model, images)) <= bound_at(model, images)).all()


def test_nothing_is_certified_where_numbers_might_overflow() -> None:
    """Finite at the image, infinite inside the radius that the margin alone would give.

    In float64 K overflows before that, and nothing is certified at all.
    """
    model = LipNeXt(LipNeXtConfig(1, 16, 8, 4, 1, 2), 0)
    limit = torch.finfo(torch.float32).max ** 0.5
    image = torch.full((1, 1, 8, 8), 0.5)
    image[0, 0, 0, 0] += 0.5
    with torch.no_grad():
        model.groups[0].bank[0, 1] *= limit
        model.head.weight.copy_(torch.eye(2, 16))
        model.head.bias.copy_(torch.tensor([limit * 4, 0]))
        assert model.features(image).isfinite().all()
        far = 0.5 + 4 * (image - 0.5)
        assert not model.features(far).isfinite().all()
    _, radii = Certifier(model)(image)
    without_rounding = 4 / lipschitz_bound(model) * limit / 2**0.5
    assert without_rounding > (far - image).norm() and radii.item() == 0


def test_the_certified_label_is_that_of_the_program_in_its_own_type() -> None:
    """A float32 head loses a margin of 3e-4 beside 1e4; a float64 head would certify it."""
    model = LipNeXt(LipNeXtConfig(1, 16, 4, 4, 1, 2), 0)
    images = torch.rand(8, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        features = model.features(images)
        model.head.bias.copy_(torch.tensor([1e4, 1e4]))
        row = features[0] / features[0].norm()
        model.head.weight.copy_(torch.stack([row, row + 3e-4 * row.roll(1)]))
        labels, radii = Certifier(model)(images)
        double = LipNeXt(model.config).double()
        double.load_state_dict(model.state_dict())
        assert torch.equal(labels, model(images).argmax(1))
        apart = labels != double(images.double()).argmax(1)
    assert apart.any() and (radii == 0).all()
