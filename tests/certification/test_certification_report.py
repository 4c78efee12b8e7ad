"""The report: complete, self-contained, escaped, and honest about what is no certificate."""

import base64
import io
import re
from dataclasses import replace
from html import unescape
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from lipnext_scale.certification.certificate import Proof, SampleResults, certificate
from lipnext_scale.certification.report import Report, paper_table
from lipnext_scale.models import LipNeXt, LipNeXtConfig

EPSILONS = (36 / 255, 72 / 255, 0.5)
PROVEN = Proof(1.000003189, "float64", 1.25e-12)
NAMES = ("plane", "car", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


def image_of(sample: int) -> np.ndarray:
    return np.random.default_rng(sample).integers(0, 256, (32, 32, 3), dtype=np.uint8)


def report_of(
    classes: int = 10, right: float = 0.8, proof: Proof = PROVEN, side: int = 32, channels: int = 3
) -> Report:
    """Made-up results of 200 samples, and the certificate that follows from them."""
    chance = np.random.default_rng(0)
    labels = np.arange(200) % classes
    wrong = chance.random(200) >= right
    results = SampleResults(labels, (labels + wrong) % classes, chance.gamma(2, 0.2, 200))
    target: Any = SimpleNamespace(
        path="runs/some",
        model=LipNeXt(LipNeXtConfig(1, 16, side, 2, channels, classes)),
        weights="ab" * 32,
        data="data/x-{0..3}.tar",
        test=SimpleNamespace(resize=256, catalog=SimpleNamespace(fingerprint=lambda: "cd" * 16)),
    )
    facts = certificate(target, proof, results, EPSILONS)
    return Report(facts, results, image_of, lambda sample: f"x-0.tar: {sample:05}")


def attack_json(violations: int = 0) -> dict[str, Any]:
    shares = {"certified": 0.6125, "robust": 0.7325, "interval": [0.7015, 0.7625]}
    return {
        "clean_accuracy": 0.91,
        "radii": {"0.5": shares},
        "attacked": 1234,
        "attacks": 4321,
        "attacks_inside_the_radius": 2468,
        "restarts": 7,
        "methods": ["apgd", "pgd"],
        "steps": 77,
        "violations": [{"sample": 3}] * violations,
    }


def attacked_by(distance: float, radius: float, channels: int = 3) -> dict[str, np.ndarray]:
    images = np.full((1, channels, 32, 32), 0.5)
    attacked = images.copy()
    attacked[0, 0, 3, 4] += distance
    figures = {"samples": 7, "labels": 2, "predictions": 5, "radii": radius, "distances": distance}
    arrays = {name: np.array([value]) for name, value in figures.items()}
    return {**arrays, "images": images, "attacked": attacked}


class Page:
    """A page's text, and its tags with their attributes, as they stand in the page."""

    def __init__(self, report: Report) -> None:
        self.html = report.html()
        body = re.sub(r"<style>.*?</style>", "", self.html, flags=re.DOTALL)
        self.tags = re.findall(r"<(\w+)([^>]*)>", body)
        self.text = " ".join(unescape(re.sub(r"<[^>]*>", " ", body)).split())
        self.alts = [unescape(alt) for alt in re.findall(r' alt="([^"]*)"', body)]
        sources = re.findall(r'src="data:image/png;base64,([^"]*)"', self.html)
        decoded = [io.BytesIO(base64.b64decode(source)) for source in sources]
        self.images = [np.asarray(Image.open(one)) for one in decoded]


def test_the_page_has_every_figure_and_needs_nothing_beside_itself() -> None:
    report = report_of()
    page, facts = Page(report), report.facts
    expected = [f"{facts['clean_accuracy']:.2%}", "1.000003189", "1.2e-12", "ab" * 32, "cd" * 16]
    expected += [f"{share:.2%}" for share in facts["certified_accuracy"].values()]
    for low, high in facts["intervals"].values():
        expected.append(f"{100 * low:.2f} – {100 * high:.2f}")
    expected += [f"{row['median_radius']:.4f}" for row in facts["classes"]]
    command = "python -m lipnext_scale.certify --model runs/some --data 'data/x-{0..3}.tar'"
    expected.append(f"{command} --resize 256 --radii 36/255 72/255 0.5")
    expected.append(f"{facts['histogram']['edges'][-2]:.2f} and larger")
    assert [figure for figure in expected if figure not in page.text] == []
    outside = re.findall(r'(?:src|href|action)="(?!data:|#)|@import|url\((?!#)|<script', page.html)
    assert outside == [] and page.html.count("<svg") == 2
    assert page.html == report_of().html(), "the same certificate gives the same bytes"


def test_samples_are_shown_with_their_class_names() -> None:
    """Pixel for pixel, with name, label, prediction and radius as words."""
    report = replace(report_of(), class_names=NAMES)
    page, results = Page(report), report.results
    assert len(page.images) == len(page.alts) == 3 * 8
    best = int(np.argmax(np.where(results.correct, results.radii, -1)))
    assert np.array_equal(page.images[0], image_of(best))
    name, radius = NAMES[results.labels[best]], results.radii[best]
    assert page.alts[0] == f"x-0.tar: {best:05}: {name}, r = {radius:.4f}"
    wrong = int(np.argmax(np.where(results.correct, -1, results.radii)))
    predicted, true = (NAMES[of[wrong]] for of in (results.predictions, results.labels))
    assert f"{predicted}, is {true}" in page.text
    long = replace(report, class_names=tuple(f"{name} of a kind" for name in NAMES))
    cut = ", is ".join(f"{name} of a kind"[:8] + "…" for name in (predicted, true))
    assert long.verdict(wrong, 22) == cut


def test_text_from_outside_stays_text() -> None:
    """Whatever a name holds, the page has the same tags with the same attributes."""
    hostile = "<script>alert(1)</script>\" onload='x' {{ 7 * 6 }} $\\frac$ \udc80 &amp;"
    pages = []
    for text in ("plain", hostile):
        report = report_of(2, proof=replace(PROVEN, why_not=text))
        report.facts["model"]["path"] = report.facts["data"]["shards"] = text
        named = replace(report, name=lambda _, text=text: text, class_names=(text, text))
        report = replace(named, attack=attack_json(), attacked=attacked_by(0.4, 0.2))
        pages.append(Page(report))
        report.examples().savefig(io.BytesIO())
    expected, found = (
        [(tag, re.sub(r'"[^"]*"', "", attributes)) for tag, attributes in page.tags]
        for page in pages
    )
    assert found == expected
    assert pages[1].text.count("<script>alert(1)</script>\" onload='x' {{ 7 * 6 }}") > 5


def test_what_is_no_certificate_says_so_first() -> None:
    """With the reason, before any figure."""
    assert "Not a certificate" not in Page(report_of()).text
    report = report_of(proof=Proof(1.0, "bfloat16", why_not="a fast look"))
    page = Page(report)
    before, _, _ = page.text.partition(f"{report.facts['clean_accuracy']:.1%}")
    assert "Why: a fast look" in before and "this run (not a certificate)" in page.text
    assert "That is proven" not in page.text and "rounding is not bounded" in page.text


@pytest.mark.parametrize("right", [0.0, 1.0])
def test_nothing_right_and_nothing_wrong_are_reports_too(right: float) -> None:
    report = report_of(right=right)
    page = Page(report)
    assert len(page.images) == (8 if right == 0 else 16) and f"{right:.2%}" in page.text
    for figure in (report.curve(title=True), report.examples()):
        figure.savefig(io.BytesIO(), format="png")


def test_attacks_stand_beside_the_certified_figures() -> None:
    """Certified, robust, clean, how hard was tried, and pictures with the change amplified."""
    attacked = attacked_by(0.04, 0.02)
    page = Page(replace(report_of(), attack=attack_json(), attacked=attacked, class_names=NAMES))
    for words in ("61.25%", "73.25%", "91.00%", "70.15 – 76.25", "1,234", "apgd and pgd", "77"):
        assert words in page.text
    assert "No attack succeeded within a certified radius" in page.text
    assert "changes at 0.0400, 2.00 times as far" in page.text and "violated" not in page.text
    number = page.alts.index("x-0.tar: 00007, change: × 10, on grey")
    assert page.alts[number - 1].endswith("original: bird")
    assert page.alts[number + 1].endswith("attacked: dog")
    pixels = page.images[number]
    assert pixels[3, 4].tolist() == [round(255 * 0.9), 128, 128] and pixels[0, 0, 0] == 128


@pytest.mark.parametrize(("violations", "distance"), [(1, 0.3), (0, 0.1)])
def test_a_broken_certificate_is_not_hidden(violations: int, distance: float) -> None:
    """A listed violation, and a picture of one."""
    attacked = attacked_by(distance, 0.2, channels=1)
    report = replace(report_of(), attack=attack_json(violations), attacked=attacked)
    assert "certificate is violated" in Page(report).text


def test_the_paper_stands_beside_runs_of_its_data_sets() -> None:
    """The run first, then the paper's rows as printed; other shapes have none."""
    for classes, side in ((10, 32), (100, 32), (200, 64), (1000, 64)):
        report = report_of(classes, side=side)
        table = paper_table(report.facts, report.results)
        assert table is not None and len(table["rows"]) > 5
        assert table["rows"][0][2] == f"{report.results.share():.1%}"
    report = report_of()
    row = ["LipNeXt L32W2896", "512M", "92.7%", "81.7%", "68.6%", "55.8%", "yes"]
    assert row in paper_table(report.facts, report.results)["rows"]
    assert "92.7%" in Page(report).text
    for shape in ({"classes": 2}, {"side": 8}, {"channels": 1}):
        other = report_of(**shape)
        assert paper_table(other.facts, other.results) is None
