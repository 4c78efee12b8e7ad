"""`--print-config` and the configuration that a run keeps."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from train_command import contents, prepare, run_train

from lipnext_scale.recipe import load_recipe

ROOT = Path(__file__).parents[2]
SHIPPED = sorted((ROOT / "configs").glob("*.yaml"))


def test_prints_yaml_that_loads_to_the_same_recipe(tmp_path):
    """What is printed, saved as a file, is the same recipe; and no run directory was made."""
    config = prepare(tmp_path)
    arguments = ["loss.epsilon=36/255", "optim.lr=1e-3", "optim.betas=[0.5, 0.75]"]
    before = contents(tmp_path)
    outcome = run_train("--config", str(config), "--print-config", *arguments)
    assert (outcome.code, outcome.err) == (0, "")
    assert contents(tmp_path) == before
    printed = tmp_path / "printed.yaml"
    printed.write_text(outcome.out, encoding="utf-8")
    recipe = load_recipe(str(printed))
    assert recipe == load_recipe(str(config), arguments)
    assert (recipe.loss.epsilon, recipe.optim.lr) == (36 / 255, 0.001)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_prints_every_shipped_configuration(tmp_path, monkeypatch, path):
    """A shipped recipe can be looked at without its data, and is complete without its bases."""
    monkeypatch.chdir(tmp_path)
    outcome = run_train("--print-config", "--config", str(path))
    assert (outcome.code, outcome.err) == (0, "")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "printed.yaml").write_text(outcome.out, encoding="utf-8")
    assert load_recipe("printed.yaml") == load_recipe(str(path))


def test_a_run_keeps_its_configuration(tmp_path):
    """config.yaml in the run directory is what --print-config prints for the same arguments."""
    config = prepare(tmp_path)
    assert run_train("--config", str(config), "run.max_steps=1").code == 0
    printed = run_train("--config", str(config), "run.max_steps=1", "--print-config").out
    assert (tmp_path / "run/config.yaml").read_text(encoding="utf-8") == printed


def test_as_a_command(tmp_path):
    """In a process of its own, started elsewhere, it prints YAML and nothing to stderr."""
    done = subprocess.run(
        [
            sys.executable,
            *("-m", "lipnext_scale.train", "--print-config"),
            *("--config", str(ROOT / "configs/digits.yaml"), "run.seed=5"),
        ],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "printed.yaml").write_text(done.stdout, encoding="utf-8")
    expected = load_recipe(str(ROOT / "configs/digits.yaml"), ["run.seed=5"])
    assert load_recipe(str(tmp_path / "printed.yaml")) == expected
