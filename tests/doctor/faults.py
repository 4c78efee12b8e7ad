"""A small run to be broken, and places that are small or cannot be written."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from sets_making import write_set

from lipnext_scale.checks import Finding
from lipnext_scale.config.recipe import Recipe, load_recipe

ROOT = Path(__file__).parents[2]
DIGITS = str(ROOT / "configs" / "digits.yaml")
SMALL = [
    "data.batch_size=4",
    "model.depth=1",
    "model.width=16",
    "model.image_size=8",
    "model.patch_size=2",
    "model.num_classes=7",
]


def small_recipe(tmp: Path, *overrides: str) -> Recipe:
    """Two sets with an index under tmp/data, and a run under tmp/run."""
    train = write_set(tmp / "data", [6, 6], "train")
    test = write_set(tmp / "data", [4], "test")
    where = [f"data.train={train}", f"data.test={test}", f"run.dir={tmp / 'run'}"]
    return load_recipe(None, [*where, *SMALL, *overrides])


def the(findings: list[Finding], check: str) -> Finding:
    """The one finding of a check."""
    [found] = [finding for finding in findings if finding.check == check]
    return found


@contextmanager
def mounted(path: Path, options: str) -> Iterator[Path]:
    """A tmpfs, where this process may mount one."""
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(path)]
    tried = subprocess.run(command, capture_output=True, text=True)
    if tried.returncode:
        pytest.skip(f"no tmpfs can be mounted here: {tried.stderr.strip()}")
    try:
        yield path
    finally:
        subprocess.run(["umount", str(path)], check=True)
