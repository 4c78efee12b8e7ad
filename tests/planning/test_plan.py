"""python -m lipnext_scale.plan: a page, figures, variants, a picture, mistakes."""

import csv
import json
import resource
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from lipnext_scale import plan
from lipnext_scale.checks import gpu
from lipnext_scale.config.recipe import Recipe
from lipnext_scale.plan import main
from lipnext_scale.planning import guard, scaling
from lipnext_scale.planning.ledger import Row
from lipnext_scale.planning.prediction import CHAIN, Prediction, variants, warnings
from lipnext_scale.planning.times import read_device
from lipnext_scale.planning.walk import Walk, Walked, walk_all
from lipnext_scale.utils.errors import UserError

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
    """In their own widths; two blocks are enough to come by every operator."""
    walks = [Walk(str(path), ["model.depth=2"], what=CHAIN) for path in CONFIGS]
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


REFUSED = ["refused: parallel.shard_size = 3", "refused: parallel.offload_optimizer = True: cannot"]


@pytest.mark.slow
def test_variants_with_the_best_marked_and_the_others_reasons(monkeypatch, capsys):
    def some(walk: Walk, recipe: Recipe) -> dict[str, Walk]:
        found = variants(walk, recipe)
        assert {"as configured", "engine=ddp", "shard_size=4", "1 node(s) of 2"} < found.keys()
        assert 10 <= len(found) <= 18
        slow = replace(walk, settings=[*walk.settings, "data.batch_size=131072"], what=CHAIN)
        odd = replace(walk, settings=[*walk.settings, "parallel.shard_size=3"], what=CHAIN)
        host = [*walk.settings, "parallel.engine=deepspeed", "parallel.offload_optimizer=true"]
        row = "weight_layout=row"
        return {"base": found["as configured"], row: found[row], "large": slow, "odd": odd} | {
            "offload": replace(walk, settings=host)
        }

    monkeypatch.setattr(plan, "variants", some)
    main(["--config", ONE, "--compare", "--nodes", "2", "--gpus-per-node", "2", *SMALL])
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("  * ") for line in lines) == 1
    for line, reason in zip(lines[4:], ("memory full: there is 84.8 GB", *REFUSED), strict=False):
        assert reason in line


@pytest.mark.slow
def test_the_picture_of_scaling(tmp_path, monkeypatch):
    monkeypatch.setattr(scaling, "MOST", 4)
    layout = ["--nodes", "2", "--gpus-per-node", "1", *SMALL, "data.batch_size=2"]
    main(["--config", ONE, "--scaling", str(tmp_path / "scaling.png"), *layout])
    rows = list(csv.DictReader((tmp_path / "scaling.csv").open()))
    batches = {(r["kind"], r["gpus"]): r["batch"] for r in rows}
    assert [batches["strong", n] for n in "124"] == ["2", "2", "4"]
    assert [batches["weak", n] for n in "124"] == ["1", "2", "4"]
    assert rows[-2]["limit"].endswith("too few images a GPU") and "too" not in rows[-1]["limit"]
    assert (tmp_path / "scaling.png").stat().st_size > 10_000


def test_operators_of_a_phase(capsys):
    row = Row("kernel", "manifold", "lipnext::moments_", "here.py:1", False, read=10**6)
    plan.operators([row], "manifold", read_device("h100"))
    assert "lipnext::moments_  here.py:1" in capsys.readouterr().out
    with pytest.raises(UserError, match="^--operators = 'foward': must be one of manifold$"):
        plan.operators([row], "foward", read_device("h100"))


MISTAKES = [
    (["--gpu", "h200"], "--gpu = 'h200': must be one of h100, a100, b200, rtx4090, cpu"),
    (["--nodes", "0"], "argument --nodes: 0 must be a whole number from 1"),
    (["--gpus-per-node", "3"], "data.batch_size = 256: must be a multiple of 3 process"),
    (["--scaling", "none/x.png"], "--scaling = 'none/x.png': none must be a directory"),
    (["--rates", "none.json"], "--rates = 'none.json': must be a file that"),
    (["model.widht=64"], "model.widht = 64: unknown key; did you mean model.width"),
]


@pytest.mark.parametrize("arguments, message", MISTAKES, ids=[" ".join(a) for a, _ in MISTAKES])
def test_a_mistake_is_one_line(arguments, message, capsys):
    with pytest.raises(SystemExit) as end:
        main(["--config", ONE, *SMALL, *arguments])
    out, error = capsys.readouterr()
    assert (end.value.code, out) == (2, "")
    assert error.startswith(f"error: {message}") and error.count("\n") == 1
