"""Computed features are as near to the exact ones as the bound says, in every arithmetic."""

import mpmath
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lipnext_scale.certify import Certifier
from lipnext_scale.certify.layers import measure_blocks
from lipnext_scale.certify.rounding import Affine, feature_rounding
from lipnext_scale.models import LipNeXt, LipNeXtConfig


def trained_like(config: LipNeXtConfig, seed: int) -> LipNeXt:
    """Random orthogonal matrices, and biases and positions that are not zero."""
    model, generator = LipNeXt(config, seed), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for group in model.block_groups():
            group.bias.normal_(0, 0.3, generator=generator)
            if group.pos is not None:
                group.pos.normal_(0, 0.3, generator=generator)
    return model


def bound_of(model: LipNeXt) -> Affine:
    blocks = measure_blocks(model)
    dtype = model.head.weight.dtype
    return feature_rounding([blocks[i] for i in range(len(blocks))], model.config, dtype)


@settings(max_examples=60, deadline=None)
@given(
    depth=st.integers(1, 6),
    width=st.integers(12, 48),
    seed=st.integers(0, 2**31),
    scale=st.sampled_from([0.0, 1e-30, 1e-3, 1.0, 10.0]),
    parametrisation=st.sampled_from(["product", "merged"]),
)
def test_single_precision_is_within_its_bound(depth, width, seed, scale, parametrisation) -> None:
    """float32 against float64, whose own error is nine digits further down."""
    config = LipNeXtConfig(depth, width, 8, 2, 3, 5, parametrisation=parametrisation)
    model = trained_like(config, seed)
    generator = torch.Generator().manual_seed(seed)
    images = 0.5 + scale * torch.randn(4, 3, 8, 8, generator=generator)
    bound = bound_of(model).at((images.double() - 0.5).flatten(1).norm(dim=1))
    with torch.no_grad():
        single = model.features(images).double()
        # The certified function has W as the forward pass computes it.
        matrices = [matrix for group in model.block_groups() for matrix in group.layers()]
        exact = LipNeXt(LipNeXtConfig(depth, width, 8, 2, 3, 5, parametrisation="merged")).double()
        for target, source in zip(exact.block_groups(), model.block_groups(), strict=True):
            for index, (rotation, weight) in enumerate(matrices):
                target.bank[2 * index], target.bank[2 * index + 1] = rotation, weight
            target.bias.copy_(source.bias)
            target.pos.copy_(source.pos)
        error = (single - exact.features(images.double())).norm(dim=1)
    assert (error <= bound).all()


def features_with_digits(model: LipNeXt, image: torch.Tensor) -> list[mpmath.mpf]:
    """The network on one image in 60 decimal digits, written out."""
    config, side = model.config, model.config.image_size // model.config.patch_size
    (group,) = model.block_groups()
    patch, width = config.patch_size, config.width
    state = {}
    for row in range(side):
        for column in range(side):
            pixels = [
                mpmath.mpf(image[c, row * patch + i, column * patch + j].item()) - mpmath.mpf("0.5")
                for c in range(config.in_channels)
                for i in range(patch)
                for j in range(patch)
            ]
            state[row, column] = pixels + [mpmath.mpf(0)] * (width - len(pixels))
    count = int(width * config.beta)
    for index, (rotation, weight) in enumerate(group.layers()):
        # shift_ratio is 0 in this test: a shift moves numbers and rounds nothing.
        for place, vector in state.items():
            pos = mpmath.mpf(group.pos[index][place].item())
            mixed = times(rotation, [value + pos for value in vector])
            biases = group.bias[index].tolist()
            out = [
                value + mpmath.mpf(b) for value, b in zip(times(weight, mixed), biases, strict=True)
            ]
            state[place] = [abs(v) if i < count else v for i, v in enumerate(out)]
    return [mpmath.sqrt(sum(v[c] ** 2 for v in state.values())) for c in range(width)]


def times(matrix: torch.Tensor, vector: list[mpmath.mpf]) -> list[mpmath.mpf]:
    return [
        sum(mpmath.mpf(entry) * value for entry, value in zip(row, vector, strict=True))
        for row in matrix.tolist()
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("seed", range(3))
def test_features_against_sixty_digits(dtype: torch.dtype, seed: int) -> None:
    """Within the bound, and the bound is within three orders of magnitude of what is found."""
    config = LipNeXtConfig(3, 12, 4, 2, 3, 3, shift_ratio=0.0, parametrisation="merged")
    model = trained_like(config, seed).to(dtype)
    image = torch.rand(1, 3, 4, 4, generator=torch.Generator().manual_seed(seed), dtype=dtype)
    with mpmath.workdps(60):
        exact = features_with_digits(model, image[0])
        with torch.no_grad():
            computed = model.features(image)[0].tolist()
        error = mpmath.sqrt(
            sum((mpmath.mpf(c) - e) ** 2 for c, e in zip(computed, exact, strict=True))
        )
    bound = bound_of(model).at((image.double() - 0.5).norm()).item()
    assert 0 < error <= bound < 1000 * error


def test_the_bound_is_small_in_double_precision_and_grows_with_the_width() -> None:
    """Far below any radius that is reported."""
    small, large = (
        bound_of(trained_like(LipNeXtConfig(8, w, 8, 2), 0).double()) for w in (16, 256)
    )
    assert 0 < small.at(torch.tensor(5.0)) < large.at(torch.tensor(5.0)) < 1e-9


def test_rounding_shrinks_radii_and_never_widens_them() -> None:
    """In single precision visibly; where the margin is below the rounding nothing is certified."""
    config = LipNeXtConfig(6, 48, 8, 2, 3, 5)
    model = trained_like(config, 0)
    images = torch.rand(200, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    single, double = Certifier(model), Certifier(trained_like(config, 0).double())
    _, loose = double(images)
    _, tight = single(images)
    assert (tight <= loose).all() and (tight < loose)[loose > 0].all()
    assert 0 < single.feature_rounding() < 0.1
    lost = 2 * single.feature_rounding()
    assert (tight[loose < 0.1 * lost] == 0).all() and ((loose - tight) < 1.2 * lost + 1e-5).all()
