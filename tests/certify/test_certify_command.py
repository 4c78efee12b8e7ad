"""The demo reaches its figures, and the certify command writes what it says."""

import json
from pathlib import Path

import pytest

from lipnext_scale.certify.__main__ import main

pytestmark = pytest.mark.slow


def test_the_demo_reaches_its_figures(demo_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """≥ 95 % clean, ≥ 90 % certified at 36/255, ≥ 60 % at 0.5, K ≤ 1.001, and all files there."""
    main(["--run", str(demo_run)])
    found = json.loads((demo_run / "certificate.json").read_text())
    assert found["samples"] == 360
    assert found["clean_accuracy"] >= 0.95
    assert found["certified_accuracy"][str(36 / 255)] >= 0.90
    assert found["certified_accuracy"]["0.5"] >= 0.60
    assert 1 <= found["lipschitz_bound"] <= 1.001
    printed = capsys.readouterr().out
    for words in (
        "clean accuracy",
        "ε = 36/255",
        "ε = 72/255",
        "ε = 108/255",
        "ε = 0.5",
        "bound K",
    ):
        assert words in printed
    for name in ("config.yaml", "metrics.jsonl", "cra.png", "examples.png"):
        assert (demo_run / name).stat().st_size > 0
    assert list((demo_run / "tensorboard").glob("events*"))
    assert list((demo_run / "checkpoints").glob("step-*[0-9]"))


def test_radii_and_json_are_the_users_choice(demo_run: Path, tmp_path: Path) -> None:
    out = tmp_path / "c.json"
    main(["--run", str(demo_run), "--json", str(out), "--radii", "1/4", "1", "--dtype", "float32"])
    found = json.loads(out.read_text())
    assert list(found["certified_accuracy"]) == ["0.25", "1.0"]
    assert found["arithmetic"] == "float32"
    assert found["certified_accuracy"]["0.25"] > found["certified_accuracy"]["1.0"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--run", "nowhere"], "nowhere"),
        (["--run", "RUN", "--radii", "far"], "far"),
        (["--run", "RUN", "--radii=-1/4"], "-1/4"),
        (["--run", "RUN", "--json", "no/such/dir/c.json"], "no/such/dir"),
    ],
)
def test_mistakes_end_in_one_line_and_exit_code_2(
    demo_run: Path, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([str(demo_run) if word == "RUN" else word for word in arguments])
    assert stopped.value.code == 2
    error = capsys.readouterr().err.strip().splitlines()
    assert said in error[-1] and len(error) == 1 and error[0].startswith("error: ")
