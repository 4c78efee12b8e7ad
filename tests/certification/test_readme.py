"""The Python of README.md and docs/using.md runs as it stands there."""

import re
from pathlib import Path

import pytest
import torch

from lipnext_scale.certification import load_model
from lipnext_scale.checkpoint.exports import save_export
from lipnext_scale.config.recipe import load_recipe
from lipnext_scale.training.trainer import Trainer

ROOT = Path(__file__).parents[2]


def blocks(name: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / name).read_text("utf-8"), re.DOTALL)


def test_the_python_of_the_readme_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a run where the demo leaves it, of few steps; the radii are those of 360 digits."""
    monkeypatch.chdir(tmp_path)
    settings = ["run.max_steps=2", "run.eval_every=0", "run.summary=false", "model.depth=2"]
    Trainer(load_recipe("builtin:digits.yaml", settings)).run()
    save_export(load_model("runs/digits"), tmp_path / "digits.safetensors")
    (block,) = blocks("README.md")
    certifying: dict = {}
    exec(block, certifying)
    assert certifying["radii"].shape == (360,) and 1 <= certifying["K"] < 1.001
    exported: dict = {}
    exec(block.replace("runs/digits", "digits.safetensors"), exported)
    assert torch.equal(exported["radii"], certifying["radii"])


def test_the_optimizer_of_the_docs_reaches_its_target() -> None:
    """Which it cannot where start and target differ in the sign of a determinant."""
    (block,) = blocks("docs/using.md")
    found: dict = {}
    exec(block, found)
    start, bank, target = (found[name].detach() for name in ("start", "bank", "target"))
    assert (bank - target).square().mean() < 1e-3 * (start - target).square().mean()
