"""The paper's figures: transcribed exactly, chosen by the shape of the data, set beside a run."""

from typing import Any

import numpy as np
import pytest

from lipnext_scale.certify.certificate import SampleResults
from lipnext_scale.certify.paper import (
    PaperRow,
    comparison_table,
    comparison_text,
    rows_for,
    short_count,
)

RADII = (36 / 255, 72 / 255, 108 / 255)


def facts_of(num_classes: int, image_size: int, **more: Any) -> dict[str, Any]:
    return {
        "certified": True,
        "model": {
            "parameters": 67_239_434,
            "architecture": {"num_classes": num_classes, "image_size": image_size, **more},
        },
        "clean_accuracy": 0.5125,
        "certified_accuracy": {repr(36 / 255): 0.4321, "0.5": 0.1},
    }


@pytest.mark.parametrize(
    ("shape", "name", "extra", "size", "figures"),
    [
        ((10, 32), "AOL Large", False, "136M", (0.716, 0.640, 0.564, 0.490)),
        ((10, 32), "LipNeXt L32W1024", False, "64M", (0.815, 0.712, 0.592, 0.459)),
        ((10, 32), "LipNeXt L32W2048", False, "256M", (0.850, 0.732, 0.588, 0.433)),
        ((10, 32), "LipNeXt L32W2048", True, "256M", (0.882, 0.792, 0.680, 0.549)),
        ((10, 32), "LipNeXt L32W2896", True, "512M", (0.927, 0.817, 0.686, 0.558)),
        ((100, 32), "Sandwich", False, "26M", (0.463, 0.353, 0.263, 0.203)),
        ((100, 32), "LipNeXt L32W2048", False, "256M", (0.574, 0.441, 0.319, 0.222)),
        ((100, 32), "LipNeXt L32W2896", True, "512M", (0.636, 0.552, 0.392, 0.283)),
        ((200, 64), "SLL X-Large", False, "1.1B", (0.321, 0.232, 0.168, 0.120)),
        ((200, 64), "LiResNet", False, "83M", (0.409, 0.262, 0.157, 0.089)),
        ((200, 64), "LipNeXt L32W2048", False, "256M", (0.455, 0.350, 0.259, 0.180)),
    ],
)
def test_rows_are_those_of_the_paper(
    shape: tuple[int, int], name: str, extra: bool, size: str, figures: tuple[float, ...]
) -> None:
    """Clean and at 36/255, 72/255, 108/255, as the tables print them."""
    clean, *certified = figures
    of = "LipNeXt" if name.startswith("LipNeXt") else "prior work"
    row = PaperRow(name, size, extra, clean, dict(zip(RADII, certified, strict=True)), of)
    assert row in (rows_for(*shape) or [])


def test_imagenet_has_a_row_for_each_of_its_two_models() -> None:
    """One for ε = 1 and one for 36/255; "-" is None."""
    rows = rows_for(1000, 224)
    assert rows is not None
    for clean, certified in ((0.410, {1.0: 0.224}), (0.570, {36 / 255: 0.412})):
        assert PaperRow("LipNeXt L32W5792", "2B", False, clean, certified, "LipNeXt") in rows
    assert PaperRow("BRONet", "86M", True, None, {1.0: None}, "prior work") in rows


@pytest.mark.parametrize(
    ("shape", "count"),
    [((10, 32), 19), ((100, 32), 20), ((200, 64), 6), ((1000, 64), 12), ((1000, 256), 12)],
)
def test_the_shape_chooses_the_data_set(shape: tuple[int, int], count: int) -> None:
    """As many rows as the tables have."""
    assert len(rows_for(*shape) or []) == count


@pytest.mark.parametrize("shape", [(10, 8), (10, 28), (2, 32), (1000, 32), (200, 32)])
def test_other_shapes_have_nothing_to_compare_with(shape: tuple[int, int]) -> None:
    """No rows, no table, no text."""
    assert rows_for(*shape) is None
    assert comparison_table(facts_of(*shape)) == [] and comparison_text(facts_of(*shape)) == ""


def test_grey_images_are_of_no_data_set_of_the_paper() -> None:
    """Ten classes of 32 × 32 digits are not CIFAR-10; a certificate without a shape is nothing."""
    assert comparison_text(facts_of(10, 32, in_channels=3))
    assert comparison_text(facts_of(10, 32, in_channels=1)) == ""
    assert comparison_text({"clean_accuracy": 0.5, "certified_accuracy": {}}) == ""


def test_the_run_comes_first_and_rows_without_a_figure_are_left_out() -> None:
    """Radii that the certificate does not list come from the samples, or stay open."""
    rows = comparison_table(facts_of(1000, 224))
    assert rows[0] == PaperRow(
        "this run", "67M", None, 0.5125, {36 / 255: 0.4321, 1.0: None}, "this run"
    )
    assert all(row.clean is not None for row in rows) and len(rows) == 1 + 9
    results = SampleResults(np.zeros(4), np.array([0, 0, 1, 0]), np.array([2.0, 0.1, 2.0, 1.0]))
    assert comparison_table(facts_of(1000, 224), results)[0].certified[1.0] == 0.5


def test_a_run_that_is_no_certificate_says_so_beside_the_paper() -> None:
    """Nobody takes its line for a certified one."""
    facts = facts_of(10, 32) | {"certified": False}
    assert "this run (not a certificate)" in comparison_text(facts)


def test_the_text_has_columns_and_names_its_source() -> None:
    """A line for each row under one of heads; all equally long, and the last ends the line."""
    title, *lines = comparison_text(facts_of(10, 32)).splitlines()
    assert "CIFAR-10" in title and "ICLR 2026" in title and "not measured here" in title
    assert len({len(line) for line in lines}) == 1 and len(lines) == 1 + 1 + 19
    assert lines[0].split() == ["size", "extra", "data", "clean", "36/255", "72/255", "108/255"]
    assert lines[1].split() == ["this", "run", "67M", "-", "51.2%", "43.2%", "-", "-"]
    assert comparison_text(facts_of(10, 32)).endswith("\n")


@pytest.mark.parametrize(
    ("number", "short"),
    [(12, "12"), (1_500, "1.5k"), (999_700, "1.0M"), (67_239_434, "67M"), (1_090_000_000, "1.1B")],
)
def test_sizes_are_given_as_the_paper_gives_them(number: int, short: str) -> None:
    """Never a thousand of a unit."""
    assert short_count(number) == short
