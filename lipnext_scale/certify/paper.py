"""Figures of the LipNeXt paper (ICLR 2026), to set a run beside: none was measured with this code.

Transcribed from its tables: clean and certified accuracy on CIFAR-10, CIFAR-100 and Tiny-ImageNet,
the same with diffusion-generated data, and ImageNet. A name, a size and percentages, as printed
there; "-" where the table has no figure.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from lipnext_scale.certify.certificate import SampleResults, radius_name

SOURCE = "LipNeXt, ICLR 2026"
SMALL_RADII = (36 / 255, 72 / 255, 108 / 255)
Of = Literal["this run", "LipNeXt", "prior work"]

_CIFAR_10 = """
Cayley Large     | 21M  | 74.6 61.4 46.4 32.1
SOC-20           | 27M  | 76.3 62.6 48.7 36.0
LOT-20           | 18M  | 77.1 64.3 49.5 36.3
CPL XL           | 236M | 78.5 64.4 48.0 33.0
AOL Large        | 136M | 71.6 64.0 56.4 49.0
SLL X-Large      | 236M | 73.3 64.8 55.7 47.1
LiResNet         | 83M  | 81.0 69.8 56.3 42.9
BRONet           | 68M  | 81.6 70.6 57.2 42.5
LipNeXt L32W1024 | 64M  | 81.5 71.2 59.2 45.9
LipNeXt L32W2048 | 256M | 85.0 73.2 58.8 43.3
"""
_CIFAR_100 = """
Cayley Large     | 21M  | 43.3 29.2 18.8 11.0
SOC-20           | 27M  | 47.8 34.8 23.7 15.8
LOT-20           | 18M  | 48.8 35.2 24.3 16.2
CPL XL           | 236M | 47.8 33.4 20.9 12.6
AOL Large        | 136M | 43.7 33.7 26.3 20.7
SLL X-Large      | 236M | 47.8 36.7 28.3 22.2
Sandwich         | 26M  | 46.3 35.3 26.3 20.3
LiResNet         | 83M  | 53.0 40.2 28.3 19.2
BRONet           | 68M  | 54.3 40.2 29.1 20.3
LipNeXt L32W1024 | 64M  | 53.3 41.3 30.5 21.8
LipNeXt L32W2048 | 256M | 57.4 44.1 31.9 22.2
"""
_TINY_IMAGENET = """
SLL X-Large      | 1.1B | 32.1 23.2 16.8 12.0
Sandwich         | 39M  | 33.4 24.7 18.1 13.4
LiResNet         | 83M  | 40.9 26.2 15.7 8.9
BRONet           | 75M  | 41.2 29.0 19.0 12.1
LipNeXt L32W1024 | 64M  | 42.5 32.0 21.8 15.2
LipNeXt L32W2048 | 256M | 45.5 35.0 25.9 18.0
"""
_CIFAR_10_GENERATED = """
LOT              | 59M  | 85.7 76.4 65.1 52.2
Cayley           | 68M  | 86.7 77.7 66.9 54.3
Cholesky         | 68M  | 85.4 76.6 65.7 53.3
SLL              | 83M  | 85.6 76.8 66.0 53.3
SOC              | 83M  | 86.6 78.2 67.0 54.1
Lip-reg          | 83M  | 86.7 78.1 67.0 54.2
BRO              | 68M  | 87.2 78.3 67.4 54.5
LipNeXt L32W2048 | 256M | 88.2 79.2 68.0 54.9
LipNeXt L32W2896 | 512M | 92.7 81.7 68.6 55.8
"""
_CIFAR_100_GENERATED = """
LOT              | 59M  | 59.4 47.6 36.6 26.3
Cayley           | 68M  | 61.1 48.7 37.8 27.5
Cholesky         | 68M  | 59.4 47.4 36.8 26.9
SLL              | 83M  | 59.4 47.6 36.6 27.0
SOC              | 83M  | 60.9 48.9 37.6 27.8
Lip-reg          | 83M  | 61.1 48.9 37.5 27.6
BRO              | 68M  | 61.6 49.1 37.7 27.2
LipNeXt L32W2048 | 256M | 62.1 51.2 38.5 27.5
LipNeXt L32W2896 | 512M | 63.6 55.2 39.2 28.3
"""
# Two models for every line: clean and CRA of the one for ε = 1, then of the one for ε = 36/255.
_IMAGENET = """
LiResNet         | 51M | 18.8 14.2 45.6 35.0
BRONet           | 86M | -    -    49.3 37.6
LipNeXt L32W4096 | 1B  | 40.2 21.1 55.9 40.3
LipNeXt L32W5792 | 2B  | 41.0 22.4 57.0 41.2
"""
_IMAGENET_GENERATED = """
LiResNet++       | 83M | -    -    49.0 38.3
BRONet           | 86M | -    -    52.3 40.7
"""


@dataclass(frozen=True)
class PaperRow:
    """Shares, None where there is no figure. extra_data: generated images; None if not known."""

    name: str
    parameters: str
    extra_data: bool | None
    clean: float | None
    certified: dict[float, float | None]
    of: Of


def data_set_name(num_classes: int, image_size: int) -> str | None:
    """The paper's data set of this shape."""
    if num_classes == 1000 and image_size >= 64:
        return "ImageNet"
    shapes = {(10, 32): "CIFAR-10", (100, 32): "CIFAR-100", (200, 64): "Tiny-ImageNet"}
    return shapes.get((num_classes, image_size))


def rows_for(num_classes: int, image_size: int) -> list[PaperRow] | None:
    """The paper's rows on the data set of this shape, prior work included; None: it has none."""
    match data_set_name(num_classes, image_size):
        case "CIFAR-10":
            return [*_rows(_CIFAR_10, False), *_rows(_CIFAR_10_GENERATED, True)]
        case "CIFAR-100":
            return [*_rows(_CIFAR_100, False), *_rows(_CIFAR_100_GENERATED, True)]
        case "Tiny-ImageNet":
            return list(_rows(_TINY_IMAGENET, False))
        case "ImageNet":
            return [*_pairs(_IMAGENET, False), *_pairs(_IMAGENET_GENERATED, True)]
    return None


def _rows(text: str, extra_data: bool) -> Iterator[PaperRow]:
    for name, size, (clean, *certified) in _lines(text):
        by_radius = dict(zip(SMALL_RADII, certified, strict=True))
        yield PaperRow(name, size, extra_data, clean, by_radius, _whose(name))


def _pairs(text: str, extra_data: bool) -> Iterator[PaperRow]:
    for name, size, (clean_1, cra_1, clean_36, cra_36) in _lines(text):
        yield PaperRow(name, size, extra_data, clean_1, {1.0: cra_1}, _whose(name))
        yield PaperRow(name, size, extra_data, clean_36, {36 / 255: cra_36}, _whose(name))


def _lines(text: str) -> Iterator[tuple[str, str, list[float | None]]]:
    for line in text.strip().splitlines():
        name, size, figures = (cell.strip() for cell in line.split("|"))
        # 57.4 % is 0.574, not the nearest float to 57.4 divided by 100.
        shares = [None if cell == "-" else round(float(cell) / 100, 4) for cell in figures.split()]
        yield name, size, shares


def _whose(name: str) -> Of:
    return "LipNeXt" if name.startswith("LipNeXt") else "prior work"


def data_set_of(facts: dict[str, Any]) -> str | None:
    """The paper's data set that a certificate's model was made for, judged by shape alone."""
    shape = _shape(facts)
    return None if shape is None else data_set_name(*shape)


def comparison_radii(rows: list[PaperRow]) -> list[float]:
    return sorted({radius for row in rows for radius in row.certified})


def comparison_table(facts: dict[str, Any], results: SampleResults | None = None) -> list[PaperRow]:
    """The run's row, then the paper's that have a figure; [] where the paper has no such data set.

    results: for the paper's radii that the certificate itself does not list.
    """
    shape = _shape(facts)
    rows = None if shape is None else rows_for(*shape)
    if rows is None:
        return []
    rows = [row for row in rows if row.clean is not None]
    certified = {radius: _certified_at(facts, results, radius) for radius in comparison_radii(rows)}
    name = "this run" if facts.get("certified") else "this run (not a certificate)"
    size = facts.get("model", {}).get("parameters")
    parameters = "-" if size is None else short_count(size)
    own = PaperRow(name, parameters, None, facts["clean_accuracy"], certified, "this run")
    return [own, *rows]


def _shape(facts: dict[str, Any]) -> tuple[int, int] | None:
    """(classes, image size) of a model of colour images; the paper has no others."""
    architecture = facts.get("model", {}).get("architecture", {})
    if architecture.get("in_channels", 3) != 3:
        return None
    if "num_classes" not in architecture or "image_size" not in architecture:
        return None
    return architecture["num_classes"], architecture["image_size"]


def _certified_at(
    facts: dict[str, Any], results: SampleResults | None, radius: float
) -> float | None:
    for listed, share in facts["certified_accuracy"].items():
        if math.isclose(float(listed), radius, rel_tol=1e-9):
            return float(share)
    return None if results is None else results.share(radius)


def short_count(number: int) -> str:
    """As the paper gives sizes: 64M, 1.1B; below ten with a decimal."""
    for unit, letter in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if number >= 0.9995 * unit:
            amount = number / unit
            return f"{amount:.1f}{letter}" if amount < 9.95 else f"{amount:.0f}{letter}"
    return str(number)


def comparison_text(facts: dict[str, Any]) -> str:
    """The comparison for a terminal; "" where the paper has no such data set."""
    rows = comparison_table(facts)
    if not rows:
        return ""
    radii = comparison_radii(rows)
    heads = ["", "size", "extra data", "clean", *(radius_name(radius) for radius in radii)]
    lines = [heads, *(_cells(row, radii) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(heads))]
    title = f"beside the paper's figures on {data_set_of(facts)} ({SOURCE}), not measured here:"
    body = (
        "  "
        + line[0].ljust(widths[0])
        + "".join(f"  {cell:>{width}}" for cell, width in zip(line[1:], widths[1:], strict=True))
        for line in lines
    )
    return "\n".join([title, *body]) + "\n"


def _cells(row: PaperRow, radii: list[float]) -> list[str]:
    extra = {True: "yes", False: "no", None: "-"}[row.extra_data]
    shares = [row.clean, *(row.certified.get(radius) for radius in radii)]
    return [row.name, row.parameters, extra, *(_percent(share) for share in shares)]


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"
