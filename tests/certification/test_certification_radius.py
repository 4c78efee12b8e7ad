"""Certified radii: the formula, its edge cases, what is refused, and the figures."""

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lipnext_scale.certification import Certifier, certified_radii
from lipnext_scale.certification.certificate import SampleResults, wilson_interval
from lipnext_scale.certification.certifier import FURTHEST
from lipnext_scale.models import LipNeXt, LipNeXtConfig
from lipnext_scale.utils.errors import UserError


def small_model(seed: int = 0) -> LipNeXt:
    return LipNeXt(LipNeXtConfig(2, 16, 8, 2, 1, 5), seed=seed).double()


def test_radii_follow_the_formula_class_by_class() -> None:
    """min over the other classes of the margin over K·‖w_top - w_j‖."""
    model, images = small_model(), torch.rand(20, 1, 8, 8, dtype=torch.float64)
    labels, radii = certified_radii(model, images, lipschitz=1.25)
    logits, rows = model(images), model.head.rows()
    for logit, label, radius in zip(logits, labels, radii, strict=True):
        assert label == logit.argmax()
        expected = min(
            ((logit[label] - logit[j]) / (1.25 * (rows[label] - rows[j]).norm())).item()
            for j in range(5)
            if j != label
        )
        assert abs(radius.item() - expected) < 1e-10


def test_classes_with_the_same_row() -> None:
    """Equal logits certify nothing; a lower bias never overtakes: the largest radius."""
    model, images = small_model(), torch.rand(4, 1, 8, 8, dtype=torch.float64)
    with torch.no_grad():
        model.head.weight[1:] = model.head.weight[0]
        assert (certified_radii(model, images)[1] == 0).all()
        model.head.bias[0] = 1.0
    labels, radii = certified_radii(model, images)
    assert (labels == 0).all() and (radii > 0.99 * FURTHEST).all()


def test_bytes_are_pixels_of_255_and_single_precision_is_widened() -> None:
    """Both exactly; a Certifier gives what the function gives."""
    model = small_model()
    images = torch.randint(0, 256, (23, 1, 8, 8), dtype=torch.uint8)
    single = torch.rand(3, 1, 8, 8)
    for taken, exact in ((images, images.double() / 255), (single, single.double())):
        labels, radii = Certifier(model)(taken)
        expected_labels, expected = certified_radii(model, exact)
        assert torch.equal(labels, expected_labels) and torch.equal(radii, expected)


def test_certified_accuracy_counts_what_is_right_and_far_enough() -> None:
    results = SampleResults(
        np.array([0, 1, 2, 0]), np.array([0, 1, 2, 3]), np.array([0.5, 0.2, 0.1, 9.0])
    )
    assert [results.share(e) for e in (0.0, 0.1, 0.2, 0.3, 0.6)] == [0.75, 0.75, 0.5, 0.25, 0.0]


@settings(deadline=None)
@given(total=st.integers(1, 50_000), share=st.floats(0, 1))
def test_the_interval_is_around_the_share_and_shrinks_with_its_root(total, share) -> None:
    """And 81 of 263 have the interval of the literature, 0.2553 to 0.3662 (Newcombe 1998)."""
    hits = round(share * total)
    low, high = wilson_interval(hits, total)
    assert 0 <= low <= hits / total <= high <= 1 and 0 < high - low < 2.2 / total**0.5
    assert wilson_interval(81, 263) == pytest.approx((0.2553, 0.3662), abs=1e-4)


def test_bfloat16_is_not_certified() -> None:
    """Weights in bfloat16 and groups that cast to it are refused; autocast changes nothing."""
    model, images = LipNeXt(LipNeXtConfig(2, 16, 8, 2, 1, 5), seed=0), torch.rand(4, 1, 8, 8)
    certifier = Certifier(model)
    labels, radii = certifier(images)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        under_autocast = certifier(images)
    assert torch.equal(under_autocast[0], labels) and torch.equal(under_autocast[1], radii)
    model.groups[0].compute_dtype = torch.bfloat16
    for attempt in (lambda: Certifier(model), lambda: certifier(images)):
        with pytest.raises(ValueError, match="bfloat16"):
            attempt()
    model.groups[0].compute_dtype = None
    spec = model.groups[0].spec
    model.groups[0].spec = replace(spec, activation="gelu")
    with pytest.raises(ValueError, match="'gelu' has no proven"):
        Certifier(model)
    model.groups[0].spec = spec
    with pytest.raises(ValueError, match="bfloat16"):
        certified_radii(model.bfloat16(), images.bfloat16(), lipschitz=1.0)


CHANGES: dict[str, Callable[[LipNeXt], object]] = {
    "scaled": lambda model: model.groups[0].bank[0, 1].mul_(2),
    "scaled behind torch's back": lambda model: model.groups[0].bank.data[0, 1].mul_(2),
    "signs": lambda model: model.groups[0].bank.data[0, 0].abs_(),
    "swapped": lambda model: model.head.weight.data.copy_(model.head.weight.data.flip(0)),
    "another function": lambda model: setattr(
        model.groups[0], "spec", replace(model.groups[0].spec, padding="zero")
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", CHANGES)
def test_a_model_that_changes_after_k_was_computed_is_noticed(
    name: str, dtype: torch.dtype
) -> None:
    """K, rounding and head would be those of the old weights."""
    model, images = small_model().to(dtype), torch.rand(2, 1, 8, 8).to(dtype)
    certifier = Certifier(model)
    certifier(images)
    with torch.no_grad():
        CHANGES[name](model)
    with pytest.raises(ValueError, match="have changed"):
        certifier(images)
    Certifier(model)(images)


def test_hooks_are_refused() -> None:
    """They would change `model(x)`, or what is certified, and K would not know."""
    for place in (lambda m: m, lambda m: m.groups[0], lambda m: m.head):
        model = small_model()
        certifier = Certifier(model)
        place(model).register_forward_pre_hook(lambda module, inputs: (2 * inputs[0],))
        for attempt in (lambda: Certifier(model), lambda: certifier(torch.rand(2, 1, 8, 8))):  # noqa: B023
            with pytest.raises(ValueError, match="hooks"):
                attempt()


REDUCED = [
    "torch.set_float32_matmul_precision('medium')",
    "torch.set_float32_matmul_precision('high')",
    "torch.backends.mkldnn.matmul.fp32_precision = 'bf16'",
    "torch.backends.fp32_precision = 'tf32'",
]


@pytest.mark.slow
def test_reduced_products_are_refused_however_they_were_asked_for() -> None:
    """For float32; float64 has no such products. A process each: torch forgets nothing."""
    program = """
import sys, torch
from lipnext_scale.certification import Certifier
from lipnext_scale.models import LipNeXt, LipNeXtConfig
for line in sys.argv[1:]:
    if __import__("os").fork() == 0:
        exec(line)
        model = LipNeXt(LipNeXtConfig(1, 16, 8, 2, 1, 5), seed=0)
        Certifier(model.double())
        try:
            Certifier(model.float())
            print("taken", flush=True)
        except ValueError as error:
            print(error, flush=True)
        __import__("os")._exit(0)
    __import__("os").wait()
"""
    lines = ["pass", "torch.backends.cuda.matmul.fp32_precision = 'tf32'", *REDUCED]
    done = subprocess.run(
        [sys.executable, "-c", program, *lines], capture_output=True, text=True, check=True
    )
    plain, of_gpus, *refused = done.stdout.splitlines()
    assert plain == of_gpus == "taken", done.stdout  # this is a CPU
    assert len(refused) == len(REDUCED)
    assert all("full float32 products" in line for line in refused), refused


def test_head_rows_that_cannot_be_normalised_are_refused() -> None:
    """In float32 the square of 1e30 is infinite; below 1e-12 F.normalize does not normalise."""
    for norm, dtype in ((1e30, torch.float32), (1e-20, torch.float32), (1e-170, torch.float64)):
        model = small_model().to(dtype)
        with torch.no_grad():
            model.head.weight[3] = norm  # the squares of the last are 0
        with pytest.raises(UserError, match=r"head.weight: row 3 has norm"):
            Certifier(model)


@pytest.mark.parametrize(
    ("images", "said"),
    [
        (torch.rand(2, 1, 8, 8) * 255, "this model takes"),
        (torch.full((2, 1, 8, 8), float("nan")), "nan"),
        (torch.randint(0, 255, (2, 1, 8, 8)), "int64"),
        (torch.rand(2, 1, 9, 9), r"\[N, 1, 8, 8\]"),
        (torch.rand(0, 1, 8, 8), "there are none"),
        (torch.rand(2, 1, 8, 8).double(), "float64"),
    ],
)
def test_images_that_would_mean_something_else_are_refused(images: torch.Tensor, said: str) -> None:
    """Pixels up to 255, not finite, of another type, size or precision: each by its name."""
    model = LipNeXt(LipNeXtConfig(2, 16, 8, 2, 1, 5), seed=0)
    with pytest.raises(ValueError, match=said):
        certified_radii(model, images)
