"""The report: complete, self-contained, escaped, and honest about what is no certificate."""

import base64
import io
import math
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from report_making import EPSILONS, attack_of, facts_of, image_of, inputs_of, made_up

from lipnext_scale.certify.certificate import SampleResults
from lipnext_scale.certify.pictures import classes_section
from lipnext_scale.certify.report import (
    ReportInputs,
    draw_curve,
    draw_examples,
    report_html,
    write_report,
)
from lipnext_scale.certify.report_parts import certified_curve, furthest_shown

VOID = {"meta", "link", "br", "img", "line", "rect", "polygon", "polyline"}


class Page(HTMLParser):
    """A page's text, its tags with their attributes, and whether they are closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open[-1:] != ["style"]:
            self.words.append(data)

    @property
    def text(self) -> str:
        return "\n".join(self.words)

    def all(self, name: str) -> list[dict[str, str | None]]:
        return [attributes for tag, attributes in self.tags if tag == name]


def test_the_page_has_every_figure() -> None:
    """Shares with their intervals, K, rounding, quantiles, versions, hashes and the command."""
    inputs = inputs_of()
    text = Page(report_html(inputs)).text
    facts = inputs.facts
    expected = [f"{facts['clean_accuracy']:.2%}", "1.000003189", "1.2e-12", "a bound of some kind"]
    expected += [f"{share:.2%}" for share in facts["certified_accuracy"].values()]
    for low, high in facts["intervals"].values():
        expected.append(f"{100 * low:.2f} – {100 * high:.2f}")
    for row in facts["classes"]:
        expected += [f"{row['median_radius']:.4f}", f"{row['clean']:.1%}"]
    expected += ["0.0625", "0.3125", "9.8.7", "2.99", "3.98", "ab" * 32, "cd" * 32, "1,234,567"]
    command = "python -m lipnext_scale.certify --run runs/some --data 'data/x-{0..3}.tar'"
    expected.append(f"{command} --resize 256 --radii 36/255 72/255 0.5")
    assert [figure for figure in expected if figure not in text] == []


def test_the_sections_come_in_their_order() -> None:
    """From the verdict to where it comes from; each has a heading that names its section."""
    inputs = replace(inputs_of(), attacks=[attack_of(0.4, 0.2)], attack={"violations": []})
    page = Page(report_html(inputs))
    order = "meaning accuracy radii paper attack samples attacked classes provenance".split()
    assert [section["aria-labelledby"] for section in page.all("section")] == order
    assert [heading["id"] for heading in page.all("h2")] == order
    assert len(page.all("h1")) == 1 and page.all("html")[0]["lang"] == "en"


def test_it_needs_nothing_beside_itself() -> None:
    """No script, nothing loaded or linked from elsewhere, and phones get their own width."""
    text = report_html(replace(inputs_of(), attacks=[attack_of(0.4, 0.2)]))
    page = Page(text)
    for _, attributes in page.tags:
        for name in ("src", "href", "srcset", "data", "action"):
            assert (attributes.get(name) or "data:").startswith("data:")
        assert not any(name.startswith("on") for name in attributes)
    assert page.all("script") == [] and "url(" not in text and "@import" not in text
    assert any(meta.get("name") == "viewport" for meta in page.all("meta"))


def test_all_images_decode_and_are_described() -> None:
    """Pixel for pixel the sample's, with its name, label, prediction and radius as words."""
    inputs = replace(inputs_of(), attacks=[attack_of(0.4, 0.2), attack_of(0.4, 0.2, grey=True)])
    images = Page(report_html(inputs)).all("img")
    assert len(images) == 3 * 8 + 2 * 3
    decoded = []
    for image in images:
        head, _, encoded = (image["src"] or "").partition(",")
        assert head == "data:image/png;base64" and image["alt"]
        decoded.append(np.asarray(Image.open(io.BytesIO(base64.b64decode(encoded)))))
    results = inputs.results
    best = int(np.argmax(np.where(results.correct, results.radii, -1)))
    assert np.array_equal(decoded[0], image_of(best))
    label, radius = results.labels[best], results.radii[best]
    wanted = f"x-0.tar {best:05}: predicted {label}, label {label}, r = {radius:.4f}"
    assert images[0]["alt"] == wanted


def test_large_images_are_shrunk_but_not_changed_in_shape() -> None:
    """A photograph of 300 × 300 takes at most 160 pixels in the page."""
    large = np.zeros((300, 300, 3), dtype=np.uint8)
    images = Page(report_html(replace(inputs_of(), image=lambda _: large))).all("img")
    assert {(image["width"], image["height"]) for image in images} == {("160", "160")}


def _named(where: str, text: str) -> ReportInputs:
    """A small report with a text in one of the places that come from outside."""
    results = made_up(2, samples=3)
    facts = facts_of(results, 2)
    small = np.zeros((2, 2, 3), dtype=np.uint8)
    inputs = ReportInputs(facts, results, lambda _: small, str, [attack_of(0.4, 0.2)], None)
    if where == "name":
        return replace(inputs, name=lambda _: text)
    if where == "class":
        return replace(inputs, class_names=[text] * 2)
    if where == "why_not":
        facts["why_not"], facts["certified"] = text, False
    else:
        facts["model" if where == "path" else "data"][where] = text
    return inputs


@pytest.mark.parametrize("where", ["path", "shards", "name", "class", "why_not"])
@settings(max_examples=6, deadline=None)
@given(st.text(alphabet=st.one_of(st.sampled_from("<>&\"'/= "), st.characters())))
def test_text_from_outside_stays_text(where: str, hostile: str) -> None:
    """Whatever a name holds, the page has the same tags with the same attributes."""
    expected = Page(report_html(_named(where, "plain")))
    hostile = f"<script>alert(1)</script>\" onload='x' {hostile}"
    found = Page(report_html(_named(where, hostile)))
    assert [(tag, set(attributes)) for tag, attributes in found.tags] == [
        (tag, set(attributes)) for tag, attributes in expected.tags
    ]
    assert "<script>alert(1)</script>\" onload='x'" in found.text


def test_what_is_no_certificate_says_so_first() -> None:
    """A banner with the reason, before any figure; a certificate has none."""
    assert "Not a certificate" not in Page(report_html(inputs_of())).text
    for why in ("a fast look in bfloat16", ""):
        inputs = inputs_of()
        inputs.facts.update(certified=False, why_not=why)
        page = Page(report_html(inputs))
        assert [p for p in page.all("p") if p.get("class") == "banner" and p["role"] == "alert"]
        before, _, _ = page.text.partition(f"{inputs.facts['clean_accuracy']:.1%}")
        assert f"Why: {why or 'the certificate does not say'}" in before
        assert "That is proven" not in page.text and "Certificate of" not in page.text


def test_unbounded_rounding_is_not_called_accounted_for() -> None:
    """A fast look has no bound of it."""
    inputs = inputs_of()
    inputs.facts["rounding"] = None
    text = Page(report_html(inputs)).text
    assert "rounding is not bounded" in text and "accounted for" not in text


@pytest.mark.parametrize(("classes", "tables"), [(2, 1), (50, 1), (51, 2), (1000, 2)])
def test_many_classes_are_cut_to_the_best_and_the_worst(classes: int, tables: int) -> None:
    """Up to fifty all are listed; of more, ten and ten, by certified accuracy."""
    inputs = inputs_of(classes, samples=2 * classes)
    part = Page(classes_section(inputs.facts, str))
    assert len(part.all("table")) == tables
    rows = [th for th in part.all("th") if th.get("scope") == "row"]
    assert len(rows) == (classes if tables == 1 else 20)
    assert ("certificate.json" in part.text) == (tables == 2)


def test_the_best_classes_are_those_with_the_highest_certified_accuracy() -> None:
    """Of sixty, the ten at each end."""
    inputs = inputs_of(60, samples=120)
    for row in inputs.facts["classes"]:
        row["certified"] = {key: row["label"] / 60 for key in row["certified"]}
    text = Page(classes_section(inputs.facts, "class {}".format)).text
    best, worst = text.split("The 10 worst classes")
    for label in range(60):
        assert (f"class {label}\n" in best) == (label >= 50)
        assert (f"class {label}\n" in worst) == (label < 10)


@pytest.mark.parametrize("right", [0.0, 1.0])
def test_nothing_right_and_nothing_wrong_are_reports_too(right: float, tmp_path: Path) -> None:
    """Without a right sample or without a wrong one, and the pictures as well."""
    inputs = inputs_of(right=right)
    inputs.facts["quantiles"] = {} if right == 0 else inputs.facts["quantiles"]
    for row in inputs.facts["classes"]:
        row["median_radius"] = None if right == 0 else row["median_radius"]
    page = Page(report_html(inputs))
    assert len(page.all("img")) == (8 if right == 0 else 16)
    assert f"{right:.2%}" in page.text
    draw_curve(tmp_path / "cra.png", inputs.facts, inputs.results)
    draw_examples(tmp_path / "examples.png", inputs.results, inputs.image)
    for path in tmp_path.iterdir():
        assert len(np.unique(np.asarray(Image.open(path)))) > 10


def test_only_what_the_certificate_must_have_is_needed() -> None:
    """Accuracies and K alone make a page, and an attack without a word in it as well."""
    inputs = inputs_of()
    needed = ("clean_accuracy", "certified_accuracy", "lipschitz_bound")
    facts = {key: inputs.facts[key] for key in needed}
    page = Page(report_html(replace(inputs, facts=facts, attack={})))
    assert "1.000003189" in page.text
    assert "attack.json does not say" in page.text


def test_what_the_report_does_not_know_is_shown_as_it_is() -> None:
    """A key of a later format is not dropped."""
    inputs = inputs_of()
    inputs.facts["unheard_of"] = {"deep": 4711}
    text = Page(report_html(replace(inputs, attack={"also_new": 8150}))).text
    assert '"deep": 4711' in text and '"also_new": 8150' in text


def _attacked(robust: float, violations: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "clean_accuracy": 0.91,
        "radii": {"0.5": {"certified": 0.6125, "robust": robust, "interval": [0.7015, 0.7625]}},
        "attacked": 1234,
        "restarts": 7,
        "methods": ["apgd", "pgd"],
        "steps": 77,
        "violations": violations,
    }


def test_attacks_stand_beside_the_certified_figures() -> None:
    """Certified, robust, clean, how hard was tried, and that no certificate broke."""
    text = Page(report_html(replace(inputs_of(), attack=_attacked(0.7325, [])))).text
    for said in ("61.25%", "73.25%", "91.00%", "70.15 – 76.25", "1,234", "apgd, pgd", "77"):
        assert said in text
    assert "No attack succeeded within a certified radius" in text and "violated" not in text


@pytest.mark.parametrize(("robust", "violations"), [(0.7, [{"sample": 3}]), (0.6, [])])
def test_a_broken_certificate_is_not_hidden(robust: float, violations: list[Any]) -> None:
    """A listed violation, or fewer robust samples than certified ones."""
    text = Page(report_html(replace(inputs_of(), attack=_attacked(robust, violations)))).text
    assert "The certificate is violated" in text and "No attack succeeded" not in text


def test_an_attack_is_shown_beside_its_original() -> None:
    """Original, the change amplified around grey by the factor that is told, and the attacked."""
    inputs = replace(inputs_of(), attacks=[attack_of(0.04, 0.02)], class_names=list("abcdefghij"))
    page = Page(report_html(inputs))
    assert "the prediction changes at 0.0400, 2.00 times as far" in page.text
    assert "× 10, on grey" in page.text and "violated" not in page.text
    original, change, attacked = page.all("img")[-3:]
    assert (original["alt"] or "").endswith("original: c")
    assert (attacked["alt"] or "").endswith("attacked: f")
    source = (change["src"] or "").partition(",")[2]
    pixels = np.asarray(Image.open(io.BytesIO(base64.b64decode(source))))
    assert pixels[3, 4].tolist() == [round(255 * 0.9), 128, 128] and pixels[0, 0, 0] == 128


def test_an_attack_inside_the_radius_is_called_a_violation() -> None:
    """A picture of one is not passed off as an attack beyond the radius."""
    inputs = replace(inputs_of(), attacks=[attack_of(0.3, 0.4)])
    assert "the certificate is violated" in Page(report_html(inputs)).text


def test_the_file_is_written_whole_whatever_the_names_are(tmp_path: Path) -> None:
    """A file name that is not valid Unicode too, and nothing else is left there."""
    path = tmp_path / "report.html"
    write_report(path, replace(inputs_of(), name=lambda _: "x-\udc80.tar"))
    assert path.read_text(encoding="utf-8").endswith("</html>\n")
    assert list(tmp_path.iterdir()) == [path]


def test_pictures_take_only_the_images_they_show(tmp_path: Path) -> None:
    """Of 5,000 samples 24 are decoded."""
    taken = []

    def image(sample: int) -> np.ndarray:
        taken.append(sample)
        return image_of(sample)[:, :, :1]

    draw_examples(tmp_path / "examples.png", made_up(10, 5000), image)
    assert len(taken) == 24 and (tmp_path / "examples.png").stat().st_size > 0


@given(st.lists(st.tuples(st.booleans(), st.floats(0, 1e4)), min_size=1, max_size=40))
def test_the_curve_is_the_certified_share_within_its_interval(
    samples: list[tuple[bool, float]],
) -> None:
    """At every radius, those of samples included, and the axis holds all radii that are asked."""
    right, radii = (np.array(column) for column in zip(*samples, strict=True))
    results = SampleResults(np.ones(len(samples)), right.astype(float), radii)
    at = np.concatenate([radii, [0.0, 0.5]])
    curve = certified_curve(results, at)
    assert curve.share.tolist() == pytest.approx([results.share(radius) for radius in at])
    assert (curve.low <= curve.share + 1e-12).all() and (curve.share <= curve.high + 1e-12).all()
    end = furthest_shown(results, EPSILONS)
    assert end > max(EPSILONS) and math.isfinite(end)
