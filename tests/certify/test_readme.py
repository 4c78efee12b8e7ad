"""What the README shows in Python runs as it stands there."""

import re
from pathlib import Path

import pytest
import torch

from lipnext_scale.certify import load_model
from lipnext_scale.weights import save_export

README = Path(__file__).parents[2] / "README.md"

pytestmark = pytest.mark.slow


def test_the_python_of_the_readme_runs(
    demo_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the demo's run where the demo leaves it; the radii are those of 360 digits."""
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "digits").symlink_to(demo_run)
    save_export(load_model(demo_run), tmp_path / "digits.safetensors")
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
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
    # Matrices of the other determinant cannot reach their target; the rest come close.
    assert distance < 0.02
