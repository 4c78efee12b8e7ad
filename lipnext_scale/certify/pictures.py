"""The certificate as pictures: accuracy over the radius, and examples with their radii."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from lipnext_scale.certify.certificate import SampleResults, radius_name
from lipnext_scale.certify.report_parts import (
    BREAK,
    Content,
    Html,
    bar,
    certified_curve,
    furthest_shown,
    picture,
    section,
    table,
    tag,
)
from lipnext_scale.files import atomic_file

COLUMNS = 8
BLUE, RED = "#1f5fa8", "#c4452c"


def draw_curve(path: Path, facts: dict[str, Any], results: SampleResults) -> None:
    """Certified accuracy over the radius with its 95 % band, finer than a pixel."""
    certified = {float(radius): share for radius, share in facts["certified_accuracy"].items()}
    end = furthest_shown(results, certified)
    curve = certified_curve(results, np.linspace(0, end, 1200))
    figure = Figure(figsize=(7, 4.2), dpi=130, layout="constrained")
    axes = figure.add_subplot()
    low, high = curve.low * 100, curve.high * 100
    axes.fill_between(curve.radii, low, high, color=BLUE, alpha=0.18, label="95 % confidence")
    axes.plot(curve.radii, curve.share * 100, color=BLUE, linewidth=2)
    for radius, share in certified.items():
        place = (radius, share * 100)
        axes.plot(*place, "o", color=RED, markersize=5)
        axes.annotate(f"{share:.1%}", place, xytext=(5, 5), textcoords="offset points")
    axes.set(
        xlabel="radius ε (l2 norm, pixels in [0, 1])",
        ylabel="certified accuracy (%)" if facts.get("certified") else "accuracy (%)",
        ylim=(0, 103),
        xlim=(0, end),
        title=_title(facts, results),
    )
    axes.grid(alpha=0.3)
    axes.legend(loc="upper right", frameon=False)
    _save(figure, path)


def _title(facts: dict[str, Any], results: SampleResults) -> str:
    how = "Certified on" if facts.get("certified") else "NOT A CERTIFICATE:"
    return (
        f"{how} {len(results):,} samples, clean {facts['clean_accuracy']:.1%}, "
        f"K ≤ {facts['lipschitz_bound']:.6f}"
    )


def extremes(results: SampleResults, count: int) -> dict[str, np.ndarray]:
    """Sample numbers: right with the largest and the smallest radii, wrong with the largest."""
    order = np.argsort(results.radii, kind="stable")
    right, wrong = order[results.correct[order]], order[~results.correct[order]]
    return {
        "largest radii": right[::-1][:count],
        "smallest radii": right[:count],
        "misclassified": wrong[::-1][:count],
    }


def draw_examples(
    path: Path, results: SampleResults, image: Callable[[int], np.ndarray], columns: int = COLUMNS
) -> None:
    """The samples with the largest and the smallest radii, and ones that are misclassified."""
    rows = {title: found for title, found in extremes(results, columns).items() if len(found)}
    width, height = 1.35 * columns, 1.9 * len(rows)
    figure = Figure(figsize=(width, height), dpi=130)
    # Room in inches for the titles of rows and images: measuring it takes longer than the drawing.
    figure.subplots_adjust(
        0.35 / width, 0.05 / height, 1 - 0.1 / width, 1 - 0.45 / height, 0.1, 0.4
    )
    grid = figure.subplots(len(rows), columns, squeeze=False)
    for axes in grid.flat:
        axes.axis("off")
    for (title, chosen), line in zip(rows.items(), grid, strict=True):
        _draw_row(line, title, chosen.tolist(), results, image)
    _save(figure, path)


def _draw_row(
    line: np.ndarray,
    title: str,
    chosen: Iterable[int],
    results: SampleResults,
    image: Callable[[int], np.ndarray],
) -> None:
    axes: Axes
    for sample, axes in zip(chosen, line, strict=False):
        pixels = image(sample)
        axes.imshow(pixels.squeeze(2) if pixels.shape[2] == 1 else pixels, "gray", vmin=0, vmax=255)
        said, true = int(results.predictions[sample]), int(results.labels[sample])
        verdict = f"{said}" if said == true else f"{said}, is {true}"
        axes.set_title(f"{verdict}\nr = {results.radii[sample]:.3f}", fontsize=8)
    line[0].annotate(
        title,
        (0, 0.5),
        xytext=(-8, 0),
        xycoords="axes fraction",
        textcoords="offset points",
        rotation=90,
        ha="right",
        va="center",
    )


def _save(figure: Figure, path: Path) -> None:
    with atomic_file(path) as file:
        figure.savefig(file, format="png")


# --------------------------------------------------------------------------------------------------
# The parts of the report about single samples: attacks, pictures, classes.

PICTURES = 8
# Of more classes than this only the best and the worst are listed.
MANY_CLASSES, LISTED_CLASSES = 50, 10
# Shrinking would average a change away; test images of ImageNet have 224 pixels.
LARGEST_ATTACKED = 256
AMPLIFICATIONS = (1000, 500, 200, 100, 50, 20, 10, 5, 2, 1)
EFFORT = {
    "attacked": "Samples",
    "attacks": "Attacks",
    "attacks_inside_the_radius": "Attacks inside the radius",
    "methods": "Methods",
    "restarts": "Restarts",
    "steps": "Steps",
}
Named = Callable[[int], str]


class Attacked(Protocol):
    """What is shown of an attack: CHW images in [0, 1], labels before and after, distances."""

    @property
    def sample(self) -> int: ...
    @property
    def image(self) -> Tensor: ...
    @property
    def attacked(self) -> Tensor: ...
    @property
    def distance(self) -> float: ...
    @property
    def radius(self) -> float: ...
    @property
    def label_before(self) -> int: ...
    @property
    def label_after(self) -> int: ...


def percent(share: float | None, digits: int = 1) -> str:
    return "–" if share is None else f"{share:.{digits}%}"


def interval_text(interval: list[float] | None, digits: int = 1) -> str:
    if interval is None:
        return "–"
    low, high = (100 * end for end in interval)
    return f"{low:.{digits}f} – {high:.{digits}f}"


def attack_section(attack: dict[str, Any]) -> Html:
    """Robust accuracy as attacks found it: it must lie between the certified and the clean."""
    clean = attack.get("clean_accuracy")
    rows: list[list[Content]] = []
    for radius, found in attack.get("radii", {}).items():
        shares = [found.get("certified"), found.get("robust"), clean]
        cells = [*(percent(share, 2) for share in shares), interval_text(found.get("interval"), 2)]
        rows.append([radius_name(float(radius)), *cells])
    heads = ["radius ε", "certified", "robust", "clean", "robust, 95 % interval"]
    order = "Certified ≤ empirically robust ≤ clean, on the attacked samples"
    return section(
        "Under attack",
        tag(
            "p",
            "Attacks look for a change that a certificate rules out. They cannot prove robustness, "
            "but each success within a radius would disprove the certificate. ",
            _effort(attack),
        ),
        _violations(attack),
        table(order, heads, rows) if rows else "",
        id_="attack",
    )


def _effort(attack: dict[str, Any]) -> str:
    """How hard was tried, as far as the file says."""
    told = [f"{name}: {_listed(attack[key])}" for key, name in EFFORT.items() if key in attack]
    if attack.get("lipschitz_assumed"):
        told.append("K was assumed for the attack, which then says nothing about a certificate")
    return ". ".join(told) + "." if told else ""


def _listed(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return ", ".join(str(entry) for entry in value)
    return f"{value:,}" if isinstance(value, int) else str(value)


def _violations(attack: dict[str, Any]) -> Html:
    """Fewer robust than certified samples is one too, whatever the list says."""
    violations, found = attack.get("violations"), attack.get("radii", {})
    fewer = [
        radius_name(float(radius))
        for radius, shares in found.items()
        if shares.get("robust", 1.0) < shares.get("certified", 0.0)
    ]
    told = f"{len(violations or []):,} predictions were changed within their radius."
    if fewer:
        told += f" Fewer samples are robust than certified at ε = {', '.join(fewer)}."
    if attack.get("lipschitz_assumed"):
        return tag("p", told)
    if violations or fewer:
        strong = tag("strong", "The certificate is violated")
        return tag("p", strong, told, class_="banner", role="alert")
    if violations is None:
        return tag("p", "attack.json does not say whether a certificate was violated.")
    return tag("p", tag("strong", "No attack succeeded within a certified radius."))


def pictures_section(
    results: SampleResults, image: Callable[[int], np.ndarray], name: Named, class_name: Named
) -> Html:
    titles = {
        "largest radii": "Right, with the largest radii",
        "smallest radii": "Right, with the smallest radii",
        "misclassified": "Wrong, with the largest radii",
    }
    content = []
    for kind, chosen in extremes(results, PICTURES).items():
        if len(chosen) == 0:
            continue
        shown = [_sample(int(one), results, image, name, class_name) for one in chosen]
        content += [tag("h3", titles[kind]), tag("div", *shown, class_="gallery")]
    return section("Samples", *content, id_="samples")


def _sample(
    sample: int,
    results: SampleResults,
    image: Callable[[int], np.ndarray],
    name: Named,
    class_name: Named,
) -> Html:
    said, is_ = (class_name(int(of[sample])) for of in (results.predictions, results.labels))
    verdict = said if results.correct[sample] else f"{said}, is {is_}"
    radius = f"r = {results.radii[sample]:.4f}"
    shown = picture(image(sample), f"{name(sample)}: predicted {said}, label {is_}, {radius}")
    caption = tag("figcaption", tag("b", verdict), BREAK, radius)
    return tag("figure", shown, caption, title=name(sample))


def attack_pictures(attacks: Sequence[Attacked], name: Named, class_name: Named) -> Html:
    if not attacks:
        return Html("")
    shown = [_attack(example, name(example.sample), class_name) for example in attacks]
    return section(
        "An attack beyond the radius beside the original",
        tag("p", "The nearest changes of the prediction that were found, for some samples."),
        tag("div", *shown, class_="attacks"),
        id_="attacked",
    )


def _attack(example: Attacked, name: str, class_name: Named) -> Html:
    before, after = class_name(example.label_before), class_name(example.label_after)
    original, attacked = _pixels(example.image), _pixels(example.attacked)
    change, factor = _amplified(attacked - original)
    trio = (
        (original, "original", before),
        (change, "change", f"× {factor}, on grey"),
        (attacked, "attacked", after),
    )
    shown = tag("div", *(_framed(*part, name) for part in trio), class_="trio")
    # A certificate speaks of all changes shorter than the radius.
    broken = example.distance < example.radius
    times = f", {example.distance / example.radius:.2f} times as far" if example.radius > 0 else ""
    told: list[Content] = [
        f"Radius {example.radius:.4f}; the prediction changes at {example.distance:.4f}{times}."
    ]
    if broken:
        told.append(tag("b", " Inside the certified radius: the certificate is violated."))
    caption = tag("figcaption", *told, BREAK, tag("code", name))
    return tag("figure", shown, caption, class_="attack broken" if broken else "attack")


def _framed(pixels: np.ndarray, what: str, label: str, name: str) -> Html:
    image = np.round(255 * pixels.clip(0, 1)).astype(np.uint8)
    caption = tag("figcaption", what, BREAK, tag("b", label))
    return tag("figure", picture(image, f"{name}, {what}: {label}", LARGEST_ATTACKED), caption)


def _pixels(image: Tensor) -> np.ndarray:
    return image.detach().cpu().double().permute(1, 2, 0).numpy()


def _amplified(change: np.ndarray) -> tuple[np.ndarray, int]:
    """The change on mid-grey, as large as can be without clipping it (a huge one as it is)."""
    largest = float(np.abs(change).max())
    factor = next((f for f in AMPLIFICATIONS if f * largest <= 0.5), 1)
    return 0.5 + factor * change, factor


def classes_section(facts: dict[str, Any], class_name: Named) -> Html:
    """All classes; of many, those with the highest and the lowest certified accuracy."""
    classes, radii = facts.get("classes") or [], list(facts["certified_accuracy"])
    if not classes:
        return Html("")
    if len(classes) <= MANY_CLASSES:
        groups = {f"All {len(classes)} classes": classes}
        note = ""
    else:
        ranked = sorted(classes, key=lambda one: _rank(one, radii), reverse=True)
        groups = {
            f"The {LISTED_CLASSES} best classes": ranked[:LISTED_CLASSES],
            f"The {LISTED_CLASSES} worst classes": ranked[-LISTED_CLASSES:],
        }
        by = f"certified accuracy at {radius_name(float(radii[0]))}" if radii else "clean accuracy"
        note = f"Of {len(classes):,} classes, by {by}; the others are in certificate.json."
    tables = [_class_table(title, chosen, radii, class_name) for title, chosen in groups.items()]
    return section("Classes", tag("p", note) if note else "", *tables, id_="classes")


def _rank(one: dict[str, Any], radii: list[str]) -> tuple[float, ...]:
    """Where equally many are certified at the first radius, the further ones decide."""
    certified = one.get("certified", {})
    return *(certified.get(radius, 0.0) for radius in radii), one.get("clean", 0.0)


def _class_table(
    title: str, classes: list[dict[str, Any]], radii: list[str], class_name: Named
) -> Html:
    heads = ["class", "samples", "clean", *(f"CRA@{radius_name(float(r))}" for r in radii)]
    rows: list[list[Content]] = []
    for one in classes:
        shares = [one.get("clean"), *(one.get("certified", {}).get(radius) for radius in radii)]
        median = one.get("median_radius")
        rows.append(
            [
                class_name(one["label"]),
                f"{one['samples']:,}" if "samples" in one else "–",
                *(bar(share, percent(share)) for share in shares),
                "–" if median is None or np.isnan(median) else f"{median:.4f}",
            ]
        )
    return table(title, [*heads, "median radius"], rows)
