"""`python -m lipnext_scale.compare`: settings that differ, and certificates side by side."""

import csv
import json
import shutil
from pathlib import Path

import pytest
from PIL import Image
from training.small import small_recipe

from lipnext_scale.certification.certificate import read_results
from lipnext_scale.certify import main as certify
from lipnext_scale.compare import main
from lipnext_scale.training.trainer import Trainer


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """a and b, certified at other radii; c, which is not certified."""
    directory = tmp_path_factory.mktemp("compare")
    for name, width in (("a", 16), ("b", 32)):
        settings = ["run.max_steps=2", f"model.width={width}"]
        Trainer(small_recipe(directory / name, *settings)).run()
    shutil.copytree(directory / "a", directory / "c", symlinks=True)
    certify(["--run", str(directory / "a"), "--radii", "0.1", "36/255"])
    certify(["--run", str(directory / "b"), "--radii", "0.2"])
    return directory


def compared(runs: Path, out: Path, *names: str) -> tuple[list[dict[str, str]], str]:
    """(rows of compare.csv, compare.md); the picture is there."""
    main([*(str(runs / name) for name in names), "--out", str(out)])
    assert Image.open(out / "compare.png").width > 900
    with (out / "compare.csv").open(newline="") as file:
        return list(csv.DictReader(file)), (out / "compare.md").read_text()


def test_certified_runs_and_one_without_a_certificate(runs, tmp_path, capsys):
    rows, page = compared(runs, tmp_path / "out", "a", "b", "c")
    shown = capsys.readouterr().out
    assert list(rows[0])[:6] == ["run", "model.width", "clean", "CRA@0.1", "CRA@36/255", "CRA@0.2"]
    for row in rows[:2]:
        facts = json.loads((runs / row["run"] / "certificate.json").read_text())
        results = read_results(runs / row["run"] / "samples.csv")
        assert float(row["clean"]) == facts["clean_accuracy"]
        assert float(row["K"]) == facts["lipschitz_bound"]
        # Also at radii that the certificate of the other run reports.
        for radius, column in ((0.1, "CRA@0.1"), (36 / 255, "CRA@36/255"), (0.2, "CRA@0.2")):
            assert float(row[column]) == results.share(radius)
        assert row["steps"] == "2" and float(row["training time"]) > 0
    assert [row["model.width"] for row in rows] == ["16", "32", "16"]
    assert rows[2]["clean"] == rows[2]["K"] == "" and rows[2]["steps"] == "2"
    for text in (shown, page):
        table = [line.replace("|", " ").split() for line in text.splitlines()]
        assert ["model.width", "16", "32", "16"] in table
        assert ["clean", *(f"{float(row['clean']):.2%}" for row in rows[:2]), "–"] in table
        command = f"python -m lipnext_scale.certify --run {runs / 'c'}"
        assert f"c: no certificate; this makes one: {command}" in text
        assert "arithmetic: float64" in text and "not comparable" not in text


def test_many_runs_stand_one_below_the_other(runs, tmp_path, capsys):
    compared(runs, tmp_path, *"aabababbbbabababa")
    first = capsys.readouterr().out.splitlines()[0].split()
    assert first[:3] == ["run", "model.width", "clean"]


def test_other_test_sets_and_arithmetic_are_named(runs, tmp_path):
    for name in ("look", "train"):
        shutil.copytree(runs / "a", tmp_path / name, symlinks=True)
    look, train = (str(tmp_path / name) for name in ("look", "train"))
    certify(["--run", look, "--dtype", "bfloat16", "--out", look])
    newest = str(max((tmp_path / "train" / "checkpoints").glob("step-*[0-9]")))
    certify(["--run", newest, "--data", "builtin:digits/train-*.tar.gz", "--out", train])
    paths = ("a", look, train)
    rows, page = compared(runs, tmp_path / "out", *paths)
    sets = [row["test set"] for row in rows]
    assert sets[0] == sets[1] != sets[2] and sets[2].startswith("1,437 samples, ")
    arithmetic = ["float64", "bfloat16 (NO CERTIFICATE)", "float64"]
    assert [row["arithmetic"] for row in rows] == arithmetic
    assert f"| arithmetic | {' | '.join(arithmetic)} |" in page
    assert f"| test set | {' | '.join(sets)} |" in page
    assert "certified on different test sets: their figures are not comparable" in page
    assert "certified in different arithmetic: their figures are not comparable" in page
    assert "train: the certificate is of step-000000002" in page


def test_time_adds_up_over_processes(runs, tmp_path):
    """`seconds` of the records begins anew with each; batches are of 400 images."""
    shutil.copytree(runs / "a", tmp_path / "a", symlinks=True)
    records = [(4, 9.0, 800.0), (8, 11.0, 800.0), (12, 60.0, 100.0)]
    lines = [
        json.dumps({"step": step, "seconds": seconds, "images_per_second": rate})
        for step, seconds, rate in records
    ]
    (tmp_path / "a" / "metrics.jsonl").write_text("\n".join([*lines, '{"step": 12}\n']))
    (row,), _ = compared(tmp_path, tmp_path / "out", "a")
    assert row["steps"] == "12" and float(row["training time"]) == 2 + 2 + 16


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["{runs}/a", "{runs}"], "is not a run directory (it has no config.yaml)"),
        (["{runs}/a", "{runs}/none"], "none: no such run directory"),
        (["{runs}/a", "--out", "{runs}/a/config.yaml"], "config.yaml: is a file; must be a direct"),
        ([], "the following arguments are required: RUN"),
    ],
)
def test_a_mistake_is_one_line(runs, tmp_path, monkeypatch, capsys, arguments, said):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stopped:
        main([text.format(runs=runs) for text in arguments])
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and said in error
    assert not list(tmp_path.iterdir())


def test_a_certificate_that_was_edited_is_refused_in_a_line(runs, tmp_path, capsys):
    shutil.copytree(runs / "a", tmp_path / "a", symlinks=True)
    path = tmp_path / "a" / "certificate.json"
    facts = json.loads(path.read_text())
    del facts["arithmetic"], facts["data"]["resize"]
    path.write_text(json.dumps(facts))
    for command in (lambda: main([str(path.parent)]), lambda: certify(["--run", str(path.parent)])):
        with pytest.raises(SystemExit, match="2"):
            command()
        assert f"error: {path}: lacks arithmetic, resize; remove it" in capsys.readouterr().err
    assert json.loads(path.read_text()) == facts
