"""report.html, cra.png and examples.png: a certificate, and attacks on it, for people.

The page is `report.html.j2`, rendered by Jinja2, with everything inside the one file. It depends on
the certificate, the samples and attack.json alone, not on how or when they were made.
"""

import base64
import csv
import io
import json
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import matplotlib
import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from PIL import Image

from lipnext_scale.certification.certificate import (
    EvaluationTarget,
    SampleResults,
    class_name,
    radius_name,
    read_certificate,
)
from lipnext_scale.config.run_directory import RunDirectory
from lipnext_scale.utils.config import as_float
from lipnext_scale.utils.files import atomic_file, write_atomically

ATTACKED = "attacked.npz"  # of the attack command: examples of attacked images
# Colours of the figures, each with the variable of the page that replaces it there.
INK, FAINT, LINE, PROVEN, WRONG = "#1d2327", "#626b72", "#dcd8cd", "#1c5b8f", "#b3482d"
VARIABLES = {INK: "ink", FAINT: "faint", LINE: "line", PROVEN: "proven", WRONG: "wrong"}
PICTURES = 8  # of each kind
# Larger pictures are shrunk, to keep the page below a few megabytes. Attacked ones are not, up to
# the size of ImageNet's: shrinking would average the change away.
LARGEST_PICTURE, LARGEST_ATTACKED = 160, 256
AMPLIFICATIONS = (1000, 500, 200, 100, 50, 20, 10, 5, 2, 1)


def write_report(
    target: EvaluationTarget, facts: dict[str, Any], results: SampleResults
) -> list[Path]:
    """facts: certificate.json. The attack in `out` is shown if it is about the same target."""
    out, test, attack = target.out, target.test, attack_in(target.out, facts)
    attacked = _attacked_pictures(out) if attack else None
    report = Report(facts, results, test.image, test.sample_name, target.classes, attack, attacked)
    # File names need not be valid Unicode.
    page = report.html().encode(errors="backslashreplace")
    for path, figure in (
        (out.curve_picture, report.curve(title=True)),
        (out.examples_picture, report.examples()),
    ):
        with atomic_file(path) as file:
            figure.savefig(file, format="png")
    write_atomically(out.report, page)
    return [out.curve_picture, out.examples_picture, out.report]


def refresh_report(target: EvaluationTarget) -> list[Path]:
    """Add a new attack to the report; nothing if no certificate of the same target is here."""
    out = target.out
    if (stored := read_certificate(out)) is None:
        return []
    facts, results = stored
    try:
        if attack_in(out, facts) is None or len(results) != facts["data"]["samples"]:
            return []
        return write_report(target, facts, results)
    except (LookupError, TypeError, AttributeError, ValueError, jinja2.UndefinedError) as error:
        reason = f"{out.certificate} lacks what it shows ({type(error).__name__}: {error})"
        right = "python -m lipnext_scale.certify writes both anew"
        print(f"warning: {out.report} is not changed: {reason}; {right}", file=sys.stderr)
        return []


def attack_in(out: RunDirectory, facts: dict[str, Any]) -> dict[str, Any] | None:
    """attack.json, if it is about the certificate's weights and samples and the proven K."""
    try:
        attack: dict[str, Any] = json.loads(out.attack.read_bytes())
    except (OSError, ValueError):
        return None
    if not isinstance(attack, dict) or "violations" not in attack:
        return None
    here = (facts["model"]["weights"], facts["data"]["fingerprint"], facts["data"]["resize"], False)
    keys = ("weights", "fingerprint", "resize", "lipschitz_assumed")
    return attack if tuple(attack.get(key) for key in keys) == here else None


def _attacked_pictures(out: RunDirectory) -> dict[str, np.ndarray] | None:
    path = out.path / ATTACKED
    if not path.is_file():
        return None
    with np.load(path, allow_pickle=False) as stored:
        return dict(stored)


@dataclass(frozen=True)
class Report:
    """image, name: the HWC uint8 image, and the shard and key, of a sample number."""

    facts: dict[str, Any]
    results: SampleResults
    image: Callable[[int], np.ndarray]
    name: Callable[[int], str]
    class_names: tuple[str, ...] = ()
    attack: dict[str, Any] | None = None
    attacked: dict[str, np.ndarray] | None = None

    def class_name(self, label: int) -> str:
        return class_name(self.class_names, label)

    def html(self) -> str:
        environment = jinja2.Environment(
            loader=jinja2.FileSystemLoader(Path(__file__).parent),
            undefined=jinja2.StrictUndefined,
            autoescape=True,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        environment.filters.update(
            percent=percent, interval=interval_text, radius=lambda key: radius_name(float(key))
        )
        return environment.get_template("report.html.j2").render(
            report=self,
            facts=self.facts,
            results=self.results,
            attack=self.attack,
            curve=svg(self.curve()),
            histogram=svg(histogram_figure(self.facts["histogram"])),
            paper=paper_table(self.facts, self.results),
            samples=extremes(self.results),
            picture=picture,
            attacked=self.attacked_pictures(),
            command=command_of(self.facts),
        )

    def verdict(self, sample: int, longest: int = 1000) -> str:
        """longest: characters of what is said; names are cut to fit."""
        said, true = (int(of[sample]) for of in (self.results.predictions, self.results.labels))
        names = [self.class_name(label) for label in dict.fromkeys((said, true))]
        most = longest if said == true else longest // 2 - 2
        cut = [name if len(name) <= most else name[: most - 1] + "…" for name in names]
        return ", is ".join(cut)

    def attacked_pictures(self) -> list[dict[str, Any]]:
        """Original, change and attacked image of each example of an attack."""
        found = []
        arrays = self.attacked or {"samples": np.zeros(0)}
        for row, sample in enumerate(arrays["samples"].tolist()):
            one = {key: array[row] for key, array in arrays.items()}
            change = one["attacked"] - one["images"]
            # As large as can be without clipping it.
            factor = next((f for f in AMPLIFICATIONS if f * np.abs(change).max() <= 0.5), 1)
            name, pictures = self.name(sample), []
            for what, pixels, below in (
                ("original", one["images"], self.class_name(int(one["labels"]))),
                ("change", 0.5 + factor * change, f"× {factor}, on grey"),
                ("attacked", one["attacked"], self.class_name(int(one["predictions"]))),
            ):
                pixels = np.round(255 * pixels.clip(0, 1)).astype(np.uint8).transpose(1, 2, 0)
                image = picture(pixels, f"{name}, {what}: {below}", LARGEST_ATTACKED)
                pictures.append({"image": image, "what": what, "below": below})
            radius, distance = float(one["radii"]), float(one["distances"])
            found.append({"name": name, "trio": pictures, "radius": radius, "distance": distance})
        return found

    def examples(self) -> Figure:
        """examples.png: samples with the largest and the smallest radii, and wrong ones."""
        rows = {title: own for title, own in extremes(self.results).items() if len(own)}
        width, height = 1.35 * PICTURES, 1.9 * len(rows)
        figure = Figure(figsize=(width, height), dpi=130)
        # Room in inches for titles: measuring it takes longer than the drawing.
        figure.subplots_adjust(
            0.35 / width, 0.05 / height, 1 - 0.1 / width, 1 - 0.45 / height, 0.1, 0.4
        )
        grid = figure.subplots(len(rows), PICTURES, squeeze=False)
        axes: Axes
        for axes in grid.flat:
            axes.axis("off")
        for (title, chosen), line in zip(rows.items(), grid, strict=True):
            for sample, axes in zip(chosen.tolist(), line, strict=False):
                axes.imshow(squeezed(self.image(sample)), "gray", vmin=0, vmax=255)
                text = f"{self.verdict(sample, 22)}\nr = {self.results.radii[sample]:.3f}"
                axes.set_title(text, fontsize=8, parse_math=False)
            sideways = {"rotation": 90, "ha": "right", "va": "center", "fontsize": 8}
            line[0].text(-0.08, 0.5, title, transform=line[0].transAxes, **sideways)
        return figure

    def curve(self, title: bool = False) -> Figure:
        """Certified accuracy over the radius with its 95 % band, and what attacks left."""
        facts, results = self.facts, self.results
        certified = {float(key): share for key, share in facts["certified_accuracy"].items()}
        right = results.radii[results.correct]
        # A hundredth of the right predictions may lie beyond the axis.
        end = 1.05 * max([*certified, np.quantile(right, 0.99) if len(right) else 0.0]) or 1.0
        radii = np.linspace(0, end, 400)
        shares = 100 * np.array([results.share(radius) for radius in radii])
        low, high = 100 * np.array([results.interval(radius) for radius in radii]).T
        figure, axes = new_figure()
        kind = "certified" if facts["certified"] else "NOT certified"
        axes.fill_between(radii, low, high, color=PROVEN, alpha=0.18, lw=0, label="95 % confidence")
        axes.plot(radii, shares, color=PROVEN, linewidth=2, label=kind)
        for radius, share in certified.items():
            axes.plot(radius, 100 * share, "o", color=PROVEN, markersize=5)
            # Below the curve, but above the axis.
            place, ha, va = (-3, -4), "right", "top"
            if share <= 0.1:
                place, ha, va = (3, 3), "left", "bottom"
            text, at = f"{share:.1%}", (radius, 100 * share)
            axes.annotate(text, at, place, textcoords="offset points", color=INK, ha=ha, va=va)
        if self.attack is not None:
            robust = {0.0: self.attack["clean_accuracy"]}
            robust |= {float(key): one["robust"] for key, one in self.attack["radii"].items()}
            inside = {radius: robust[radius] for radius in sorted(robust) if radius <= end}
            found = 100 * np.array(list(inside.values()))
            axes.plot(list(inside), found, "s--", color=WRONG, ms=4, lw=1, label="under attack")
        axes.set(xlabel="radius ε (l2 norm, pixels in [0, 1])", ylabel="accuracy (%)")
        axes.set(xlim=(0, end), ylim=(0, 103))
        if title:
            axes.set_title(
                f"{'Certified on' if facts['certified'] else 'NOT A CERTIFICATE:'} "
                f"{len(results):,} samples, clean {facts['clean_accuracy']:.1%}, "
                f"K ≤ {facts['lipschitz_bound']:.6f}",
                fontsize=10,
                color=INK,
            )
        add_legend(figure)
        return figure


def extremes(results: SampleResults) -> dict[str, np.ndarray]:
    """The numbers of the samples that are shown, by kind."""
    order = np.argsort(results.radii, kind="stable")
    right, wrong = order[results.correct[order]], order[~results.correct[order]]
    return {
        "Right, largest radii": right[::-1][:PICTURES],
        "Right, smallest radii": right[:PICTURES],
        "Wrong, largest radii": wrong[::-1][:PICTURES],
    }


def picture(image: np.ndarray, alt: str, largest: int = LARGEST_PICTURE) -> Markup:
    """An HWC uint8 image inside the page; small ones keep their pixels visible."""
    made = Image.fromarray(squeezed(image))
    kind = "pixels" if max(made.size) <= 96 else "photo"
    made.thumbnail((largest, largest), Image.Resampling.LANCZOS)  # never enlarges
    encoded = io.BytesIO()
    made.save(encoded, format="PNG", optimize=True)
    source = "data:image/png;base64," + base64.b64encode(encoded.getvalue()).decode()
    markup = Markup('<img src="{}" alt="{}" width="{}" height="{}" class="{}">')
    return markup.format(source, alt, *made.size, kind)


def squeezed(image: np.ndarray) -> np.ndarray:
    return image.squeeze(2) if image.shape[2] == 1 else image


# --------------------------------------------------------------------------------------------------
# Figures.


def new_figure() -> tuple[Figure, Axes]:
    """Its text is legible in the 350 pixels that a phone has for it."""
    figure = Figure(figsize=(4.8, 3.4), dpi=190, layout="constrained")
    return figure, quiet(figure.add_subplot())


def quiet(axes: Axes) -> Axes:
    """All but what is plotted is faint."""
    axes.grid(color=LINE, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(labelcolor=FAINT, color=LINE)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(LINE)
    for axis in (axes.xaxis, axes.yaxis):
        axis.label.set_color(FAINT)
    return axes


def add_legend(figure: Figure) -> None:
    """Above the axes, where it hides nothing."""
    figure.legend(
        loc="outside upper left", ncols=3, frameon=False, labelcolor=INK, columnspacing=1.2
    )


def histogram_figure(histogram: dict[str, list[float]]) -> Figure:
    """Radii of right predictions upwards, of wrong ones downwards, on the same scale."""
    edges = np.array(histogram["edges"])
    figure, axes = new_figure()
    for kind, sign, color in (("right", 1, PROVEN), ("wrong", -1, WRONG)):
        counts = sign * np.array(histogram[kind])
        width = 0.88 * np.diff(edges)
        axes.bar(edges[:-1], counts, width, align="edge", color=color, label=f"{kind} predictions")
    text, top = f"{edges[-2]:.2f} and larger", histogram["right"][-1]
    axes.text(edges[-2], top, text, color=FAINT, rotation=90, ha="left", va="bottom")
    axes.axhline(0, color=FAINT, linewidth=0.8)
    axes.set(xlabel="radius (l2 norm, pixels in [0, 1])", ylabel="samples", xlim=(0, edges[-1]))
    axes.yaxis.set_major_locator(MaxNLocator(steps=[1, 2, 5, 10], integer=True))
    axes.yaxis.set_major_formatter(lambda count, _: f"{abs(count):,.0f}")
    add_legend(figure)
    return figure


def svg(figure: Figure) -> Markup:
    """The same bytes every time, in the colours of the page, with text as text."""
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    drawn = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": "lipnext_scale", "svg.fonttype": "none"}):
        figure.savefig(drawn, format="svg", transparent=True, metadata=nothing)
    text = drawn.getvalue()
    text = text[text.index("<svg") :]
    for color, variable in VARIABLES.items():
        text = text.replace(color, f"var(--{variable})")
    return Markup(text)


# --------------------------------------------------------------------------------------------------
# Tables.


def percent(share: float, digits: int = 1) -> str:
    return f"{share:.{digits}%}"


def interval_text(interval: list[float], digits: int = 1) -> str:
    low, high = (100 * end for end in interval)
    return f"{low:.{digits}f} – {high:.{digits}f}"


def paper_table(facts: dict[str, Any], results: SampleResults) -> dict[str, Any] | None:
    """This run beside the paper's rows on the data set of its shape; None if it has none."""
    shape = facts["model"]["architecture"]
    classes, side = shape["num_classes"], shape["image_size"]
    sets = {(10, 32): "CIFAR-10", (100, 32): "CIFAR-100", (200, 64): "Tiny-ImageNet"}
    data_set = "ImageNet" if classes == 1000 and side >= 64 else sets.get((classes, side))
    if data_set is None or shape["in_channels"] != 3:
        return None
    with Path(__file__).with_name("paper.csv").open(encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["data set"] == data_set]
    radii = [key for key in rows[0] if as_float(key) and any(row[key] for row in rows)]
    name = "this run" if facts["certified"] else "this run (not a certificate)"
    shares = [percent(results.share(as_float(key) or 0)) for key in radii]
    millions = facts["model"]["parameters"] / 1e6
    size = f"{millions:.1f}M" if millions < 1000 else f"{millions / 1000:.1f}B"
    own = [name, size, percent(results.share()), *shares, "–"]
    columns = ["model", "size", "clean", *radii, "generated data"]
    printed = [[row[key] or "–" for key in columns] for row in rows]
    heads = [f"CRA@{key}" if key in radii else key for key in columns]
    return {"data_set": data_set, "heads": heads, "rows": [own, *printed]}


def command_of(facts: dict[str, Any]) -> str:
    """What makes this certificate again."""
    path, data = facts["model"]["path"], facts["data"]
    words = ["python", "-m", "lipnext_scale.certify", "--model", path, "--data", data["shards"]]
    words += ["--resize", str(data["resize"])] if data["resize"] else []
    words += ["--dtype", facts["arithmetic"]] if facts["arithmetic"] != "float64" else []
    radii = [radius_name(float(radius)) for radius in facts["certified_accuracy"]]
    return shlex.join([*words, "--radii", *radii])
