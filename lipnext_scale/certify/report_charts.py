"""Charts of the report, drawn without a library: a few kilobytes each, in the colours of the page.

The shapes are an SVG that is stretched over the box; all text is HTML that is placed by percentages
over it, and so keeps its size on a phone.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from lipnext_scale.certify.report_page import Html, join, tag
from lipnext_scale.certify.results import SampleResults, wilson_interval

POINTS = 240


@dataclass(frozen=True)
class Curve:
    """Certified accuracy at some radii, each with its 95 % interval."""

    radii: np.ndarray
    share: np.ndarray
    low: np.ndarray
    high: np.ndarray


def certified_curve(results: SampleResults, radii: np.ndarray) -> Curve:
    right = np.sort(results.radii[results.correct])
    hits = len(right) - np.searchsorted(right, radii, side="left")
    intervals = np.array([wilson_interval(int(hit), len(results)) for hit in hits])
    return Curve(radii, hits / len(results), intervals[:, 0], intervals[:, 1])


def furthest_shown(results: SampleResults, epsilons: Iterable[float]) -> float:
    """Where the axis of radii ends: a hundredth of the right predictions may lie beyond."""
    right = results.radii[results.correct]
    wanted = max([*epsilons, float(np.quantile(right, 0.99)) if len(right) else 0.0])
    largest = float(right.max()) if len(right) else 0.0
    return 1.05 * (largest if wanted < largest <= 1.25 * wanted else wanted) or 1.0


@dataclass(frozen=True)
class _Box:
    """From values to per cents of the box, from its left and its lower edge."""

    right: float
    bottom: float
    top: float

    def x(self, value: float) -> float:
        return round(100 * value / self.right, 3)

    def y(self, value: float) -> float:
        return round(100 * (value - self.bottom) / (self.top - self.bottom), 3)

    def path(self, x: Iterable[float], y: Iterable[float]) -> str:
        return " ".join(f"{self.x(a):g},{100 - self.y(b):g}" for a, b in zip(x, y, strict=True))


def curve_chart(results: SampleResults, certified: dict[float, float]) -> Html:
    """Certified accuracy over the radius, with its 95 % band and the radii of the certificate."""
    end = furthest_shown(results, certified)
    curve = certified_curve(results, np.linspace(0, end, POINTS))
    box = _Box(end, 0.0, 1.0)
    band = box.path([*curve.radii, *curve.radii[::-1]], [*curve.low, *curve.high[::-1]])
    shapes = [
        *_grid(box, _ticks(0, 1)),
        Html(f'<polygon class="band" points="{band}"/>'),
        Html(f'<polyline class="line" points="{box.path(curve.radii, curve.share)}"/>'),
    ]
    words = _axes(box, [f"{tick:.0%}" for tick in _ticks(0, 1)], _ticks(0, 1))
    for epsilon, share in certified.items():
        words.append(_place("dot", "", left=box.x(epsilon), bottom=box.y(share)))
        words.append(_place("value", f"{share:.1%}", left=box.x(epsilon), bottom=box.y(share)))
    figures = "; ".join(f"{share:.1%} at {epsilon:.3g}" for epsilon, share in certified.items())
    spoken = f"Certified accuracy falls from {curve.share[0]:.1%} at radius 0: {figures}."
    return _chart(spoken, shapes, words, "radius ε (l2 norm, pixels in [0, 1])", "")


def histogram_chart(histogram: dict[str, Any]) -> Html:
    """Radii of right predictions upwards, of wrong ones downwards, on the same scale."""
    edges, right, wrong = (histogram[key] for key in ("edges", "right", "wrong"))
    ticks = _ticks(-max(wrong, default=0), max([*right, 1]), about=7)
    box = _Box(edges[-1] or 1.0, min(0, -1.06 * max(wrong, default=0)), 1.06 * max([*right, 1]))
    ticks = [tick for tick in ticks if box.bottom <= tick <= box.top]
    shapes = _grid(box, ticks)
    for counts, sign, kind in ((right, 1, "right"), (wrong, -1, "wrong")):
        for low, high, count in zip(edges, edges[1:], counts, strict=False):
            if count:
                shapes.append(_column(box, low, high, sign * count, kind))
    shapes.append(_line(box, 0, "zero"))
    words = _axes(box, [f"{abs(tick):,.0f}" for tick in ticks], ticks)
    spoken = (
        f"Histogram of radii up to {edges[-1]:.3g}: {sum(right):,} right predictions upwards, "
        f"{sum(wrong):,} wrong ones downwards."
    )
    return _chart(spoken, shapes, words, "radius (l2 norm, pixels in [0, 1])", "samples")


def _chart(spoken: str, shapes: list[Html], words: list[Html], x: str, y: str) -> Html:
    drawn = tag("svg", *shapes, viewBox="0 0 100 100", preserveAspectRatio="none")
    titles = [tag("span", x, class_="x-title"), tag("span", y, class_="y-title")]
    inside = tag("div", drawn, join(words), *titles, aria_hidden="true")
    return tag("div", inside, class_="chart", role="img", aria_label=spoken)


def _axes(box: _Box, names: list[str], ticks: list[float]) -> list[Html]:
    across = [tick for tick in _ticks(0, box.right) if tick <= box.right]
    return [
        *(_place("x", f"{tick:g}", left=box.x(tick)) for tick in across),
        *(_place("y", name, bottom=box.y(y)) for name, y in zip(names, ticks, strict=True)),
    ]


def _grid(box: _Box, ticks: list[float]) -> list[Html]:
    return [_line(box, tick, "grid") for tick in ticks]


def _line(box: _Box, y: float, kind: str) -> Html:
    height = f"{100 - box.y(y):g}"
    return Html(f'<line class="{kind}" x1="0" x2="100" y1="{height}" y2="{height}"/>')


def _column(box: _Box, low: float, high: float, count: float, kind: str) -> Html:
    """A bar with a little air at its right."""
    top, zero = 100 - box.y(max(count, 0)), 100 - box.y(min(count, 0))
    width = 0.88 * (box.x(high) - box.x(low))
    place = f'x="{box.x(low):g}" y="{top:g}" width="{width:.3f}" height="{zero - top:.3f}"'
    return Html(f'<rect class="{kind}" {place}/>')


def _place(kind: str, text: str, **where: float) -> Html:
    style = ";".join(f"{side}:{per_cent:g}%" for side, per_cent in where.items())
    return tag("span", text, class_=kind, style=style)


def _ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round numbers from low to high: multiples of 1, 2 or 5 times a power of ten."""
    rough = (high - low) / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(number * step, 12) for number in range(first, last + 1)]
