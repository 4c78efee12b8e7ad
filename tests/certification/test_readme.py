"""The Python of README.md and docs/using.md runs as it stands there."""

import re
from pathlib import Path

import pytest
import torch

from lipnext_scale.certification import load_model
from lipnext_scale.checkpoint.exports import save_export

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.slow


def test_the_python_of_the_readme_runs(
    demo_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the demo's run where the demo leaves it; the radii are those of 360 digits."""
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "digits").symlink_to(demo_run)
    save_export(load_model(demo_run), tmp_path / "digits.safetensors")
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "README.md").read_text("utf-8") + (ROOT / "docs/using.md").read_text("utf-8")
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(blocks) == 2
    certifying: dict = {}
    exec(blocks[0], certifying)
    assert certifying["radii"].shape == (360,) and 1 <= certifying["K"] < 1.001
    exported: dict = {}
    exec(blocks[0].replace("runs/digits", "digits.safetensors"), exported)
    assert torch.equal(exported["radii"], certifying["radii"])
    optimizing: dict = {}
    exec(blocks[1], optimizing)
    distance = (optimizing["bank"] - optimizing["target"]).square().mean()
    assert distance < 1e-5
