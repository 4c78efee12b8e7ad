"""Broken run directories and machines: exit code 2, one line that names it, no traceback.

All of these are found before training: where there is no run directory none comes into being, and
where there is one it is the same afterwards to the last byte.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from train_command import Cases, assert_case_refused, contents, prepare, run_train, write

ROOT = Path(__file__).parents[2]
CASES = Cases()


@CASES.add
def no_gpu(tmp: Path, config: str):
    return ["--config", config, "run.device=cuda"], ["run.device = 'cuda'", "no GPU"]


@CASES.add
def run_dir_is_a_file(tmp: Path, config: str):
    return ["--config", config, f"run.dir={config}"], [f"run.dir = '{config}'", "cannot be written"]


@CASES.add
def run_dir_under_a_file(tmp: Path, config: str):
    arguments = [f"run.dir={config}/a/run"]
    return ["--config", config, *arguments], [f"run.dir = '{config}/a/run'", "cannot be written"]


@CASES.add
def run_dir_of_another_configuration(tmp: Path, config: str):
    assert run_train("--config", config).code == 0
    arguments = ["model.width=16"]
    return ["--config", config, *arguments], [
        f"run.dir = '{tmp}/run'",
        "model.width = 8 there, 16 here",
    ]


@CASES.add
def run_dir_with_a_broken_configuration(tmp: Path, config: str):
    (tmp / "run").mkdir()
    path = write(tmp / "run/config.yaml", "- 1")
    return ["--config", config], [f"{path}: must hold a mapping"]


def checkpoint_of_a_run(tmp: Path, config: str) -> Path:
    assert run_train("--config", config).code == 0
    return tmp / "run/checkpoints/step-000000006"


def weights_of(checkpoint: Path) -> Path:
    (path,) = checkpoint.glob("*.distcp")
    return path


@CASES.add
def checkpoint_cut_off(tmp: Path, config: str):
    path = weights_of(checkpoint_of_a_run(tmp, config))
    path.write_bytes(path.read_bytes()[:1000])
    return ["--config", config], [str(path)]


@CASES.add
def checkpoint_empty(tmp: Path, config: str):
    path = checkpoint_of_a_run(tmp, config) / "facts.json"
    path.write_bytes(b"")
    return ["--config", config], [str(path)]


@CASES.add
def checkpoint_of_another_program(tmp: Path, config: str):
    path = checkpoint_of_a_run(tmp, config)
    for file in path.iterdir():
        file.unlink()
    torch.save({"weights": torch.zeros(3)}, path / "weights.pt")
    return ["--config", config], [str(path)]


@CASES.add
def checkpoint_with_a_flipped_bit(tmp: Path, config: str):
    path = weights_of(checkpoint_of_a_run(tmp, config))
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    return ["--config", config], [str(path)]


@CASES.add
def checkpoint_without_the_model(tmp: Path, config: str):
    path = weights_of(checkpoint_of_a_run(tmp, config))
    path.unlink()
    return ["--config", config], [str(path)]


@CASES.add
def run_dir_name_too_long(tmp: Path, config: str):
    arguments = [f"run.dir={tmp}/{'x' * 300}"]
    return ["--config", config, *arguments], ["run.dir = ", "cannot be written"]


@CASES.add
def model_too_large(tmp: Path, config: str):
    return ["--config", config, "model.width=100000000"], ["model.width = 100000000"]


@pytest.mark.parametrize("name", CASES)
def test_broken_run(tmp_path, monkeypatch, name):
    """A run that cannot be started or continued is refused, and left as it was."""
    assert_case_refused(CASES[name], tmp_path, monkeypatch)


# --- as a command -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["model.widht=64"], "error: model.widht = 64: unknown key; did you mean model.width?"),
        (["run.dir=small.yaml/run"], "error: run.dir = 'small.yaml/run': cannot be written: "),
    ],
    ids=["the first thing looked at", "the last thing looked at"],
)
def test_as_a_command(tmp_path, arguments, said):
    """In a process of its own stderr holds that line alone: no warning of any library either."""
    config = prepare(tmp_path)
    before = contents(tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "lipnext_scale.train", "--config", str(config), *arguments],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(said) and done.stderr.count("\n") == 1
    assert contents(tmp_path) == before
