"""Tables of runs in groups: means, spreads and the best."""

import csv
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from training.small import small_recipe

from lipnext_scale.certification.certificate import SampleResults
from lipnext_scale.studies.comparison import Run, write_tables
from lipnext_scale.study import by_settings


def run(radii: list[float], seed: int = 0, seconds: float = 10.0, **changes: object) -> Run:
    """All predictions are right but those of radius -1."""
    found = np.array(radii)
    results = SampleResults(np.zeros(len(found), int), (found < 0).astype(int), found)
    facts = {
        "certified": True,
        "arithmetic": "float64",
        "lipschitz_bound": 1.0,
        "certified_accuracy": {"0.5": 0.0},
        "data": {"samples": len(found), "resize": 0, "fingerprint": "0" * 64},
        "model": {"path": "runs/x", "parameters": 1234},
    }
    settings = [f"{key}={value}" for key, value in changes.items()]
    recipe = small_recipe(Path("runs/x"), f"run.seed={seed}", *settings)
    return Run("x", Path("runs/x"), recipe, (facts, results), 30, seconds, 0.5)


def test_mean_spread_and_best(tmp_path):
    one = [run([1, 1, 1, 0, -1, -1, -1, -1, -1, -1]), run([1, 0, 0, 0, 0, 0, -1, -1, -1, -1])]
    two = [run([1, 1, 1, 1, 1, -1, -1, -1, -1, -1], seconds=20), run([0, 0, 0, 0, 0] + [-1] * 5)]
    shown = write_tables(tmp_path, "title", {"a_b": one, "c": two}, ["a note"])
    page = (tmp_path / "table.md").read_text()
    # Clean is 40 % and 60 %, and twice 50 %: the means are equal, so none is the best.
    assert "| a_b | 2 | 50.00% ± 14.14% | 20.00% ± 14.14% | 1.000000 | 30 | **0:10** |" in page
    assert "| c | 2 | 50.00% | **25.00%** ± 35.36% | 1.000000 | 30 | 0:15 ± 0:07 |" in page
    assert "- a note\n" in page and "**" not in "".join(shown)
    tex = (tmp_path / "table.tex").read_text()
    assert r"a\_b & 2 & 50.00\% $\pm$ 14.14\% &" in tex
    assert r"& \textbf{25.00\%} $\pm$ 35.36\% &" in tex and tex.count("\\\\\n") == 3
    with (tmp_path / "table.csv").open(newline="") as file:
        first, second = csv.DictReader(file)
    assert float(first["clean"]) == 0.5 == float(second["clean"])
    assert float(first["clean s.d."]) == pytest.approx(0.02**0.5)
    assert float(second["training time"]) == 15 and second["parameters"] == "1234.0"
    for name in ("curves.png", "tradeoffs.png"):
        assert Image.open(tmp_path / name).width > 900


def test_violations_are_of_what_was_attacked_and_many_rows_are_one_picture(tmp_path):
    found = [replace(run([1.0]), attack={"violations": [{}] * number}) for number in (0, 3)]
    groups = {"both": found, "not attacked": [run([1.0])]}
    groups |= {str(number): [run([1.0])] for number in range(20)}
    write_tables(tmp_path, "title", groups, [])
    with (tmp_path / "table.csv").open(newline="") as file:
        first, second, *_ = csv.DictReader(file)
    assert float(first["violations"]) == 1.5 and second["violations"] == ""
    assert [path.name for path in tmp_path.glob("*.png")] == ["rows.png"]
    assert "![](rows.png)" in (tmp_path / "table.md").read_text()


def test_runs_are_grouped_by_what_differs_beside_the_seed():
    runs = [
        run([1.0], seed, **{"optim.lr": lr, "run.log_every": seed + 1})
        for lr in (0.01, 0.02)
        for seed in (0, 1)
    ]
    assert by_settings(runs) == {"lr=0.01": runs[:2], "lr=0.02": runs[2:]}
    assert [*by_settings(runs[:2])] == ["all"]
