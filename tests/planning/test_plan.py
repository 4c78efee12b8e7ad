"""python -m lipnext_scale.plan: a page, figures, variants, a picture, mistakes."""

import csv
import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from lipnext_scale.checks import gpu
from lipnext_scale.plan import main
from lipnext_scale.planning import guard
from lipnext_scale.planning.prediction import CHAIN, Prediction, warnings
from lipnext_scale.planning.times import read_device
from lipnext_scale.planning.walk import Walk, Walked, walk_all

ROOT = Path(__file__).parents[2]
CONFIGS = sorted(
    path for path in (ROOT / "configs").rglob("*.yaml") if path.parent.name != "shared"
)
ONE, TWO = (str(ROOT / "configs" / f"imagenet_{size}.yaml") for size in ("1b", "2b"))
SMALL = ["model.depth=4", "model.width=768", "model.blocks_per_bank=2"]

pytestmark = pytest.mark.skipif(bool(guard.missing()), reason=guard.missing())


def test_a_page_and_its_figures(tmp_path, capsys):
    out = tmp_path / "plan.json"
    arguments = ["--nodes", "2", "--gpus-per-node", "2", "--price", "2", "--images", "25600"]
    main(["--config", ONE, *arguments, "--json", str(out), *SMALL])
    printed, found = capsys.readouterr().out, json.loads(out.read_text())
    assert "2 node(s) of 2 h100: fsdp 2 × 2, bank layout, bf16" in printed
    assert "the paper reports" not in printed  # it has another model
    for title in (
        "memory of a GPU, at most in",
        "collectives of a step",
        "assumed",
        "across nodes",
    ):
        assert title in printed
    assert found["step_ms"] == pytest.approx(sum(found["milliseconds"].values()))
    assert found["step_ms"] == pytest.approx(sum(found["causes_ms"].values()))
    steps = found["minutes_per_epoch"] * 60e3 / found["step_ms"]
    assert 100 < steps < 110  # and a retraction
    assert found["memory_peak"]["bytes"] == sum(found["memory"].values()) and found["fits"]
    hours = found["run_seconds"] / 3600 * 4
    assert f"at 2 an hour {2 * hours:,.0f}" in printed
    assert gpu.predicted(str(out))["step_all_predicted_ms"] == pytest.approx(
        found["step_ms"], rel=1e-3
    )


@pytest.mark.slow
def test_every_shipped_configuration_has_a_plan():
    """In their own widths; four blocks are enough to come by every operator."""
    walks = [Walk(str(path), ["model.depth=4"], what=CHAIN) for path in CONFIGS]
    for walk, walked in zip(walks, walk_all(walks), strict=True):
        assert isinstance(walked, Walked), (walk.config, walked)
        found = Prediction(walk, walked, read_device("h100"))
        assert found.fits and 0 < found.mfu < 0.8 and 0 < found.epoch
        assert all(": " in line or "times a step" in line for line in warnings(found))


@pytest.mark.slow
def test_two_billion_parameters_on_1024_gpus_take_seconds():
    """30 of one core, for others may use it too, and 4 GB. The paper's anchor is beside it."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "lipnext_scale.plan", "--config", TWO, "--nodes", "128"]
    command.append("data.batch_size=1024")
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "fsdp 128 × 8" in done.stdout and "the paper reports 17.8 (MFU 38%)" in done.stdout
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 30
    assert after.ru_maxrss * 1024 < 4e9


@pytest.mark.slow
def test_variants_and_the_picture_of_scaling(tmp_path, capsys):
    layout = ["--nodes", "2", "--gpus-per-node", "2", *SMALL, "data.batch_size=8"]
    main(["--config", ONE, "--compare", *layout])
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.lstrip().startswith("*") for line in lines[1:]) == 1
    shown = "\n".join(lines)
    for variant in (
        "weight_layout=row",
        "engine=ddp",
        "shard_size=4",
        "batch_size=16",
        "1 node(s)",
    ):
        assert variant in shown
    main(["--config", ONE, "--scaling", str(tmp_path / "scaling.png"), *layout])
    rows = list(csv.DictReader((tmp_path / "scaling.csv").open()))
    strong = {int(r["gpus"]): r for r in rows if r["kind"] == "strong"}
    assert sorted(strong) == [1 << k for k in range(11)]
    assert strong[8]["batch"] == "8" and strong[1024]["batch"] == "1024"
    assert strong[1024]["limit"].endswith("too few images a GPU")
    assert (tmp_path / "scaling.png").stat().st_size > 10_000


def test_operators_of_a_phase(capsys):
    main(["--config", ONE, "--gpus-per-node", "1", "--operators", "manifold", *SMALL])
    assert "lipnext::moments_" in capsys.readouterr().out


MISTAKES = [
    (["--gpu", "h200"], "--gpu = 'h200': must be one of h100, a100, b200, rtx4090, cpu"),
    (["--nodes", "0"], "argument --nodes: 0 must be a whole number from 1"),
    (["--gpus-per-node", "3"], "data.batch_size = 256: must be a multiple of 3 process"),
    (["parallel.shard_size=3"], "parallel.shard_size = 3: must divide"),
    (["--rates", "none.json"], "--rates = 'none.json': must be a file that"),
    (["--operators", "foward"], "--operators = 'foward': must be one of step, forward"),
    (
        ["parallel.engine=deepspeed", "parallel.offload_optimizer=true"],
        "parallel.offload_optimizer = True: cannot be planned",
    ),
    (["model.widht=64"], "model.widht = 64: unknown key; did you mean model.width"),
]


@pytest.mark.parametrize("arguments, message", MISTAKES, ids=[" ".join(a) for a, _ in MISTAKES])
def test_a_mistake_is_one_line(arguments, message, capsys):
    with pytest.raises(SystemExit) as end:
        main(["--config", ONE, *SMALL, *arguments])
    out, error = capsys.readouterr()
    assert (end.value.code, out) == (2, "")
    assert error.startswith(f"error: {message}") and error.count("\n") == 1
