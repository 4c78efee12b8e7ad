"""The demo reaches its figures, and the certify command writes what the certifier finds."""

import argparse
import csv
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from gloo import run_processes
from sets_making import write_set
from shard_making import encode, write_tar
from training.small import small_recipe

from lipnext_scale import certify
from lipnext_scale.attack import main as attack
from lipnext_scale.certification.certificate import add_arguments, open_target, read_results
from lipnext_scale.certify import Certifier, load_model, main
from lipnext_scale.checkpoint.exports import save_export
from lipnext_scale.config.recipe import load_recipe
from lipnext_scale.data import TestBatch
from lipnext_scale.models import LipNeXt, LipNeXtConfig
from lipnext_scale.training.trainer import Trainer

FILES = ("certificate.json", "samples.csv", "report.html", "cra.png", "examples.png")


def read_certificate(directory: Path) -> dict:
    return json.loads((directory / "certificate.json").read_text())


@pytest.mark.slow
def test_the_demo_reaches_its_figures(demo_run: Path, tmp_path: Path) -> None:
    """≥ 95 % clean, ≥ 90 % certified at 36/255, ≥ 60 % at 0.5, K ≤ 1.001, and all files there.

    The newest checkpoint by its own name gives the certificate of the run.
    """
    main(["--run", str(demo_run), "--out", str(tmp_path / "run")])
    found = read_certificate(tmp_path / "run")
    assert found["certified"] and found["data"]["samples"] == 360
    assert found["clean_accuracy"] >= 0.95
    assert found["certified_accuracy"][str(36 / 255)] >= 0.90
    assert found["certified_accuracy"]["0.5"] >= 0.60
    assert 1 <= found["lipschitz_bound"] <= 1.001
    assert 0 < found["rounding"]["features"] < 1e-9
    assert {path.name for path in (tmp_path / "run").iterdir()} == {*FILES}
    newest = max((demo_run / "checkpoints").glob("step-*[0-9]"))
    main(["--model", str(newest), "--out", str(tmp_path / "checkpoint")])
    again = read_certificate(tmp_path / "checkpoint")
    assert again["model"].pop("path") == str(newest)
    assert found["model"].pop("path") == str(demo_run) and again == found


@pytest.fixture(scope="module")
def export(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small untrained model, and 700 images of four classes with names."""
    directory = tmp_path_factory.mktemp("export")
    save_export(LipNeXt(LipNeXtConfig(2, 16, 8, 2, 3, 4), seed=0), directory / "m.safetensors")
    names = ("a cat", "a dog", "a newt", "an owl")
    write_set(directory, [400, 300], "test", classes=4, class_names=names)
    return directory


def arguments(export: Path, out: Path, *more: str) -> list[str]:
    model, data = str(export / "m.safetensors"), str(export / "test-*.tar")
    return ["--model", model, "--data", data, "--out", str(out), *more]


def test_what_is_written_is_what_the_certifier_finds(export: Path, tmp_path: Path) -> None:
    """samples.csv has every sample's radius to the last digit, and the shares follow from it."""
    copy = tmp_path / "c.json"
    main(arguments(export, tmp_path, "--radii", "1/100", "0.02", "--json", str(copy)))
    facts = read_certificate(tmp_path)
    assert facts == json.loads(copy.read_text())
    rows = list(csv.DictReader((tmp_path / "samples.csv").open()))
    assert [row["name"].split()[-1] for row in rows] == [f"{n:06d}" for n in range(700)]
    results = read_results(tmp_path / "samples.csv")
    assert facts["certified_accuracy"] == {"0.01": results.share(0.01), "0.02": results.share(0.02)}
    assert facts["clean_accuracy"] == results.share() == results.correct.mean()
    assert sum(facts["histogram"]["right"]) == results.correct.sum()
    assert sum(facts["histogram"]["right"] + facts["histogram"]["wrong"]) == 700
    assert [row["samples"] for row in facts["classes"]] == [175] * 4
    target = open_target(parsed(arguments(export, tmp_path)))
    certifier = Certifier.load(export / "m.safetensors")
    assert certifier.lipschitz_bound == facts["lipschitz_bound"]
    first = next(iter(target.test.in_parts([torch.arange(256)])))
    labels, radii = certifier(first.images)
    assert labels.tolist() == results.predictions[:256].tolist()
    assert radii.tolist() == results.radii[:256].tolist()
    assert "a newt" in (tmp_path / "report.html").read_text()
    names = ("a cat", "a dog", "a newt", "an owl")
    for kind in ("label", "prediction"):
        assert [row[f"{kind}_name"] for row in rows] == [names[int(row[kind])] for row in rows]


@pytest.mark.slow
def test_a_run_keeps_its_certificate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Others, and attacks on their targets, go beside it; the same settings replace it."""
    run, beside = tmp_path / "run", tmp_path / "run" / "certificates"
    Trainer(small_recipe(run, "run.max_steps=6", "run.eval_every=0")).run()
    older, newest = run / "checkpoints" / "step-000000004", run / "checkpoints" / "latest"
    plain, train = ["--run", str(run), "--radii", "0.1"], "builtin:digits/train-*.tar.gz"
    main([*plain, "--dtype", "bfloat16"])  # no certificate: the run's own place stays free
    assert f"beside it: {beside}/bfloat16\n" in capsys.readouterr().out
    for given in (plain, ["--run", str(newest), "--radii", "1/10"]):
        main(given)
        assert "beside it" not in capsys.readouterr().out
    before = {name: (run / name).read_bytes() for name in FILES}
    for given, place in (
        (["--run", str(older), "--radii", "0.1"], "step-000000004"),
        (["--run", str(older), "--radii", "0.2"], "step-000000004_radii-0.2"),
        ([*plain[:2], "--radii", "36/255", "1", "--dtype", "float32"], "float32_radii-36_255-1"),
        ([*plain, "--data", train], "data-*"),
    ):
        main(given)
        (made,) = beside.glob(place)
        assert f"beside it: {made}\n" in capsys.readouterr().out
        assert {path.name for path in made.iterdir()} == {*FILES}
    assert len(list(beside.iterdir())) == 5
    quick = ["--samples", "4", "--steps", "1", "--restarts", "1", "--methods", "pgd"]
    attack(["--run", str(older), *quick])
    assert "Under attack" in (beside / "step-000000004" / "report.html").read_text()
    assert before == {name: (run / name).read_bytes() for name in FILES}


def parsed(given: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(given)


def certify_on(rank: int, world: int, export: Path, out: Path) -> None:
    main(arguments(export, out))


@pytest.mark.slow
def test_any_number_of_processes_writes_the_same(export: Path, tmp_path: Path) -> None:
    main(arguments(export, tmp_path / "1"))
    for world in (2, 4):
        run_processes(world, certify_on, export, tmp_path / str(world))
        for name in FILES:
            found = (tmp_path / str(world) / name).read_bytes()
            assert found == (tmp_path / "1" / name).read_bytes(), name


def test_a_stopped_command_continues(
    export: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Finished chunks are not done again, and nothing differs."""
    main(arguments(export, tmp_path / "whole"))
    seen, work = [], certify._work

    def stops(radii: Certifier, batch: TestBatch, reach: object) -> dict[str, np.ndarray]:
        seen.append(int(batch.ids[0]))
        if len(seen) == 2:
            raise KeyboardInterrupt
        return work(radii, batch, reach)

    monkeypatch.setattr(certify, "_work", stops)
    with pytest.raises(SystemExit):
        main(arguments(export, tmp_path / "stopped"))
    main(arguments(export, tmp_path / "stopped"))
    assert seen == [0, 256, 256, 512]
    for name in FILES:
        found = (tmp_path / "stopped" / name).read_bytes()
        assert found == (tmp_path / "whole" / name).read_bytes()
    assert {path.name for path in (tmp_path / "stopped").iterdir()} == {*FILES}


def test_other_arithmetics_are_named(
    export: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """bfloat16 is a fast look and no certificate; float32 is one, with its larger rounding."""
    main(arguments(export, tmp_path, "--dtype", "bfloat16"))
    facts = read_certificate(tmp_path)
    assert not facts["certified"] and "bfloat16" in facts["why_not"]
    assert "NO CERTIFICATE" in capsys.readouterr().out
    assert "Not a certificate" in (tmp_path / "report.html").read_text()
    main(arguments(export, tmp_path, "--dtype", "float32"))
    facts = read_certificate(tmp_path)
    assert facts["arithmetic"] == "float32" and 1e-7 < facts["rounding"]["features"] < 1e-2


def test_radii_that_are_all_0_are_explained(
    export: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = load_model(export / "m.safetensors")
    with torch.no_grad():
        model.head.weight[:] = model.head.weight[0]
    save_export(model, tmp_path / "m.safetensors")
    main(["--model", str(tmp_path / "m.safetensors"), "--data", str(export / "test-*.tar")])
    assert "all radii are 0, nothing is proven" in capsys.readouterr().out


@pytest.fixture(scope="module")
def broken(export: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of things that cannot be certified."""
    directory = tmp_path_factory.mktemp("broken")
    model = load_model(export / "m.safetensors")
    with torch.no_grad():
        model.groups[0].bank[0, 1, 2, 3] = float("nan")
    save_export(model, directory / "nan.safetensors")
    shutil.copy(export / "m.safetensors", directory)
    (directory / "cut.safetensors").write_bytes((export / "m.safetensors").read_bytes()[:3000])
    image = encode(np.zeros((9, 9, 3), np.uint8))
    write_tar(directory / "larger.tar", [("a.cls", b"0"), ("a.png", image)])
    return directory


MODEL = ["--model", "m.safetensors"]
GOOD = [*MODEL, "--data", "TEST"]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--run", "nowhere"], "nowhere"),
        ([], "either --run DIR or --model PATH"),
        (MODEL, "m.safetensors: is an export and needs --data"),
        ([*GOOD, "--workers", "-1"], "workers = -1"),
        ([*GOOD, "--resize", "4"], "--resize 4: must be 0 or at least 8"),
        (["--model", "nan.safetensors", "--data", "TEST"], "not finite"),
        (["--model", "cut.safetensors", "--data", "TEST"], "cut.safetensors: is not a readable"),
        ([*MODEL, "--data", "larger.tar"], "--data are 3×9×9; --resize 9 makes"),
        ([*GOOD, "b.tar"], "unrecognized arguments: b.tar; quote a pattern"),
        ([*GOOD, "--radii=-1/4"], "-1/4"),
        ([*GOOD, "--radii", "0.5", "15"], "--radii = 15: must be a distance of pixels in [0, 1]"),
        (["runs/digits"], "runs/digits; say --run runs/digits"),
        ([*GOOD, "--json", "no/such/dir/c.json"], "no/such/dir"),
        ([*GOOD, "--out", "m.safetensors"], "must be a directory"),
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
        main([str(export / "test-*.tar") if word == "TEST" else word for word in given])
    assert stopped.value.code == 2
    error = capsys.readouterr().err.strip().splitlines()
    assert said in error[-1] and len(error) == 1 and error[0].startswith("error: ")
    assert not list(broken.glob("**/certificate.json"))


def test_local_copies_of_the_run_are_used_where_they_exist(tmp_path: Path) -> None:
    """data.stage_dir of the run; a machine without it reads the shards in their own place."""
    shards, node = write_set(tmp_path / "set", [5, 3]), tmp_path / "node"
    settings = "model.depth=1 model.width=16 model.image_size=8 model.patch_size=2 "
    settings += "model.num_classes=7 data.batch_size=4 optim.epochs=1 optim.warmup_epochs=0 "
    settings += "run.max_steps=1 run.eval_every=0 run.summary=false"
    of_data = [f"data.train={shards}", f"data.test={shards}", f"data.stage_dir={node}"]
    Trainer(load_recipe(None, [*settings.split(), *of_data, f"run.dir={tmp_path}/run"])).run()
    given = parsed(["--run", str(tmp_path / "run")])
    there = open_target(given)
    assert all(Path(s.path).is_relative_to(node) for s in there.test.catalog.shards)
    shutil.rmtree(node)
    here = open_target(given)
    assert all(Path(s.path).parent == tmp_path / "set" for s in here.test.catalog.shards)
    assert not node.exists()
    assert here.test.catalog.fingerprint() == there.test.catalog.fingerprint()
