"""The demo reaches its figures, and the certify command writes what it says."""

import csv
import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from gloo import run_processes
from shard_making import encode, write_tar

from lipnext_scale.certify import Certifier, load_model
from lipnext_scale.certify.__main__ import main
from lipnext_scale.models import LipNeXt, LipNeXtConfig
from lipnext_scale.weights import save_export

FILES = ("certificate.json", "samples.csv", "report.html", "cra.png", "examples.png")


@pytest.mark.slow
def test_the_demo_reaches_its_figures(
    demo_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """≥ 95 % clean, ≥ 90 % certified at 36/255, ≥ 60 % at 0.5, K ≤ 1.001, and all files there."""
    main(["--run", str(demo_run), "--out", str(tmp_path)])
    found = json.loads((tmp_path / "certificate.json").read_text())
    assert found["certified"] and found["data"]["samples"] == 360
    assert found["clean_accuracy"] >= 0.95
    assert found["certified_accuracy"][str(36 / 255)] >= 0.90
    assert found["certified_accuracy"]["0.5"] >= 0.60
    assert 1 <= found["lipschitz_bound"] <= 1.001
    assert 0 < found["rounding"]["features"] < 1e-9
    printed = capsys.readouterr().out
    radii = [f"ε = {name}" for name in ("36/255", "72/255", "108/255", "0.5", "1")]
    for words in ("clean accuracy", *radii, "bound K", "float64"):
        assert words in printed
    for name in FILES:
        assert (tmp_path / name).stat().st_size > 0
    assert not list(tmp_path.glob(".*"))
    for name in ("config.yaml", "metrics.jsonl"):
        assert (demo_run / name).stat().st_size > 0
    assert list((demo_run / "tensorboard").glob("events*"))


@pytest.mark.slow
def test_any_checkpoint_of_a_run_is_certified(demo_run: Path, tmp_path: Path) -> None:
    """The newest one by its own name gives the certificate of the run."""
    newest = max((demo_run / "checkpoints").glob("step-*[0-9]"))
    found = []
    for name, path in (("run", demo_run), ("checkpoint", newest)):
        main(["--model", str(path), "--out", str(tmp_path / name)])
        found.append(json.loads((tmp_path / name / "certificate.json").read_text()))
        assert found[-1]["model"].pop("path") == str(path)
    assert found[0] == found[1]


@pytest.fixture(scope="module")
def export(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model that nobody trained, and 700 images."""
    directory = tmp_path_factory.mktemp("export")
    save_export(LipNeXt(LipNeXtConfig(2, 16, 8, 2, 3, 4), seed=0), directory / "m.safetensors")
    draw, members = np.random.default_rng(0), []
    for number in range(700):
        image = draw.integers(0, 256, (8, 8, 3), dtype=np.uint8)
        members += [(f"{number:04d}.cls", str(number % 4).encode())]
        members += [(f"{number:04d}.png", encode(image))]
    write_tar(directory / "test.tar", members)
    return directory


def arguments(export: Path, out: Path, *more: str) -> list[str]:
    model, data = str(export / "m.safetensors"), str(export / "test.tar")
    return ["--model", model, "--data", data, "--out", str(out), *more]


def test_what_is_written_is_what_the_certifier_says(export: Path, tmp_path: Path) -> None:
    """samples.csv has every sample's radius to the last digit, and the shares follow from it."""
    main(
        arguments(export, tmp_path, "--radii", "1/100", "0.02", "--json", str(tmp_path / "c.json"))
    )
    facts = json.loads((tmp_path / "certificate.json").read_text())
    assert facts == json.loads((tmp_path / "c.json").read_text())
    rows = list(csv.DictReader((tmp_path / "samples.csv").open()))
    assert [row["name"].split()[-1] for row in rows] == [f"{n:04d}" for n in range(700)]
    radii = np.array([float(row["radius"]) for row in rows])
    correct = np.array([row["correct"] == "1" for row in rows])
    assert facts["certified_accuracy"] == {
        "0.01": (correct & (radii >= 0.01)).mean(),
        "0.02": (correct & (radii >= 0.02)).mean(),
    }
    assert facts["clean_accuracy"] == correct.mean()
    assert sum(facts["histogram"]["right"]) == correct.sum()
    assert sum(facts["histogram"]["right"] + facts["histogram"]["wrong"]) == 700
    assert [row["samples"] for row in facts["classes"]] == [175] * 4
    certifier = Certifier.load(export / "m.safetensors")
    assert certifier.lipschitz_bound == facts["lipschitz_bound"]


def certify_on(rank: int, world: int, export: Path, out: Path) -> None:
    main(arguments(export, out))


@pytest.mark.slow
def test_any_number_of_processes_writes_the_same(export: Path, tmp_path: Path) -> None:
    main(arguments(export, tmp_path / "1"))
    for world in (2, 4):
        run_processes(world, certify_on, export, tmp_path / str(world))
        for name in ("certificate.json", "samples.csv", "report.html"):
            assert (tmp_path / str(world) / name).read_bytes() == (
                tmp_path / "1" / name
            ).read_bytes()


@pytest.mark.slow
def test_a_killed_command_goes_on_where_it_was(
    export: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was done is not done again, and nothing differs; other radii need no new look either."""
    main(arguments(export, tmp_path / "whole"))
    code = (
        "import time, lipnext_scale.certify.__main__ as c\n"
        "work = c._work\n"
        "c._work = lambda radii, batch: (time.sleep(1), work(radii, batch))[1]\n"
        f"c.main({arguments(export, tmp_path / 'killed')!r})\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code])
    while not list((tmp_path / "killed").glob(".certify-*/000000.npz")):
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    done = len(list((tmp_path / "killed").glob(".certify-*/*.npz")))
    assert 1 <= done < 3
    looked_at = []
    monkeypatch.setattr(
        "lipnext_scale.certify.__main__._work",
        lambda radii, batch, work=sys.modules["lipnext_scale.certify.__main__"]._work: (
            looked_at.append(len(batch.ids)),
            work(radii, batch),
        )[1],
    )
    main(arguments(export, tmp_path / "killed"))
    assert len(looked_at) == 3 - done
    for name in ("certificate.json", "samples.csv"):
        assert (tmp_path / "killed" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_bfloat16_is_a_fast_look_and_no_certificate(
    export: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(arguments(export, tmp_path, "--dtype", "bfloat16"))
    facts = json.loads((tmp_path / "certificate.json").read_text())
    assert not facts["certified"] and "bfloat16" in facts["why_not"]
    assert "NO CERTIFICATE" in capsys.readouterr().out
    assert "Not a certificate" in (tmp_path / "report.html").read_text()


@pytest.mark.slow
def test_float32_says_so(export: Path, tmp_path: Path) -> None:
    """Its radii are smaller by its rounding, which is told."""
    main(arguments(export, tmp_path, "--dtype", "float32"))
    facts = json.loads((tmp_path / "certificate.json").read_text())
    assert facts["arithmetic"] == "float32" and 1e-7 < facts["rounding"]["features"] < 1e-2


@pytest.fixture
def broken(export: Path, tmp_path: Path) -> Path:
    """A directory of things that cannot be certified."""
    model = load_model(export / "m.safetensors")
    with torch.no_grad():
        model.groups[0].bank[1, 2, 3] = float("nan")
    save_export(model, tmp_path / "nan.safetensors")
    whole = (export / "m.safetensors").read_bytes()
    (tmp_path / "cut.safetensors").write_bytes(whole[: len(whole) // 2])
    shutil.copy(export / "m.safetensors", tmp_path)
    image = np.zeros((9, 9, 3), np.uint8)
    write_tar(tmp_path / "larger.tar", [("a.cls", b"0"), ("a.png", encode(image))])
    write_tar(tmp_path / "labels.tar", [("a.cls", b"9"), ("a.png", encode(image[:8, :8]))])
    write_tar(tmp_path / "grey.tar", [("a.cls", b"0"), ("a.png", encode(image[:8, :8, 0]))])
    write_tar(tmp_path / "empty.tar", [])
    write_tar(tmp_path / "damaged.tar", [("a.cls", b"0"), ("a.png", encode(image[:8, :8])[:60])])
    return tmp_path


GOOD = ["--model", "m.safetensors", "--data", "TEST"]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--run", "nowhere"], "nowhere"),
        ([], "either --run DIR or --model PATH"),
        (["--model", "m.safetensors"], "m.safetensors: is an export and needs --data"),
        (["--run", "m.safetensors"], "m.safetensors: is an export and needs --data"),
        ([*GOOD, "--workers", "-1"], "workers = -1"),
        ([*GOOD, "--resize", "4"], "--resize 4: must be 0 or at least 8"),
        ([*GOOD, "--device", "tpu"], "tpu"),
        (["--model", "nan.safetensors", "--data", "TEST"], "not finite"),
        (["--model", "cut.safetensors", "--data", "TEST"], "cut.safetensors: is not a readable"),
        (["--model", "m.safetensors", "--data", "larger.tar"], "--data are 3×9×9; --resize makes"),
        (["--model", "m.safetensors", "--data", "labels.tar"], "labels from 9 to 9"),
        (["--model", "m.safetensors", "--data", "grey.tar"], "--data are 1×8×8"),
        (["--model", "m.safetensors", "--data", "empty.tar"], "hold no samples"),
        (["--model", "m.safetensors", "--data", "damaged.tar"], "damaged.tar"),
        (["--model", "m.safetensors", "--data", "no-*.tar"], "no-*.tar"),
        ([*GOOD, "--radii", "far"], "far"),
        ([*GOOD, "--radii=-1/4"], "-1/4"),
        ([*GOOD, "--json", "no/such/dir/c.json"], "no/such/dir"),
        ([*GOOD, "--out", "m.safetensors"], "must be a directory"),
        ([*GOOD, "--dtype", "float16"], "float16"),
    ],
)
def test_mistakes_end_in_one_line_and_exit_code_2(
    export: Path,
    broken: Path,
    given: list[str],
    said: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(broken)
    with pytest.raises(SystemExit) as stopped:
        main([str(export / "test.tar") if word == "TEST" else word for word in given])
    assert stopped.value.code == 2
    error = capsys.readouterr().err.strip().splitlines()
    assert said in error[-1] and len(error) == 1 and error[0].startswith("error: ")
    assert not list(broken.glob("**/certificate.json"))
