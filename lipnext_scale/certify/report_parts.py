"""Parts of an HTML page: text that is escaped once, tables that scroll, images inside the page.

`Html` is text that is markup already; any other value is escaped where it enters, so that no name
out of a data set or a path can become part of the page's structure.
"""

import base64
import io
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np
from PIL import Image

from lipnext_scale.certify.certificate import SampleResults, wilson_interval

# Larger pictures are shrunk: a page of photographs stays below a few megabytes.
LARGEST_PICTURE = 160


class Html(str):
    """Markup, not to be escaped again."""


BREAK = Html("<br>")
Content = object  # Html as it is, everything else by its escaped str()


def html(content: Content) -> Html:
    return content if isinstance(content, Html) else Html(escape(str(content)))


def join(parts: Iterable[Content], between: str = "") -> Html:
    return Html(between.join(html(part) for part in parts))


def tag(name: str, *content: Content, **attributes: Content) -> Html:
    """<name …>content</name>; class_ is class, a_b is a-b, None leaves an attribute out."""
    inside = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(str(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Html(f"<{name}{inside}>{join(content)}</{name}>")


def section(title: str, *content: Content, id_: str) -> Html:
    heading = tag("h2", title, id=id_)
    return tag("section", heading, *content, aria_labelledby=id_)


def table(
    caption: str,
    heads: Sequence[Content],
    rows: Iterable[Sequence[Content]],
    marked: frozenset[int] = frozenset(),
    words: int = 1,
) -> Html:
    """A table in a box that scrolls sideways. The first cell of a row is its header.

    marked: rows that stand out. words: this many first columns are text, the others figures.
    """
    columns = [
        tag("th", head, scope="col", class_=_row_kind(i, words)) for i, head in enumerate(heads)
    ]
    body = []
    for number, (first, *rest) in enumerate(rows):
        cells = [tag("th", first, scope="row", class_="words")]
        cells += [
            tag("td", cell, class_=_row_kind(i, words)) for i, cell in enumerate(rest, start=1)
        ]
        body.append(tag("tr", *cells, class_="marked" if number in marked else None))
    whole = tag(
        "table",
        tag("caption", caption),
        tag("thead", tag("tr", *columns)),
        tag("tbody", *body),
    )
    return tag("div", whole, class_="scroll", tabindex=0, role="region", aria_label=caption)


def _row_kind(column: int, words: int) -> str | None:
    return "words" if column < words else None


def bar(share: float | None, text: str) -> Html:
    """A share as its text over a bar of that length."""
    if share is None:
        return Html("–")
    return tag("span", text, class_="bar", style=f"--share:{100 * share:.1f}%")


def facts_list(entries: Iterable[tuple[Content, Content]]) -> Html:
    return tag("dl", *(tag("div", tag("dt", name), tag("dd", value)) for name, value in entries))


def picture(image: np.ndarray, alt: str, largest: int = LARGEST_PICTURE) -> Html:
    """An HWC uint8 image inside the page; small ones keep their pixels visible."""
    made = Image.fromarray(image.squeeze(2) if image.shape[2] == 1 else image)
    kind = "pixels" if max(made.size) <= 96 else "photo"
    made.thumbnail((largest, largest), Image.Resampling.LANCZOS)  # never enlarges
    encoded = io.BytesIO()
    made.save(encoded, format="PNG", optimize=True)
    source = "data:image/png;base64," + base64.b64encode(encoded.getvalue()).decode()
    width, height = made.size
    attributes = f'src="{source}" alt="{escape(alt)}" width="{width}" height="{height}"'
    return Html(f'<img {attributes} class="{kind}">')


def page(title: str, *content: Content) -> str:
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        '<link rel="icon" href="data:,">\n'  # or the browser asks for one, in vain
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
        f"{tag('main', join(content, chr(10)))}\n</body>\n</html>\n"
    )


STYLE = """
:root {
  --page: #fbfaf6; --box: #ffffff; --ink: #1d2327; --faint: #626b72; --line: #dcd8cd;
  --proven: #1c5b8f; --band: #1c5b8f26; --wrong: #b3482d; --bar: #1c5b8f24; --marked: #eef3f7;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #14181b; --box: #1b2024; --ink: #e5e3dc; --faint: #99a1a7; --line: #343b40;
    --proven: #79b4e6; --band: #79b4e62e; --wrong: #e8917a; --bar: #79b4e633; --marked: #222c34;
  }
}
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; }
body {
  margin: 0; background: var(--page); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif;
}
main { max-width: 64rem; margin: 0 auto; padding: 2.5rem 1.25rem 4rem; }
h1, h2 { font-family: Georgia, "Times New Roman", "DejaVu Serif", serif; font-weight: 600; }
h1 { font-size: 2rem; line-height: 1.2; margin: 0 0 .35rem; overflow-wrap: anywhere; }
h2 { font-size: 1.3rem; margin: 3rem 0 .6rem; }
h3 { font-size: 1rem; margin: 1.6rem 0 .5rem; }
p { margin: .5rem 0; max-width: 44rem; }
code, pre { font: .86em/1.5 ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace; }
code { overflow-wrap: anywhere; }
.faint, figcaption, caption { color: var(--faint); font-size: .875rem; }
.banner {
  border: 2px solid var(--wrong); border-radius: 8px; padding: .8rem 1rem; margin: 1.2rem 0;
  max-width: none;
}
.banner strong { display: block; color: var(--wrong); font-size: 1.15rem; }
.verdict {
  display: grid; grid-template-columns: repeat(auto-fit, minmax(7.6rem, 1fr));
  margin: 1.5rem 0; padding: 0; list-style: none; background: var(--box);
  border: 1px solid var(--line); border-radius: 8px; overflow: hidden;
}
.verdict li { padding: .75rem .7rem; box-shadow: 0 0 0 .5px var(--line); }
.verdict span { display: block; color: var(--faint); font-size: .77rem; white-space: nowrap; }
.verdict b {
  display: block; font-size: 1.5rem; line-height: 1.35; font-weight: 600; color: var(--proven);
  font-variant-numeric: tabular-nums;
}
.verdict .plain b { color: var(--ink); }
.verdict .bound b { font-size: 1.15rem; line-height: 1.76; }
.scroll { overflow-x: auto; margin: .8rem 0; border: 1px solid var(--line); border-radius: 8px;
  background: var(--box); }
table { border-collapse: separate; border-spacing: 0; width: 100%; font-size: .92rem;
  font-variant-numeric: tabular-nums; }
caption { text-align: left; padding: .55rem .8rem; }
th, td { padding: .38rem .8rem; text-align: right; white-space: nowrap;
  border-top: 1px solid var(--line); }
th.words, td.words { text-align: left; }
thead th { font-size: .8rem; font-weight: 600; color: var(--faint); }
tbody th { font-weight: 400; }
th:first-child { position: sticky; left: 0; background: var(--box); }
tr.marked th:first-child { background: var(--marked); }
tr.marked { background: var(--marked); }
tr.marked th, tr.marked td { font-weight: 650; }
.bar { display: block; padding: 0 .35rem; min-width: 4rem; border-radius: 3px;
  background: linear-gradient(to right, var(--bar) var(--share), transparent var(--share)); }
figure { margin: 1rem 0; }
.chart { position: relative; margin: 1.6rem .8rem 3.1rem 3.1rem; height: 19rem; font-size: .78rem;
  color: var(--faint); border-left: 1px solid var(--line); border-bottom: 1px solid var(--line); }
.chart svg { position: absolute; inset: 0; width: 100%; height: 100%; overflow: hidden; }
.chart span { position: absolute; white-space: nowrap; line-height: 1; }
.chart .x { top: calc(100% + .5rem); transform: translateX(-50%); }
.chart .y { right: calc(100% + .5rem); transform: translateY(50%); }
.chart .x-title { top: calc(100% + 1.75rem); left: 0; right: 0; text-align: center; }
.chart .y-title { bottom: calc(100% + .4rem); right: calc(100% - 1rem); }
.chart .dot { width: 9px; height: 9px; border-radius: 50%; background: var(--wrong);
  border: 2px solid var(--box); box-sizing: content-box; transform: translate(-50%, 50%); }
.chart .value { padding: 0 0 .5rem .5rem; color: var(--ink); font-weight: 600; }
.chart .grid { stroke: var(--line); stroke-width: 1; }
.chart .line { fill: none; stroke: var(--proven); stroke-width: 2; }
.chart .band { fill: var(--band); }
.chart .right { fill: var(--proven); } .chart .wrong { fill: var(--wrong); }
.chart .zero { stroke: var(--faint); stroke-width: 1; }
.chart * { vector-effect: non-scaling-stroke; }
.entry { display: inline-block; margin-right: 1rem; }
.key { display: inline-block; width: .8em; height: .8em; border-radius: 2px; margin-right: .35em; }
.key.right { background: var(--proven); } .key.wrong { background: var(--wrong); }
.gallery { display: grid; grid-template-columns: repeat(auto-fill, minmax(6.2rem, 1fr));
  gap: .9rem; }
.gallery figure, .trio figure { margin: 0; min-width: 0; }
.gallery figcaption, .trio figcaption { line-height: 1.35; margin-top: .3rem; font-size: .8rem;
  overflow-wrap: anywhere; }
.gallery b, .trio b, .attack b { color: var(--ink); }
img { display: block; width: 100%; height: auto; border-radius: 4px; background: var(--line); }
img.pixels { image-rendering: pixelated; }
.attacks { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(22rem, 100%), 1fr));
  gap: 1.2rem; }
.attack { margin: 0; padding: .8rem; background: var(--box); border: 1px solid var(--line);
  border-radius: 8px; }
.attack.broken { border: 2px solid var(--wrong); }
.trio { display: grid; grid-template-columns: repeat(3, 1fr); gap: .6rem; margin-bottom: .6rem; }
dl { margin: .8rem 0; font-size: .92rem; }
dl > div { display: grid; grid-template-columns: 11rem 1fr; gap: .2rem 1rem; padding: .35rem 0;
  border-top: 1px solid var(--line); }
dt { color: var(--faint); } dd { margin: 0; overflow-wrap: anywhere; min-width: 0; }
pre { margin: .8rem 0; padding: .8rem; overflow-x: auto; background: var(--box);
  border: 1px solid var(--line); border-radius: 8px; }
pre.wrap { white-space: pre-wrap; overflow-wrap: anywhere; }
summary { cursor: pointer; }
@media (max-width: 34rem) {
  main { padding-top: 1.5rem; }
  h1 { font-size: 1.5rem; }
  .verdict b { font-size: 1.4rem; }
  .verdict li:last-child:nth-child(odd) { grid-column: 1 / -1; }
  th, td { padding: .38rem .55rem; }
  .gallery { grid-template-columns: repeat(auto-fill, minmax(4.9rem, 1fr)); gap: .6rem; }
  .gallery figcaption { font-size: .72rem; }
  .chart { height: 15rem; margin-left: 2.6rem; }
  .chart .value { display: none; }
  dl > div { grid-template-columns: 1fr; }
}
@media print { .scroll, pre { overflow: visible; } pre { white-space: pre-wrap; } }
"""


# --------------------------------------------------------------------------------------------------
# Charts of the report, drawn without a library: a few kilobytes each, in the colours of the page.
#
# The shapes are an SVG that is stretched over the box; all text is HTML that is placed by
# percentages over it, and so keeps its size on a phone.

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
