"""report.html: the certificate as one page that needs nothing beside itself."""

import json
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lipnext_scale.certify.certificate import SampleResults, radius_name
from lipnext_scale.certify.paper import (
    SOURCE,
    PaperRow,
    comparison_radii,
    comparison_table,
    data_set_of,
)
from lipnext_scale.certify.pictures import (
    Attacked,
    attack_pictures,
    attack_section,
    classes_section,
    draw_curve,
    draw_examples,
    interval_text,
    percent,
    pictures_section,
)
from lipnext_scale.certify.report_parts import (
    Content,
    Html,
    curve_chart,
    facts_list,
    histogram_chart,
    page,
    section,
    table,
    tag,
)
from lipnext_scale.files import write_atomically
from lipnext_scale.weights import SUFFIX, is_export

__all__ = ["ReportInputs", "draw_curve", "draw_examples", "write_report"]

NOTHING = Html("")
# Long, and shown as a chart or a table already.
NOT_REPEATED = ("classes", "histogram")

PROMISE = (
    "Every test image has a radius: no change of the image that is shorter than it, in the l2 norm "
    "over all pixels in [0, 1], can change the prediction. That is proven, whatever the attack. "
)
NO_PROMISE = (
    "These are the figures that a certificate would have, found in a way that proves nothing: do "
    "not quote them as certified. "
)


@dataclass(frozen=True)
class ReportInputs:
    """facts, attack: the content of certificate.json and attack.json.

    image, name: the HWC uint8 image, and the shard and key, of a sample number.
    """

    facts: dict[str, Any]
    results: SampleResults
    image: Callable[[int], np.ndarray]
    name: Callable[[int], str]
    attacks: Sequence[Attacked]
    attack: dict[str, Any] | None
    class_names: list[str] | None = None

    def class_name(self, label: int) -> str:
        names = self.class_names or []
        return names[label] if 0 <= label < len(names) else str(label)


def write_report(path: Path, inputs: ReportInputs) -> None:
    # File names need not be valid Unicode.
    write_atomically(path, report_html(inputs).encode(errors="backslashreplace"))


def report_html(inputs: ReportInputs) -> str:
    facts, results = inputs.facts, inputs.results
    return page(
        f"{_kind(facts)}: {facts.get('model', {}).get('path', 'model')}",
        _title(facts, results),
        _meaning(facts, results),
        _accuracy(facts, results),
        _radii(facts),
        _comparison(facts, results),
        attack_section(inputs.attack) if inputs.attack is not None else NOTHING,
        pictures_section(results, inputs.image, inputs.name, inputs.class_name),
        attack_pictures(inputs.attacks, inputs.name, inputs.class_name),
        classes_section(facts, inputs.class_name),
        _provenance(facts, inputs.attack),
    )


def _kind(facts: dict[str, Any]) -> str:
    return "Certificate" if facts.get("certified") else "Not a certificate"


def _title(facts: dict[str, Any], results: SampleResults) -> Html:
    """What was certified, and the figures that most people come for."""
    model, data = facts.get("model", {}), facts.get("data", {})
    intervals = facts.get("intervals", {})
    tiles = [_tile("clean", percent(facts["clean_accuracy"]), intervals.get("clean"), "plain")]
    kind = None if facts.get("certified") else "plain"
    for radius, share in facts["certified_accuracy"].items():
        name = f"CRA@{radius_name(float(radius))}"
        tiles.append(_tile(name, percent(share), intervals.get(radius), kind))
    bound = "Lipschitz bound" if facts.get("certified") else "taken as bound"
    tiles.append(_tile("K", f"{facts['lipschitz_bound']:.6f}", None, "plain bound", bound))
    what = f"{model.get('path', 'model')} on {data.get('shards', 'its test set')}"
    return tag(
        "header",
        tag("h1", f"{_kind(facts)} of robustness" if facts.get("certified") else _kind(facts)),
        tag("p", tag("code", what), f", {len(results):,} samples", class_="faint"),
        _banner(facts),
        tag("ul", *tiles, class_="verdict"),
    )


def _tile(
    name: str, figure: str, interval: list[float] | None, kind: str | None, below: str = ""
) -> Html:
    below = f"95 %: {interval_text(interval)}" if interval is not None else below
    return tag("li", tag("span", name), tag("b", figure), tag("span", below), class_=kind)


def _banner(facts: dict[str, Any]) -> Html:
    if facts.get("certified"):
        return NOTHING
    why = facts.get("why_not") or "the certificate does not say that its radii are proven"
    return tag(
        "p", tag("strong", "Not a certificate"), f"Why: {why}.", class_="banner", role="alert"
    )


def _meaning(facts: dict[str, Any], results: SampleResults) -> Html:
    """What the figures promise, for somebody who has not read the paper."""
    proven = bool(facts.get("certified"))
    counted = (
        f"Certified robust accuracy at ε (CRA@ε) is the share of all {len(results):,} samples that "
        "are classified correctly with a radius of at least ε."
    )
    bound = f"The radii follow from K = {facts['lipschitz_bound']:.9f}, a Lipschitz bound of the "
    bound += "features that is proven from the stored weights. " if proven else "features. "
    forward = f"The network computed in {facts.get('arithmetic', 'an unknown arithmetic')}"
    return section(
        "What this certifies" if proven else "What this does not certify",
        tag("p", PROMISE if proven else NO_PROMISE, counted),
        tag("p", bound, forward, _rounding(facts)),
        id_="meaning",
    )


def _rounding(facts: dict[str, Any]) -> str:
    rounding = facts.get("rounding") or {}
    size, method = rounding.get("features"), rounding.get("method")
    if size is None and not method:
        return ", whose rounding is not bounded."
    text = ", and rounding is accounted for"
    text += f": computed features are within {size:.1e} of exact ones" if size is not None else ""
    return text + (f" ({method})." if method else ".")


def _accuracy(facts: dict[str, Any], results: SampleResults) -> Html:
    certified = {float(radius): share for radius, share in facts["certified_accuracy"].items()}
    heads = ("radius ε", "accuracy", "95 % interval", "samples", "ε as a number")
    told = "Accuracy over the radius; shaded: 95 % confidence (Wilson, point by point)."
    if results.correct.any():
        told += f" The largest radius of a right prediction is {_largest(results):.4f}."
    return section(
        "Certified robust accuracy" if facts.get("certified") else "Accuracy over the radius",
        table(
            f"Of {len(results):,} samples: right, with a radius ≥ ε", heads, _shares(facts, results)
        ),
        tag("figure", curve_chart(results, certified), tag("figcaption", told)),
        id_="accuracy",
    )


def _shares(facts: dict[str, Any], results: SampleResults) -> list[list[str]]:
    """Clean accuracy and that at each radius, a row each."""
    shares = {"clean": facts["clean_accuracy"], **facts["certified_accuracy"]}
    rows = []
    for key, share in shares.items():
        radius = 0.0 if key == "clean" else float(key)
        interval = interval_text(facts.get("intervals", {}).get(key), 2)
        samples = f"{round(share * len(results)):,}"
        name = key if key == "clean" else radius_name(radius)
        rows.append([name, percent(share, 2), interval, samples, f"{radius:.4f}"])
    return rows


def _largest(results: SampleResults) -> float:
    return float(results.radii[results.correct].max())


def _radii(facts: dict[str, Any]) -> Html:
    """How the radii are distributed, of right and of wrong predictions."""
    content = []
    if histogram := facts.get("histogram"):
        right, wrong = sum(histogram["right"]), sum(histogram["wrong"])
        caption = tag(
            "figcaption",
            _key("right", f"upwards: {right:,} right predictions"),
            _key("wrong", f"downwards: {wrong:,} wrong ones"),
        )
        content.append(tag("figure", histogram_chart(histogram), caption))
    if quantiles := facts.get("quantiles"):
        heads = ["share of right predictions", *(f"{float(share):.0%}" for share in quantiles)]
        row = ["have a radius below", *(f"{radius:.4f}" for radius in quantiles.values())]
        content.append(table("Quantiles of the radii of right predictions", heads, [row]))
    return section("Radii", *content, id_="radii") if content else NOTHING


def _key(kind: str, text: str) -> Html:
    return tag("span", tag("span", class_=f"key {kind}"), text, class_="entry")


def _comparison(facts: dict[str, Any], results: SampleResults) -> Html:
    rows = comparison_table(facts, results)
    if not rows:
        return NOTHING
    name, radii = data_set_of(facts), comparison_radii(rows)
    heads = ["model", "size", "clean"]
    heads += [*(f"CRA@{radius_name(radius)}" for radius in radii), "generated data"]
    note = (
        f"All rows but the first are as printed in the paper ({SOURCE}), prior work included; none "
        f"was measured here. They compare only if the test set is that of {name}: it is taken for "
        "it because of its number of classes and image size. A gap is a figure that the paper does "
        "not have."
    )
    cells = [_comparison_cells(row, radii) for row in rows]
    return section(
        f"Beside the paper's figures on {name}",
        tag("p", note),
        table(f"{name}: this run, and the paper's table", heads, cells, frozenset({0})),
        id_="paper",
    )


def _comparison_cells(row: PaperRow, radii: list[float]) -> list[Content]:
    extra = {True: "yes", False: "no", None: "–"}[row.extra_data]
    shares = [row.clean, *(row.certified.get(radius) for radius in radii)]
    name = tag("b", row.name) if row.of == "LipNeXt" else row.name
    return [name, row.parameters, *(percent(share) for share in shares), extra]


def _provenance(facts: dict[str, Any], attack: dict[str, Any] | None) -> Html:
    """What was certified, by what, and how to do it again; then everything else that is known."""
    model, data = facts.get("model", {}), facts.get("data", {})
    entries = [
        ("model", model.get("path")),
        ("weights (sha256)", model.get("weights")),
        ("parameters", f"{model['parameters']:,}" if "parameters" in model else None),
        ("architecture", _pairs(model.get("architecture", {}))),
        ("test shards", data.get("shards")),
        ("data fingerprint", data.get("fingerprint")),
        ("images resized to", data.get("resize") or "no resizing"),
        ("arithmetic", facts.get("arithmetic")),
        ("Lipschitz bound K", repr(facts["lipschitz_bound"])),
        ("versions", _pairs(facts.get("versions", {}))),
    ]
    shown = [(name, tag("code", value)) for name, value in entries if value]
    rest = {key: value for key, value in facts.items() if key not in NOT_REPEATED}
    return section(
        "Where this comes from",
        facts_list(shown),
        tag("p", "To make it again:"),
        tag("pre", tag("code", _command(facts)), class_="wrap"),
        tag("p", "Radii of all samples are in samples.csv, all figures in certificate.json."),
        _as_json("certificate.json, without classes and histogram", rest),
        _as_json("attack.json", attack) if attack is not None else NOTHING,
        id_="provenance",
    )


def _pairs(values: dict[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in values.items())


def _as_json(title: str, values: dict[str, Any]) -> Html:
    text = tag("pre", json.dumps(values, indent=2, ensure_ascii=False, default=str), tabindex=0)
    return tag("details", tag("summary", title), text)


def _command(facts: dict[str, Any]) -> str:
    model, data = facts.get("model", {}), facts.get("data", {})
    path = str(model.get("path", "MODEL"))
    of_export = path.endswith(SUFFIX) or is_export(Path(path))
    words = ["python", "-m", "lipnext_scale.certify", "--model" if of_export else "--run", path]
    if "shards" in data:
        words += ["--data", str(data["shards"])]
    if data.get("resize"):
        words += ["--resize", str(data["resize"])]
    if facts.get("arithmetic", "float64") != "float64":
        words += ["--dtype", str(facts["arithmetic"])]
    radii = [radius_name(float(radius)) for radius in facts["certified_accuracy"]]
    return shlex.join([*words, "--radii", *radii])
