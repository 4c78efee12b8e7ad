"""docs/first_hour.md, line by line, in one process; and wrong moves of a first hour."""

import importlib
import json
import re
import shlex
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from lipnext_scale.cli import main

ROOT = Path(__file__).parents[2]
QUICK = ["optim.epochs=1", "optim.warmup_epochs=0", "model.depth=1", "run.summary=false"]


# What is typed after `lipnext`, and what the line that answers it names.
WRONG_MOVES = [
    ("train configs/digits.yaml", "--config configs/digits.yaml"),
    ("train --config configs/digit.yaml", "did you mean configs/digits.yaml"),
    ("train --config builtin:digit.yaml", "digits.yaml"),
    ("train --config configs/digits.yaml model.widht=64", "did you mean model.width"),
    ("train --config configs/digits.yaml model.depth=six", "model.depth"),
    ("train --config configs/digits.yaml loss.epsilon=36", "36/255"),
    ("train --config configs/digits.yaml data.train=none/*.tar", "none/*.tar"),
    ("train --config runs/a/config.yaml optim.epochs=80", "run.init_from=runs/a"),
    ("train --config runs/a/config.yaml run.dir=runs/c run.init_from=runs/noise", "model."),
    (
        "train --config runs/own_images/config.yaml run.dir=runs/c data.augment.resize=[0,0]",
        "data.augment.resize=[64,82] data.augment.crop_padding=0",
    ),
    ("certify runs/a", "--run runs/a"),
    ("certify --run runs/d", "runs/d"),
    ("certify --run runs/a --radii 36", "36/255"),
    ("certify --run runs/a --data photos", "data_prep.folders photos"),
    ("certify --run runs/a --data x-0.tar x-1.tar", "quote a pattern"),
    ("certify --model digits.safetensors", "needs --data"),
    ("export --run runs/a --out x.pt", "NAME.safetensors"),
    ("predict --model runs/a photo.png", "photo.png"),
    ("predict --model photos photo.jpg", "photos"),
    ("predict --model runs/own_images runs/a/checkpoints", "runs/a/checkpoints"),
    ("compare runs/a photos", "photos"),
    ("attack --run runs/a --steps 0", "--steps"),
    ("trian --config configs/digits.yaml", "train"),
]


def steps(page: str) -> list[str]:
    """Commands and blocks of Python, in their order."""
    text = (ROOT / "docs" / page).read_text("utf-8")
    found = re.findall(
        r"^```python\n(.*?)```|^    (python -m [^\n]*)", text, re.DOTALL | re.MULTILINE
    )
    return [block or command for block, command in found]


def draw(path: Path, seed: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 256, (70, 80, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)


def take(step: str) -> None:
    """As a shell would, or Python; a command's process is this one."""
    if not step.startswith("python -m "):
        exec(step, {})
        return
    module, *arguments = shlex.split(step.removeprefix("python -m "))
    quick = QUICK if module == "lipnext_scale.train" else []
    importlib.import_module(module).main([*arguments, *quick])


def answer(move: str, capsys) -> str:
    with pytest.raises(SystemExit) as ended:
        main(shlex.split(move))
    assert ended.value.code == 2, move
    return capsys.readouterr().err


@pytest.mark.slow
def test_every_step_of_the_first_hour_and_wrong_moves(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    for number in range(96):
        draw(tmp_path / "photos" / "abc"[number % 3] / f"{number}.jpg", number)
        draw(tmp_path / "flowers" / "xy"[number % 2] / f"{number}.png", number)
    draw(tmp_path / "photo.jpg", 0)
    said = {}
    for step in steps("first_hour.md"):
        take(step)
        said[step] = capsys.readouterr().out
    assert len(said) >= 18
    assert "and a new head: 2 classes, not 3" in next(
        s for c, s in said.items() if "flowers" in c and "train" in c.split()[2]
    )
    for made in (
        *("runs/own_images/report.html", "found.csv", "sheet.png", "comparison/compare.png"),
        *("runs/a/attack.json", "digits.safetensors", "runs/noise/metrics.jsonl"),
    ):
        assert (tmp_path / made).stat().st_size > 0, made
    own = json.loads((tmp_path / "runs/a/certificate.json").read_bytes())
    assert "0.5" in own["certified_accuracy"]
    assert len(list((tmp_path / "runs/a/certificates").iterdir())) == 1
    for move, named in WRONG_MOVES:
        line = answer(move, capsys)
        assert line.startswith("error: ") and line.count("\n") == 1 and named in line, (move, line)
    assert not (tmp_path / "runs/c").exists()
